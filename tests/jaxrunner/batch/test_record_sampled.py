"""Sampled tokens become part of their requests, or nothing happens."""

import numpy as np
import pytest

from jaxrunner.batch import BlockTable, InputBatch, record_sampled, update_states
from jaxrunner.protocol import NewRequestData, SchedulerOutput


def batch(drafts: int = 0) -> InputBatch:
    """Three requests of two tokens in one step."""
    b = InputBatch(
        max_num_reqs=3,
        max_model_len=5,
        max_num_batched_tokens=16,
        vocab_size=100,
        block_sizes=(4,),
        num_speculative_tokens=drafts,
    )
    new = [NewRequestData(r, [1, 2], ([i + 1],)) for i, r in enumerate("ABC")]
    update_states(b, SchedulerOutput(new, num_scheduled_tokens=dict.fromkeys("ABC", 2), total_num_scheduled_tokens=6))
    return b


def tokens(b: InputBatch) -> list[list[int]]:
    return [b.token_ids_of(r).tolist() for r in "ABC"]


def test_one_token_a_row_and_none_for_a_discarded_one() -> None:
    b = batch()
    assert record_sampled(b, np.array([[7], [-1], [9]], np.int32)) == [[7], [], [9]]
    assert tokens(b) == [[1, 2, 7], [1, 2], [1, 2, 9]]
    assert record_sampled(b, np.array([[3], [4], [5]], np.int32)) == [[3], [4], [5]]
    assert tokens(b) == [[1, 2, 7, 3], [1, 2, 4], [1, 2, 9, 5]]


def test_several_tokens_a_row() -> None:
    b = batch(drafts=2)
    sampled = np.array([[7, 8, -1], [-1, -1, -1], [4, 5, 6]], np.int32)
    assert record_sampled(b, sampled) == [[7, 8], [], [4, 5, 6]]
    assert tokens(b) == [[1, 2, 7, 8], [1, 2], [1, 2, 4, 5, 6]]


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ([[7], [8]], "must be \\[3, w\\] for the 3 rows of the step, got \\[2, 1\\]"),
        ([7, 8, 9], "got \\[3\\]"),
        ([[7, -1, 8], [1, -1, -1], [1, -1, -1]], "a token behind a gap"),
    ],
)
def test_refused(sampled: list, message: str) -> None:
    b = batch(drafts=2)
    with pytest.raises(ValueError, match=message):
        record_sampled(b, np.array(sampled, np.int32))
    assert tokens(b) == [[1, 2]] * 3


def test_nobody_writes_into_a_neighbours_row() -> None:
    b = batch()
    for token in (10, 11, 12, 13):  # one more than max_model_len has a place: the last sample of a full request
        record_sampled(b, np.array([[token], [-1], [-1]], np.int32))
    with pytest.raises(ValueError, match="'A' would have 7 tokens, max_model_len is 5: it should have been finished"):
        record_sampled(b, np.array([[14], [20], [-1]], np.int32))
    assert tokens(b) == [[1, 2, 10, 11, 12, 13], [1, 2], [1, 2]]


def test_a_block_table_row_does_not_run_over() -> None:
    table = BlockTable(2, 8, 4)
    table.add_row([1, 2], 0)
    with pytest.raises(ValueError, match="row 0 would hold 3 blocks, the table has 2 columns"):
        table.append_row([9], 0)
    assert table.table.tolist() == [[1, 2], [0, 0]] and table.num_blocks.tolist() == [2, 0]
