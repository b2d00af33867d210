"""The eight invariants of a step. Told a batch, a SchedulerOutput and the step's inputs, they name what is wrong.

They restate what a step must be from the scheduler's numbers, one request at a time and in plain words, and share no
address arithmetic with the code that they check. On in tests and with ``RunnerConfig(check_invariants=True)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chex
import numpy as np

from jaxrunner.batch import PAD_SLOT_ID, InputBatch, StepInputs
from jaxrunner.protocol import SchedulerOutput


class InvariantError(AssertionError):
    """A step's inputs contradict the batch or the scheduler."""


def check_invariants(batch: InputBatch, scheduler_output: SchedulerOutput, inputs: StepInputs) -> None:
    """Checks all eight; call it between ``prepare_inputs`` and the step.

    Raises:
        InvariantError: naming the rule, the request, its row, the value and what was expected.
    """
    check_rows(batch, inputs)
    check_same_request(batch, inputs)
    check_token_count(batch, scheduler_output, inputs)
    check_query_start_loc(batch, scheduler_output, inputs)
    check_positions(batch, inputs)
    check_seq_lens(batch, inputs)
    check_slots(batch, inputs)
    check_logits(batch, scheduler_output, inputs)


def check_rows(batch: InputBatch, inputs: StepInputs) -> None:
    """1. req_ids and req_id_to_index are inverse to each other, and the step's rows are the batch's."""
    _same(1, "number of rows", len(batch.req_id_to_index), batch.num_reqs)
    for row, req_id in enumerate(batch.req_ids):
        _same(1, f"request {req_id!r}: req_id_to_index", batch.req_id_to_index.get(req_id), row)
    _same(1, "requests of the step by row", inputs.req_ids, batch.req_ids)


def check_same_request(batch: InputBatch, inputs: StepInputs) -> None:
    """2. What a row leads to (index, counts, sampling parameters, blocks) is its own request's."""
    n = batch.num_reqs
    for row, req_id in enumerate(batch.req_ids):
        name, state = f"request {req_id!r}, row {row}", batch.requests[req_id]
        index = state.request_index
        _same(2, f"{name}: request index of the row", int(batch.idx_mapping[row]), index)
        _same(2, f"{name}: row of request index {index}", int(batch.row_of_index[index]), row)
        _same(2, f"{name}: uploaded request index", int(inputs["idx_mapping"][row]), index)
        _same(2, f"{name}: uploaded token count", int(inputs["num_known"][row]), int(batch.num_tokens[index]))
        _same(2, f"{name}: prompt length", int(batch.columns["num_prompt_tokens"][index]), state.num_prompt_tokens)
        record = np.frombuffer(batch.record_of(req_id, state.sampling_params, state.num_prompt_tokens), np.int32)
        _same(2, f"{name}: sampling record", batch.columns["sampling_record"][index].tolist(), record.tolist())
        _same(2, f"{name}: uploaded prompt length", int(inputs["num_prompt"][row]), state.num_prompt_tokens)
    indices = batch.idx_mapping[:n].tolist()
    _same(2, f"distinct request indices among the rows' {indices}", len(set(indices)), n)
    padding = inputs["idx_mapping"][n:]
    _same(2, "request index of padding rows", padding.tolist(), [batch.max_num_reqs] * len(padding))


def check_token_count(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    """3. The scheduled counts add up to the tokens of the stream."""
    total = sum(so.num_scheduled_tokens.values())
    _same(3, "sum of num_scheduled_tokens", total, so.total_num_scheduled_tokens)
    _same(3, "tokens of the step", inputs.num_tokens, total)
    _same(3, "scheduled requests", sorted(so.num_scheduled_tokens), sorted(batch.req_ids))


def check_query_start_loc(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    """4. query_start_loc begins at 0, never falls, gives each row its scheduled count, stays at Q in the padding."""
    starts = inputs.query_start_loc.tolist()
    _same(4, "query_start_loc[0]", starts[0], 0)
    for row, req_id in enumerate(batch.req_ids):
        length = starts[row + 1] - starts[row]
        _same(4, f"request {req_id!r}, row {row}: interval length", length, so.num_scheduled_tokens[req_id])
    tail = starts[batch.num_reqs :]
    _same(4, "query_start_loc from the last row on", tail, [inputs.num_tokens] * len(tail))


def check_positions(batch: InputBatch, inputs: StepInputs) -> None:
    """5. Token j of a row stands at computed + j, and is the request's token of that position."""
    starts, positions, tokens = inputs.query_start_loc.tolist(), inputs.positions, inputs["token_ids"]
    for row, req_id in enumerate(batch.req_ids):
        name, index = f"request {req_id!r}, row {row}", batch.requests[req_id].request_index
        computed = int(batch.num_computed_tokens[index])
        span = slice(starts[row], starts[row + 1])
        expected = list(range(computed, computed + starts[row + 1] - starts[row]))
        _same(5, f"{name}: positions", positions[span].tolist(), expected)
        _same(5, f"{name}: rows of its tokens", set(inputs.req_indices[span].tolist()), {row})
        _same(5, f"{name}: tokens", tokens[span].tolist(), batch.token_ids[index, expected].tolist())
    padding = positions[inputs.num_tokens :]
    _same(5, "positions of padding", padding.tolist(), [0] * len(padding))


def check_seq_lens(batch: InputBatch, inputs: StepInputs) -> None:
    """6. A sequence ends right after its last position, within the blocks the request holds."""
    starts = inputs.query_start_loc
    for row, req_id in enumerate(batch.req_ids):
        name, index = f"request {req_id!r}, row {row}", batch.requests[req_id].request_index
        length = int(inputs.seq_lens[row])
        _same(6, f"{name}: seq_len", length, int(inputs.positions[starts[row + 1] - 1]) + 1)
        for group, table in enumerate(batch.block_table.tables):
            room = int(table.num_blocks[index]) * table.block_size
            _same(6, f"{name}: tokens behind its blocks' {room}, cache group {group}", max(length - room, 0), 0)
    padding = inputs.seq_lens[batch.num_reqs :]
    _same(6, "seq_lens of padding rows", padding.tolist(), [0] * len(padding))


def check_slots(batch: InputBatch, inputs: StepInputs) -> None:
    """7. Every slot lies in a block of its own request, at the offset of its position; padding has no slot."""
    starts, positions = inputs.query_start_loc.tolist(), inputs.positions
    for group, table in enumerate(batch.block_table.tables):
        slots, rows, size = inputs.slot_mapping(group), inputs.block_table(group), table.block_size
        for row, req_id in enumerate(batch.req_ids):
            name = f"request {req_id!r}, row {row}, cache group {group}"
            owned = batch.block_ids_of(req_id, group).tolist()
            for token in range(starts[row], starts[row + 1]):
                position = int(positions[token])
                expected = owned[position // size] * size + position % size
                _same(7, f"{name}: slot of position {position}", int(slots[token]), expected)
            used = -(-int(inputs.seq_lens[row]) // size)
            _same(7, f"{name}: block table row", rows[row, :used].tolist(), owned[:used])
            tail = rows[row, used:].tolist()
            _same(7, f"{name}: block table behind the sequence", tail, [0] * len(tail))
        padding = slots[inputs.num_tokens :]
        _same(7, f"slots of padding, cache group {group}", padding.tolist(), [PAD_SLOT_ID] * len(padding))
        blocks = rows[batch.num_reqs :].ravel().tolist()
        _same(7, f"block table of padding rows, cache group {group}", blocks, [0] * len(blocks))


def check_logits(batch: InputBatch, so: SchedulerOutput, inputs: StepInputs) -> None:
    """8. Each row has logits of its last 1 + drafts tokens; what does not reach its last known token is discarded."""
    picks, at, starts = inputs.logits_indices.tolist(), 0, inputs.query_start_loc.tolist()
    for row, req_id in enumerate(batch.req_ids):
        name = f"request {req_id!r}, row {row}"
        rows = 1 + len(so.scheduled_spec_decode_tokens.get(req_id, ()))
        end = starts[row + 1]
        _same(8, f"{name}: logits_indices", picks[at : at + rows], list(range(end - rows, end)))
        at += rows
        unfinished = int(inputs.seq_lens[row]) < int(batch.num_tokens[batch.requests[req_id].request_index])
        _same(8, f"{name}: discard", bool(inputs.discard[row]), unfinished)
    _same(8, "logits rows", inputs.num_logits, at)


def _same(rule: int, what: str, value: Any, expected: Any) -> None:
    if isinstance(value, np.ndarray | Sequence) and not isinstance(value, str):
        value, expected = list(value), list(expected)
    chex.assert_equal(
        value,
        expected,
        custom_message=f"invariant {rule}: {what}: got {value}, expected {expected}",
        exception_type=InvariantError,
    )
