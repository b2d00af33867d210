"""Merging a step's differences into the persistent batch. First rows settle, then the numbers go in.

The order is vLLM's and matters: finished, preempted, unscheduled leave; new and returning requests enter (the lowest
row given up first); holes are condensed, rows reordered if asked for; only then is anything computed per row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from functools import cache
from itertools import chain, compress
from operator import itemgetter

import numpy as np

from jaxrunner.batch.input_batch import NO_ROW, InputBatch
from jaxrunner.batch.reorder import reorder_decodes_first
from jaxrunner.batch.request_state import NO_INDEX
from jaxrunner.batch.validate import validate
from jaxrunner.protocol import SchedulerOutput, TokenIds
from jaxrunner.sampling_columns import HELD_BACK


def update_states(
    batch: InputBatch,
    scheduler_output: SchedulerOutput,
    *,
    check: bool = True,
    reorder_threshold: int | None = None,
) -> None:
    """Brings ``batch`` to the state of this step.

    Args:
        check: validate the whole output before anything moves.
        reorder_threshold: put decodes of at most so many tokens before prefills, for an attention implementation that
            wants them apart. None: rows stay in the order they came to.

    Raises:
        SchedulerOutputError: with ``check``; the batch is then what it was.
    """
    if check:
        validate(batch, scheduler_output)
    if _membership_changed(batch, scheduler_output):
        _settle_rows(batch, scheduler_output)
    _take_counts(batch, scheduler_output)
    if reorder_threshold is not None:
        reorder_decodes_first(batch, reorder_threshold)
    _take_blocks(batch, scheduler_output)
    _take_drafts(batch, scheduler_output)
    _note_features(batch)


def _membership_changed(batch: InputBatch, so: SchedulerOutput) -> bool:
    cached = so.scheduled_cached_reqs
    return bool(
        so.finished_req_ids
        or so.preempted_req_ids
        or so.scheduled_new_reqs
        or cached.resumed_req_ids
        or cached.req_ids != batch.scheduled_ids
    )


def _settle_rows(batch: InputBatch, so: SchedulerOutput) -> None:
    cached, new = so.scheduled_cached_reqs, so.scheduled_new_reqs
    # Sorted: the order of a set differs from run to run, and with it which index a later request gets.
    for req_id in sorted(so.finished_req_ids):
        if req_id in batch.requests:  # an abort may name one that never got here
            batch.remove_request(req_id)
    for req_id in sorted(so.preempted_req_ids):
        if req_id in batch.requests:
            batch.preempt(req_id)
    for req_id in sorted(cached.resumed_req_ids):  # preempted and resumed in one step
        batch.preempt(req_id)

    # Unscheduled: whoever has a row and is not among the scheduled. Counting finds out whether there is anyone.
    states = [batch.requests[r] for r in cached.req_ids]
    indices = np.fromiter((s.request_index for s in states), np.intp, len(states))
    staying = indices[indices != NO_INDEX]
    staying_rows = batch.row_of_index[staying]
    if len(batch.req_id_to_index) > np.count_nonzero(staying_rows != NO_ROW):
        scheduled = set(cached.req_ids)
        for req_id in [r for r in batch.req_id_to_index if r not in scheduled]:
            batch.leave_row(req_id)

    for data in new:
        prefill = data.prompt_token_ids if data.prefill_token_ids is None else data.prefill_token_ids
        state = batch.new_state(data.req_id, data.sampling_params, len(data.prompt_token_ids))
        batch.enter(state, prefill, data.block_ids, data.num_computed_tokens)
        batch.take_row(data.req_id)
    for i, state in enumerate(states):
        if state.request_index == NO_INDEX:
            tokens = cached.all_token_ids.get(state.req_id)
            tokens = state.preempted_token_ids if tokens is None else tokens
            assert tokens is not None  # a request without an index keeps its tokens
            blocks = cached.new_block_ids[i]
            batch.enter(state, tokens, blocks or ((),) * len(batch.block_table), cached.num_computed_tokens[i])
        if batch.row_of_index[state.request_index] == NO_ROW:
            batch.take_row(state.req_id)
    batch.condense()

    batch.scheduled_ids = cached.req_ids + [data.req_id for data in new]
    batch.refresh_metadata()


def _take_counts(batch: InputBatch, so: SchedulerOutput) -> None:
    cached, new = so.scheduled_cached_reqs, so.scheduled_new_reqs
    ids, k = batch.scheduled_ids, len(cached.req_ids)
    scheduled = so.num_scheduled_tokens
    counts = scheduled.values() if list(scheduled) == ids else _lookup(scheduled, ids)
    computed = cached.num_computed_tokens
    if new:
        computed = computed + [data.num_computed_tokens for data in new]
    _by_row(batch, batch.num_scheduled, counts)
    _by_row(batch, batch.num_computed, computed)
    if k and any(map(len, cached.new_token_ids)):
        indices = batch.row_indices[batch.scheduled_rows[:k]]
        _append_tokens(batch, indices, cached.num_computed_tokens, cached.new_token_ids)
    if k and cached.num_output_tokens:
        _drop_surplus_outputs(batch, batch.scheduled_rows[:k], cached.num_output_tokens)
    batch.num_computed_tokens[batch.row_indices] = batch.num_computed[: batch.num_reqs]


def _by_row(batch: InputBatch, column: np.ndarray, values: Collection[int]) -> None:
    """``values`` come in the scheduler's order, ``column`` is by row. Packing reads a list twice as fast as NumPy."""
    n = len(values)
    if batch.rows_in_order:
        _packer(n)(column, 0, *values)
    else:
        in_order = np.empty(n, np.int32)
        _packer(n)(in_order, 0, *values)
        column[batch.scheduled_rows] = in_order


@cache
def _packer(n: int) -> Callable[..., None]:
    return struct.Struct(f"{n}i").pack_into


def _drop_surplus_outputs(batch: InputBatch, rows: np.ndarray, num_output_tokens: Sequence[int]) -> None:
    """The scheduler counts fewer outputs than the batch has (a failed load dropped some): its count holds."""
    told = np.empty(len(rows), np.int32)
    _packer(len(rows))(told, 0, *num_output_tokens)
    indices = batch.row_indices if batch.rows_in_order and len(rows) == batch.num_reqs else batch.row_indices[rows]
    told += batch.row_prompts if indices is batch.row_indices else batch.row_prompts[rows]
    have = batch.num_tokens[indices]
    if (told < have).any():
        batch.num_tokens[indices] = np.minimum(told, have)


def _append_tokens(
    batch: InputBatch, indices: np.ndarray, computed: Sequence[int], new_token_ids: Sequence[TokenIds]
) -> None:
    """Tokens another pipeline stage sampled: only those that the batch does not have yet."""
    for index, c, tokens in zip(indices.tolist(), computed, new_token_ids, strict=True):
        have = int(batch.num_tokens[index])
        missing = c + len(tokens) - have
        if missing > 0:
            batch.token_ids[index, have : have + missing] = tokens[len(tokens) - missing :]
            batch.num_tokens[index] = have + missing


def _take_blocks(batch: InputBatch, so: SchedulerOutput) -> None:
    cached = so.scheduled_cached_reqs
    if cached.new_block_ids.count(None) == len(cached.req_ids):
        return
    grown = list(compress(range(len(cached.req_ids)), cached.new_block_ids))
    if cached.resumed_req_ids:  # their blocks went in when they entered
        grown = [i for i in grown if cached.req_ids[i] not in cached.resumed_req_ids]
    if grown:
        indices = batch.row_indices[batch.scheduled_rows[grown]]
        batch.block_table.append_rows([cached.new_block_ids[i] for i in grown], indices)  # type: ignore[misc]


def _take_drafts(batch: InputBatch, so: SchedulerOutput) -> None:
    """Drafts lie behind the request's tokens; they count as scheduled, not as known."""
    drafts = so.scheduled_spec_decode_tokens
    if batch.any_drafts:
        batch.num_draft_tokens[:] = 0
    batch.any_drafts = bool(drafts)
    if not drafts:
        return
    rows = np.fromiter(_lookup(batch.req_id_to_index, list(drafts)), np.intp, len(drafts))
    indices = batch.row_indices[rows]
    lengths = np.fromiter(map(len, drafts.values()), np.int32, len(drafts))
    total = int(lengths.sum())
    batch.num_draft_tokens[indices] = lengths
    at = indices * batch.token_row_stride + batch.num_tokens[indices]
    ends = np.cumsum(lengths)
    cells = np.repeat(at - ends + lengths, lengths) + np.arange(total)
    batch.token_ids.reshape(-1)[cells] = np.fromiter(chain.from_iterable(drafts.values()), np.int32, total)


def _note_features(batch: InputBatch) -> None:
    """Which sampling features this step needs: bits over all rows."""
    batch.flags = batch.row_flags
    if batch.any_hold and (batch.row_holds > batch.num_tokens[batch.row_indices]).any():
        batch.flags |= HELD_BACK


def _lookup(table: dict[str, int], keys: Sequence[str]) -> Sequence[int]:
    """[table[k] for k in keys], in one C call."""
    if len(keys) > 1:
        return itemgetter(*keys)(table)
    return [table[k] for k in keys]
