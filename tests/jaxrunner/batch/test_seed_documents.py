"""The worked examples of the two documents the project started from, through the project's own batch."""

import numpy as np
import pytest

from jaxrunner.batch import (
    InputBatch,
    StepInputs,
    map_to_kernel_blocks,
    prepare_inputs,
    spec_decode_metadata,
    split_order,
    update_states,
)
from jaxrunner.batch.block_table import BlockTable, select_common_block_size
from jaxrunner.protocol import CachedRequestData, NewRequestData, SchedulerOutput
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.shapes import StepShapes
from scripts.packed import one_step, pack
from tests.cases_by_id import case


def real(inputs: StepInputs, name: str) -> list:
    """A per-token, per-row or per-logits-row array without its padding."""
    n, t = inputs.num_reqs, inputs.num_tokens
    values = getattr(inputs, name)
    length = {"query_start_loc": n + 1, "seq_lens": n, "discard": n, "logits_indices": inputs.num_logits}.get(name, t)
    return (values() if callable(values) else values)[:length].tolist()


@pytest.mark.parametrize("case_id", ["seed1_boundaries", "seed1_six_tokens", "seed2_six_tokens"])
def test_flat_stream(case_id: str) -> None:
    given, expected = case("seed_cases", case_id)
    computed = given.get("num_computed", [0] * len(given["num_scheduled"]))
    # null in a document's table: a block the example never touches; any id serves.
    tables = given.get("block_table") and [[b or 50 + i for i, b in enumerate(row)] for row in given["block_table"]]
    inputs = one_step(given["num_scheduled"], computed, tables=tables, block_size=given.get("block_size", 4))
    assert inputs.layout.num_tokens == inputs.num_tokens
    for name, values in expected.items():
        if name == "visible_keys":
            visible = inputs.positions[: inputs.num_tokens] + 1
            assert visible.tolist() == values
        elif name == "at_most_sampled":
            assert inputs.num_logits == values
        else:
            assert real(inputs, name) == values, name


def test_minimal_experiment() -> None:
    given, expected = case("seed_cases", "seed1_minimal_experiment")
    # A has 9 tokens and computes the last; B's prompt is longer than its chunk.
    inputs = one_step(given["num_scheduled"], given["num_computed"], tokens=[9, 10])
    assert inputs.req_ids == given["req_ids"]
    for name, values in expected.items():
        assert real(inputs, name) == values, name


def test_pack() -> None:
    given, expected = case("seed_cases", "seed2_pack")
    requests, width, dim = given["padded_shape"]
    result = pack(given["lengths"], width, dim)
    assert len(given["lengths"]) == requests
    for name, values in expected.items():
        assert result[name] == values, name
    padded = np.arange(requests * width * dim).reshape(given["padded_shape"])
    assert result["packed"] == [padded[r, o].tolist() for r, o in expected["source_rows"]]


def batch_of(ids: list[str], params: dict | None = None) -> InputBatch:
    batch = InputBatch(max_num_reqs=8, max_model_len=16, max_num_batched_tokens=64, vocab_size=100, block_sizes=(4,))
    so = SchedulerOutput(
        scheduled_new_reqs=[NewRequestData(r, [1], ([i + 1],)) for i, r in enumerate(ids)],
        num_scheduled_tokens=dict.fromkeys(ids, 1),
        total_num_scheduled_tokens=len(ids),
    )
    update_states(batch, so)
    return batch


def condense_of_the_document() -> tuple[list[str], list[str], list[str]]:
    given, expected = case("seed_cases", "seed1_condense")
    return given["rows"], given["remove"], expected["rows"]


@pytest.mark.parametrize(
    ("rows", "remove", "left"),
    [
        condense_of_the_document(),
        (["0", "1", "2", "3"], ["0", "2"], ["3", "1"]),  # the last row fills the lowest hole; then none is above
        (["0", "1", "2"], ["2"], ["0", "1"]),
        (["0", "1"], ["0", "1"], []),
    ],
)
def test_condense(rows: list[str], remove: list[str], left: list[str]) -> None:
    batch = batch_of(rows)
    for req_id in remove:
        batch.remove_request(req_id)
    batch.condense()
    assert batch.req_ids == left
    assert batch.req_id_to_index == {r: i for i, r in enumerate(left)}


def test_kernel_blocks() -> None:
    given, expected = case("seed_cases", "seed1_kernel_blocks")
    table = BlockTable(2, 128, given["manager_block_size"], given["kernel_block_size"])
    table.add_row(given["manager_ids"], 1)
    assert table.row(1).tolist() == expected["kernel_ids"]
    given, expected = case("runner_cases", "kernel_blocks")
    assert map_to_kernel_blocks(np.array(given["ids"], np.int32), given["ratio"]).tolist() == expected["ids"]


def test_flatten_positions() -> None:
    given, expected = case("runner_cases", "flatten_positions")
    width = given["max_model_len"]
    totals = [c + s for c, s in zip(given["num_computed"], given["num_scheduled"], strict=True)]
    # Token p of request r is r * width + p: what is gathered then shows from where.
    tokens = [[r * width + p for p in range(n)] for r, n in enumerate(totals)]
    inputs = one_step(given["num_scheduled"], given["num_computed"], token_ids=tokens)
    gathered = inputs["token_ids"][: inputs.num_tokens].tolist()
    assert gathered == expected.pop("token_gather")
    for name, values in expected.items():
        assert real(inputs, name) == values, name


def test_discard_by_counts() -> None:
    given, expected = case("runner_cases", "discard_mask")
    inputs = one_step(given["num_scheduled"], given["num_computed"], tokens=given["num_tokens"])
    assert real(inputs, "discard") == expected["discard"]


def test_spec_decode_metadata() -> None:
    given, expected = case("runner_cases", "spec_metadata")
    metadata = spec_decode_metadata(np.array(given["cu_num_scheduled"]), np.array(given["num_draft"]))
    names = {
        "cu_num_draft": "cu_num_draft_tokens",
        "cu_num_sampled": "cu_num_sampled_tokens",
        "draft_token_input_positions": "draft_token_positions",
    }
    for name, values in expected.items():
        assert getattr(metadata, names.get(name, name)).tolist() == values, name


@pytest.mark.parametrize(
    "case_id",
    [
        "reorder_decode_prefill_mixed",
        "reorder_long_extend_prefill",
        "reorder_nine",
        "reorder_one_token_prefill",
        "reorder_thr5",
    ],
)
def test_reorder(case_id: str) -> None:
    given, expected = case("runner_cases", case_id)
    scheduled, computed, prompt = np.array(given["sched_computed_prompt"]).T
    assert split_order(scheduled, computed, prompt, given["threshold"]) == expected["order"]


def test_reorder_moves_the_rows() -> None:
    """The order that ``split_order`` names is what the batch does, and the scheduler's counts go along."""
    from jaxrunner.batch import reorder_decodes_first

    batch = InputBatch(max_num_reqs=4, max_model_len=64, max_num_batched_tokens=64, vocab_size=100, block_sizes=(4,))
    counts = {"prefill": 5, "decode": 1, "extend": 3}
    new = [
        NewRequestData("prefill", [1] * 5, ([1, 2],), 0),
        NewRequestData("decode", [2, 3], ([3],), 1, prefill_token_ids=[2, 3]),
        NewRequestData("extend", [4] * 9, ([4, 5, 6],), 6),
    ]
    so = SchedulerOutput(new, num_scheduled_tokens=counts, total_num_scheduled_tokens=9)
    update_states(batch, so)
    batch.columns["num_prompt_tokens"][batch.requests["decode"].request_index] = 1
    batch.requests["decode"].num_prompt_tokens = 1
    assert reorder_decodes_first(batch)
    assert batch.req_ids == ["decode", "extend", "prefill"]
    inputs = prepare_inputs(batch, so, StepShapes(64, 4, min_block_size=4))
    assert inputs.query_start_loc[:4].tolist() == [0, 1, 4, 9]
    assert inputs["token_ids"][:9].tolist() == [3, 4, 4, 4, 1, 1, 1, 1, 1]
    assert not reorder_decodes_first(batch)


def test_move_row() -> None:
    given, expected = case("runner_cases", "move_row")
    table = BlockTable(2, 16, 4)
    for row, ids in enumerate(given["rows"]):
        table.add_row(ids, row)
    table.move_row(*given["move"])
    assert table.row(0).tolist() == expected["row0"]
    assert table.table[1, :3].tolist() == expected["row1"]
    assert table.num_blocks.tolist() == [2, 0]


def test_select_block_size() -> None:
    given, expected = case("runner_cases", "select_block")
    for (manager, *supported), right in zip(given["cases"], expected["out"], strict=True):
        if right == "ValueError":
            with pytest.raises(ValueError, match=f"divides the manager's block size {manager}"):
                select_common_block_size(manager, supported)
        else:
            assert select_common_block_size(manager, supported) == right


def test_allowed_ids_stay_with_their_request() -> None:
    """Sampling parameters are reached through the row's request, so no move can leave a stale copy behind."""
    given, expected = case("runner_cases", "allowed_mask_condense")
    allowed = given["constrained"]["2"]
    batch = InputBatch(max_num_reqs=4, max_model_len=16, max_num_batched_tokens=64, vocab_size=100, block_sizes=(4,))
    params = [SamplingParams(), SamplingParams(), SamplingParams(allowed_token_ids=allowed)]
    new = [NewRequestData(str(i), [1], ([i + 1],), 0, p) for i, p in enumerate(params)]
    counts = dict.fromkeys("012", 1)
    update_states(batch, SchedulerOutput(new, num_scheduled_tokens=counts, total_num_scheduled_tokens=3))
    batch.remove_request(str(given["remove"]))
    batch.condense()
    assert [int(r) for r in batch.req_ids] == expected["order"]
    assert list(batch.requests[batch.req_ids[0]].sampling_params.allowed_token_ids) == expected["row0_allowed"]
    assert batch.idx_mapping[2] == -1  # the vacated row leads nowhere
    update_states(
        batch,
        SchedulerOutput(
            [NewRequestData("3", [1], ([9],), 0, SamplingParams())],
            CachedRequestData(["1", "2"], set(), [None, None], [0, 0], [0, 0]),
            {"1": 1, "2": 1, "3": 1},
            3,
        ),
    )
    assert batch.requests[batch.req_ids[2]].sampling_params.allowed_token_ids is None


def test_resident_requests_take_differences() -> None:
    """The document's common path: computed count overwritten, new blocks appended; a resumed request's replaced."""
    batch = batch_of(["A", "B"])
    batch.num_tokens[:2] += 1
    so = SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(["A", "B"], set(), [([9],), None], [1, 1], [1, 1]),
        num_scheduled_tokens={"A": 1, "B": 1},
        total_num_scheduled_tokens=2,
    )
    update_states(batch, so)
    assert batch.block_ids_of("A").tolist() == [1, 9] and batch.block_ids_of("B").tolist() == [2]
    so = SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(["A"], {"A"}, [([5],)], [0], [1]),
        num_scheduled_tokens={"A": 2},
        total_num_scheduled_tokens=2,
    )
    update_states(batch, so)
    assert batch.block_ids_of("A").tolist() == [5]
    assert batch.req_ids == ["A"] and set(batch.requests) == {"A", "B"}  # B is unscheduled, not forgotten
