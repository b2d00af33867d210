"""A column is declared once, and then follows its request wherever rows go: nothing else has to know of it."""

import numpy as np
import pytest

from jaxrunner.batch import Column, ColumnTable, InputBatch, input_batch, update_states
from jaxrunner.batch.columns import declared_columns
from jaxrunner.protocol import CachedRequestData, NewRequestData, SchedulerOutput

NAMES = "ABCD"
EXTRA = Column("extra", np.int64, -7, (2,))
SCORES = Column("scores", np.float32, valid="num_tokens", shape=(17,))  # a value for each token


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> InputBatch:
    """Four requests in rows 0..3 and an index to spare. Each is marked in the columns that only this file declares."""
    monkeypatch.setattr(input_batch, "declared_columns", lambda *limits: (*declared_columns(*limits), EXTRA, SCORES))
    batch = InputBatch(max_num_reqs=5, max_model_len=16, max_num_batched_tokens=64, vocab_size=99, block_sizes=(4,))
    new = [NewRequestData(r, [1, 2], ([i + 1],)) for i, r in enumerate(NAMES)]
    update_states(
        batch, SchedulerOutput(new, num_scheduled_tokens=dict.fromkeys(NAMES, 2), total_num_scheduled_tokens=8)
    )
    for i, req_id in enumerate(NAMES):
        index = batch.requests[req_id].request_index
        assert batch.columns["extra"][index].tolist() == [-7, -7]
        batch.columns["extra"][index] = [i, 10 * i]
        batch.columns["scores"][index, :2] = [i, i / 2]
    return batch


def cached(ids: str, resumed: str = "", preempted: str = "", finished: str = "") -> SchedulerOutput:
    blocks = [([20 + i],) if r in resumed else None for i, r in enumerate(ids)]
    return SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(list(ids), set(resumed), blocks, [0] * len(ids), [0] * len(ids)),
        num_scheduled_tokens=dict.fromkeys(ids, 2),
        total_num_scheduled_tokens=2 * len(ids),
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
    )


def marks(batch: InputBatch) -> dict[str, list[float]]:
    """What each row leads to in the two columns, by the request that the row says it has."""
    found = {}
    for row, req_id in enumerate(batch.req_ids):
        index = batch.idx_mapping[row]
        valid = batch.columns.snapshot(index)
        found[req_id] = valid["extra"].tolist() + valid["scores"].tolist()
    return found


MARKS = {r: [i, 10 * i, i, i / 2] for i, r in enumerate(NAMES)}


def test_condense(batch: InputBatch) -> None:
    update_states(batch, cached("BD", finished="A"))  # C is merely unscheduled
    assert batch.req_ids == ["D", "B"]
    assert marks(batch) == {r: MARKS[r] for r in "BD"}
    update_states(batch, cached("BCD"))
    assert marks(batch) == {r: MARKS[r] for r in "BCD"}


def test_reorder_and_swap(batch: InputBatch) -> None:
    batch.reorder([2, 0, 3, 1])
    assert batch.req_ids == ["C", "A", "D", "B"] and marks(batch) == MARKS
    batch.swap_states(0, 3)
    assert batch.req_ids == ["B", "A", "D", "C"] and marks(batch) == MARKS


def test_preempt_and_resume(batch: InputBatch) -> None:
    """The index goes to whoever comes next, who finds nothing of it; the others keep what they have."""
    index = batch.requests["B"].request_index
    update_states(batch, cached("ACD", preempted="B"))
    assert batch.columns["extra"][index].tolist() == [-7, -7]
    assert marks(batch) == {r: MARKS[r] for r in "ACD"}
    plan = cached("ACD")
    plan.scheduled_new_reqs = [NewRequestData("E", [5, 6, 7], ([9],))]
    plan.num_scheduled_tokens["E"], plan.total_num_scheduled_tokens = 3, 9
    update_states(batch, plan)
    assert batch.requests["E"].request_index == index
    assert marks(batch)["E"][:2] == [-7, -7]
    update_states(batch, cached("ABCD", resumed="B", finished="E"))
    assert marks(batch) == MARKS | {"B": [-7, -7, *marks(batch)["B"][2:]]}
    assert len(marks(batch)["B"]) == 2 + 2  # as many scores as it has tokens


def test_every_column_of_a_freed_index_is_as_in_a_new_batch(batch: InputBatch) -> None:
    index = batch.requests["C"].request_index
    assert batch.block_table[0].table[index].any()
    update_states(batch, cached("ABD", finished="C"))
    assert not batch.block_table[0].table[index].any()
    for column in batch.columns.columns:
        if column.valid is None:
            assert (batch.columns[column.name][index] == column.fill).all(), column.name
    assert {
        name: len(values) for name, values in batch.columns.snapshot(index).items() if name in ("token_ids", "scores")
    } == {
        "token_ids": 0,
        "scores": 0,
    }


def test_swap_states_keeps_both_directions(batch: InputBatch) -> None:
    indices = {r: batch.requests[r].request_index for r in NAMES}
    batch.swap_states(1, 2)
    assert batch.req_ids == ["A", "C", "B", "D"]
    assert batch.req_id_to_index == {"A": 0, "C": 1, "B": 2, "D": 3}
    assert batch.idx_mapping[:4].tolist() == [indices[r] for r in batch.req_ids]
    assert [batch.row_of_index[indices[r]] for r in batch.req_ids] == [0, 1, 2, 3]
    batch.swap_states(2, 2)
    assert batch.req_ids == ["A", "C", "B", "D"]


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4]])
def test_only_permutations_reorder(batch: InputBatch, order: list[int]) -> None:
    with pytest.raises(ValueError, match=r"order must be a permutation of 0\.\.3, got \["):
        batch.reorder(order)
    assert batch.req_ids == list(NAMES) and marks(batch) == MARKS


def test_the_lowest_row_given_up_is_taken_first(batch: InputBatch) -> None:
    plan = cached("AD", finished="BC")
    plan.scheduled_new_reqs = [NewRequestData("E", [5], ([9],)), NewRequestData("F", [6], ([10],))]
    plan.num_scheduled_tokens |= {"E": 1, "F": 1}
    plan.total_num_scheduled_tokens = 6
    update_states(batch, plan)
    assert batch.req_ids == ["A", "E", "F", "D"]


def test_each_that_entered_is_told_to_the_device_once(batch: InputBatch) -> None:
    """All that are new or came back since the last step, but none that has gone again."""
    everyone = sorted(batch.requests[r].request_index for r in NAMES)
    batch.remove_request("D")
    assert sorted(batch.take_entered()) == everyone[:3]
    assert batch.take_entered() == []
    update_states(batch, cached("AC", preempted="B"))
    for _ in range(2):  # the second time it is preempted and resumed in one step
        update_states(batch, cached("ABC", resumed="B"))
    assert batch.take_entered() == [batch.requests["B"].request_index]


def test_table() -> None:
    table = ColumnTable([Column("n", np.int32), Column("wide", np.int32, 3, (4,), valid="n"), EXTRA], 2)
    assert table["n"].tolist() == [0, 0] and table["wide"].tolist() == [[3] * 4] * 2
    table["n"][1], table["wide"][1], table["extra"][1] = 2, [5, 6, 7, 8], 1
    picture = table.snapshot(1)
    assert {name: values.tolist() for name, values in picture.items()} == {"n": 2, "wide": [5, 6], "extra": [1, 1]}
    table.clear([1])
    assert picture["extra"].tolist() == [1, 1]  # a copy
    assert table["n"][1] == 0 and table["extra"][1].tolist() == [-7, -7]
    assert table["wide"][1].tolist() == [5, 6, 7, 8]  # garbage behind a count of 0


def test_no_name_twice() -> None:
    with pytest.raises(ValueError, match=r"a column is declared twice: \['n', 'n'\]"):
        ColumnTable([Column("n", np.int32), Column("n", np.int64)], 1)
