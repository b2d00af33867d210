"""Each of the eight invariants, broken on purpose: the error names rule, request, row, the value and the right one."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from jaxrunner.batch import InputBatch, StepInputs, prepare_inputs, update_states
from jaxrunner.invariants import InvariantError, check_invariants
from jaxrunner.protocol import NewRequestData, SchedulerOutput
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.shapes import StepShapes

Step = tuple[InputBatch, SchedulerOutput, StepInputs]


def step() -> Step:
    """A runs 3 of 9 tokens behind 4 computed ones, B all of its 5, C its last with two drafts; padded to 16 tokens
    and four rows. Blocks have 4 tokens.
    """
    batch = InputBatch(
        max_num_reqs=4,
        max_model_len=32,
        max_num_batched_tokens=16,
        vocab_size=100,
        block_sizes=(4,),
        num_speculative_tokens=2,
    )
    new = [
        NewRequestData("A", [*range(10, 19)], ([1, 2],), 4, SamplingParams(temperature=0.5)),
        NewRequestData("B", [*range(20, 25)], ([3, 4],), 0, SamplingParams(top_k=7)),
        NewRequestData("C", [*range(30, 36)], ([5, 6],), 5),
    ]
    so = SchedulerOutput(
        new,
        num_scheduled_tokens={"A": 3, "B": 5, "C": 3},
        total_num_scheduled_tokens=11,
        scheduled_spec_decode_tokens={"C": [40, 41]},
    )
    update_states(batch, so)
    shapes = StepShapes(16, 4, num_speculative_tokens=2, min_block_size=4, token_buckets=(16,))
    return batch, so, prepare_inputs(batch, so, shapes)


def index_of(batch: InputBatch, req_id: str) -> int:
    return batch.requests[req_id].request_index


def swap_rows(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    assert batch.req_id_to_index["A"] == 0  # it is made from req_ids when it is first asked for
    batch.req_ids[0], batch.req_ids[1] = batch.req_ids[1], batch.req_ids[0]


def forget_a_row(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    del batch.req_id_to_index["C"]


def rows_moved_after_the_upload(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs.req_ids = ["B", "A", "C"]


def another_index(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    batch.idx_mapping[1] = 3


def another_row_of_the_index(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    batch.row_of_index[index_of(batch, "B")] = 2


def another_uploaded_index(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs["idx_mapping"][1] = 0


def padding_row_with_an_index(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs["idx_mapping"][3] = 2


def another_length(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs["num_known"][0] = 8


def another_prompt_length(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    batch.columns["num_prompt_tokens"][index_of(batch, "B")] = 4


def another_uploaded_prompt_length(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs["num_prompt"][1] = 4


def a_neighbours_parameters(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    records = batch.columns["sampling_record"]
    records[index_of(batch, "B")] = records[index_of(batch, "A")]


def total_too_high(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    so.total_num_scheduled_tokens = 12


def one_token_fewer(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs["num_tokens"][0] = 10


def a_request_without_a_row(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    so.num_scheduled_tokens = {"A": 3, "B": 5, "X": 3}


def begins_at_one(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs.query_start_loc[0] = 1


def interval_too_long(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs.query_start_loc[1] = 4


def padding_rows_with_tokens(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs.query_start_loc[4] = 12


def position_off_by_one(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs.positions[2] += 1


def token_of_another_row(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    assert inputs.positions[3] == 0  # worked out before, and right
    inputs.req_indices[3] = 0


def another_token(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs["token_ids"][4] = 99


def padding_with_a_position(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs.positions[15] = 1


def sequence_too_long(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs.seq_lens[1] = 6


def too_few_blocks(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    batch.block_table[0].num_blocks[index_of(batch, "C")] = 1


def padding_row_with_a_sequence(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs.seq_lens[3] = 1


def slots(inputs: StepInputs, change: Callable[[np.ndarray], object]) -> None:
    changed = inputs.slot_mapping()
    change(changed)
    inputs.slot_mapping = lambda group=0: changed  # type: ignore[method-assign]


def slot_in_anothers_block(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    """A's second token, at position 5, in B's block 3."""
    slots(inputs, lambda slot: slot.__setitem__(1, 3 * 4 + 1))


def padding_in_the_null_block(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    slots(inputs, lambda slot: slot.__setitem__(slice(11, None), 0))


def rows(inputs: StepInputs, change: Callable[[np.ndarray], object]) -> None:
    slot, changed = inputs.slot_mapping(), inputs.block_table()
    change(changed)
    inputs.slot_mapping = lambda group=0: slot  # type: ignore[method-assign]
    inputs.block_table = lambda group=0: changed  # type: ignore[method-assign]


def anothers_block(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    rows(inputs, lambda table: table.__setitem__((0, 0), 3))


def block_behind_the_sequence(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    rows(inputs, lambda table: table.__setitem__((1, 2), 5))


def padding_row_with_a_block(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    rows(inputs, lambda table: table.__setitem__((3, 0), 5))


def logits_of_the_next_row(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs.logits_indices[1] += 1


def logits_of_one_draft_fewer(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs["num_logits"][0] = 4


def sample_of_a_chunk_counts(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs.discard[0] = False


def sample_of_a_whole_prompt_is_dropped(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    inputs.discard[1] = True


# How it is broken: the rule, who is named, the value and what it should have been.
BROKEN: dict[Callable[..., None], tuple[int, str, str, str]] = {
    swap_rows: (1, "request 'B'", "1", "0"),
    forget_a_row: (1, "number of rows", "2", "3"),
    rows_moved_after_the_upload: (1, "requests of the step", "['B', 'A', 'C']", "['A', 'B', 'C']"),
    another_index: (2, "request 'B', row 1", "3", "1"),
    another_row_of_the_index: (2, "request 'B', row 1", "2", "1"),
    another_uploaded_index: (2, "request 'B', row 1", "0", "1"),
    padding_row_with_an_index: (2, "padding rows", "[2]", "[4]"),
    another_length: (2, "request 'A', row 0", "8", "9"),
    another_prompt_length: (2, "request 'B', row 1", "4", "5"),
    another_uploaded_prompt_length: (2, "request 'B', row 1", "4", "5"),
    a_neighbours_parameters: (2, "request 'B', row 1: sampling record", "", ""),
    total_too_high: (3, "num_scheduled_tokens", "11", "12"),
    one_token_fewer: (3, "tokens of the step", "10", "11"),
    a_request_without_a_row: (3, "scheduled requests", "['A', 'B', 'X']", "['A', 'B', 'C']"),
    begins_at_one: (4, "query_start_loc[0]", "1", "0"),
    interval_too_long: (4, "request 'A', row 0", "4", "3"),
    padding_rows_with_tokens: (4, "query_start_loc", "[11, 12]", "[11, 11]"),
    position_off_by_one: (5, "request 'A', row 0: positions", "[4, 5, 7]", "[4, 5, 6]"),
    token_of_another_row: (5, "request 'B', row 1", "{0, 1}", "{1}"),
    another_token: (5, "request 'B', row 1: tokens", "[20, 99, 22, 23, 24]", "[20, 21, 22, 23, 24]"),
    padding_with_a_position: (5, "padding", "[0, 0, 0, 0, 1]", "[0, 0, 0, 0, 0]"),
    sequence_too_long: (6, "request 'B', row 1: seq_len", "6", "5"),
    too_few_blocks: (6, "request 'C', row 2", "4", "0"),
    padding_row_with_a_sequence: (6, "padding rows", "[1]", "[0]"),
    slot_in_anothers_block: (7, "request 'A', row 0, cache group 0: slot of position 5", "13", "9"),
    padding_in_the_null_block: (7, "padding, cache group 0", "[0, 0, 0, 0, 0]", "[-1, -1, -1, -1, -1]"),
    anothers_block: (7, "request 'A', row 0, cache group 0", "[3, 2]", "[1, 2]"),
    block_behind_the_sequence: (7, "request 'B', row 1, cache group 0", "[5, 0, 0, 0, 0, 0]", "[0, 0, 0, 0, 0, 0]"),
    padding_row_with_a_block: (7, "padding rows", "[5, 0, 0, 0, 0, 0, 0, 0]", "[0, 0, 0, 0, 0, 0, 0, 0]"),
    logits_of_the_next_row: (8, "request 'B', row 1: logits_indices", "[8]", "[7]"),
    logits_of_one_draft_fewer: (8, "logits rows", "4", "5"),
    sample_of_a_chunk_counts: (8, "request 'A', row 0: discard", "False", "True"),
    sample_of_a_whole_prompt_is_dropped: (8, "request 'B', row 1: discard", "True", "False"),
}


def test_a_right_step_passes() -> None:
    check_invariants(*step())


@pytest.mark.parametrize("corrupt", BROKEN, ids=lambda f: f.__name__)
def test_broken(corrupt: Callable[..., None]) -> None:
    rule, who, value, expected = BROKEN[corrupt]
    prepared = step()
    corrupt(*prepared)
    words = rf"invariant {rule}: .*{re.escape(who)}.*: got {re.escape(value)}.*, expected {re.escape(expected)}"
    with pytest.raises(InvariantError, match=words):
        check_invariants(*prepared)


def test_every_rule_is_broken_by_some_case() -> None:
    assert {rule for rule, *_ in BROKEN.values()} == set(range(1, 9))
