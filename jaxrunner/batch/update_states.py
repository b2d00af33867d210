"""Merging a step's differences into the persistent batch. First rows settle, then the numbers go in.

The order is vLLM's and matters: finished, preempted, unscheduled leave; new and returning requests enter (the lowest
row given up first); holes are condensed, rows reordered if asked for; only then is anything computed per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64

from jaxrunner.batch.input_batch import InputBatch
from jaxrunner.batch.packing import lookup, runs
from jaxrunner.batch.reorder import reorder_decodes_first
from jaxrunner.batch.rows import NO_ROW
from jaxrunner.batch.step_plan import StepPlan, read_plan
from jaxrunner.batch.validate import read_and_validate
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
    plan = read_and_validate(batch, scheduler_output) if check else read_plan(batch, scheduler_output)
    if plan.changed:
        _settle_rows(batch, scheduler_output, plan)
    _take_counts(batch, scheduler_output, plan)
    if plan.blocks:
        _take_blocks(batch, plan)
    if not check and (plan.blocks or plan.changed):
        for owners in batch.block_owners:
            owners.stale = True
    if plan.drafts is not None or batch.any_drafts:
        _take_drafts(batch, plan)
    if reorder_threshold is not None:
        reorder_decodes_first(batch, reorder_threshold)
    batch.flags = batch.row_flags
    if batch.row_holds is not None and np.count_nonzero(batch.row_holds > batch.by_row.known):
        batch.flags |= HELD_BACK


def _settle_rows(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> None:
    batch.release(so.finished_req_ids, so.preempted_req_ids | so.scheduled_cached_reqs.resumed_req_ids)
    rows, indices, returning = batch.rows, plan.indices, plan.returning
    back = returning
    if len(returning) or rows.num_rows < batch.num_held_indices or rows.num_rows != plan.num_cached:
        # Somebody is not, or was not, among the rows.
        placed = batch.row_of_index[indices]
        placed[returning] = NO_ROW
        back = (placed < 0).nonzero()[0]
        if rows.num_rows != len(placed) - len(back):  # somebody who has a row is not scheduled
            rows.leave_all_but(placed[placed >= 0])
    entered = batch.enter(plan.states, plan.tokens, plan.words) if plan.states else []
    new, new_ids = entered[: len(plan.ids) - plan.num_cached], plan.ids[plan.num_cached :]
    if len(back):
        indices[returning] = entered[len(new) :]
        rows.take(new + indices[back].tolist(), [*new_ids, *lookup(plan.ids, back.tolist())])
    elif new:
        rows.take(new, new_ids)
    rows.condense()
    batch.scheduled_ids = plan.ids
    if new:
        plan.all_indices[plan.num_cached :] = new
    batch.scheduled_indices = plan.all_indices
    batch.refresh_metadata()


def _take_counts(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> None:
    rows, cached = batch.by_row, so.scheduled_cached_reqs
    where: Any = ... if batch.rows_in_order else batch.scheduled_rows
    rows.computed[where] = plan.computed
    batch.num_computed_tokens[batch.scheduled_indices] = plan.computed
    if plan.changed or not plan.each or plan.each != batch.scheduled_each:
        rows.scheduled[where] = plan.each or plan.counts
    batch.scheduled_each = plan.each
    if cached.new_token_ids and any(map(len, cached.new_token_ids)):
        _append_tokens(batch, plan.indices, cached.num_computed_tokens, cached.new_token_ids)
        rows.known[...] = batch.num_tokens[batch.row_indices]
    if plan.outputs is not None:
        _drop_surplus_outputs(batch, plan)


def _drop_surplus_outputs(batch: InputBatch, plan: StepPlan) -> None:
    """The scheduler counts fewer outputs than the batch has (a failed load dropped some): its count holds."""
    rows, told, indices = batch.by_row, plan.outputs, plan.indices
    assert told is not None
    if batch.rows_in_order and plan.num_cached == rows.num_rows:
        prompt, known = rows.prompt, rows.known
    else:
        prompt, known = batch.num_prompt_tokens[indices], batch.num_tokens[indices]
    told += prompt
    # As a rule they are the same, which strings of bytes show sooner than arrays.
    if told.tobytes() != known.tobytes() and np.count_nonzero(told < known):
        batch.num_tokens[indices] = np.minimum(told, known)
        rows.known[...] = batch.num_tokens[batch.row_indices]


def _append_tokens(
    batch: InputBatch,
    indices: Int64[np.ndarray, "k"],
    computed: Sequence[int],
    new_token_ids: Sequence[TokenIds],
) -> None:
    """Tokens another pipeline stage sampled: only those that the batch does not have yet."""
    for index, c, tokens in zip(indices.tolist(), computed, new_token_ids, strict=True):
        have = int(batch.num_tokens[index])
        missing = c + len(tokens) - have
        if missing > 0:
            batch.token_ids[index, have : have + missing] = tokens[len(tokens) - missing :]
            batch.num_tokens[index] = have + missing
            batch.longest = max(batch.longest, have + missing)


def _take_blocks(batch: InputBatch, plan: StepPlan) -> None:
    """One scatter a group, for the requests that grew and those that entered."""
    indices = batch.scheduled_indices[plan.growing]
    for table, new in zip(batch.block_table.tables, plan.blocks, strict=True):
        table.append_flat(new.block_ids, new.lengths, indices)


def _take_drafts(batch: InputBatch, plan: StepPlan) -> None:
    """Drafts lie behind the request's tokens; they count as scheduled, not as known."""
    drafts, each = plan.drafts, 0 if plan.drafts is None else plan.drafts.each
    same = 0 < each == batch.drafts_each and not plan.changed  # as many as last time
    if not same:
        batch.fields_stamp = object()
        if batch.any_drafts:
            batch.num_draft_tokens[:] = 0
            batch.num_draft[:] = 0
    batch.any_drafts, batch.drafts_each, batch.next_drafts = drafts is not None, each, None
    if drafts is None:
        return
    indices = batch.scheduled_indices if each else batch.scheduled_indices[drafts.positions]
    if not same:
        batch.num_draft_tokens[indices] = drafts.lengths
        batch.num_draft[batch.scheduled_rows[drafts.positions]] = drafts.lengths
    if not each:
        at = batch.token_starts[indices] + batch.num_tokens[indices]
        batch.flat_token_ids[runs(at, drafts.lengths)] = drafts.token_ids
        return
    rows, tokens = batch.by_row, drafts.token_ids.reshape(-1, each)
    if batch.rows_in_order:
        at = batch.row_starts + rows.known
        if (rows.computed + rows.ones).tobytes() == rows.known.tobytes():
            batch.next_drafts = tokens
    else:
        at = batch.token_starts[indices] + batch.num_tokens[indices]
    batch.flat_token_ids[at[:, None] + batch.ascending[:each]] = tokens
