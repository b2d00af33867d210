"""Merging a step's differences into the persistent batch. First rows settle, then the numbers go in.

The order is vLLM's and matters: finished, preempted, unscheduled leave; new and returning requests enter (the lowest
row given up first); holes are condensed, rows reordered if asked for; only then is anything computed per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from jaxrunner.batch.input_batch import InputBatch
from jaxrunner.batch.packing import runs
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
    _take_blocks(batch, plan, check)
    _take_drafts(batch, plan)
    if reorder_threshold is not None:
        reorder_decodes_first(batch, reorder_threshold)
    _note_features(batch)


def _settle_rows(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> None:
    batch.release(so.finished_req_ids, so.preempted_req_ids | so.scheduled_cached_reqs.resumed_req_ids)
    rows, indices, num_new = batch.rows, plan.indices, len(plan.ids) - plan.num_cached
    placed = batch.row_of_index[indices]
    if len(plan.returning):
        placed[plan.returning] = NO_ROW
    num_coming_back = np.count_nonzero(placed < 0)
    if rows.num_rows != len(placed) - num_coming_back:  # somebody who has a row is not scheduled
        rows.leave_all_but(placed[placed >= 0])
    entered = batch.enter(plan.states, plan.tokens, plan.words) if plan.states else []
    new = entered[:num_new]
    if num_coming_back:
        indices[plan.returning] = entered[num_new:]
        back = indices[placed < 0]
        rows.take(np.concatenate((new, back)) if new else back)
    elif new:
        rows.take(new)
    rows.condense()
    batch.scheduled_ids = plan.ids
    plan.all_indices[plan.num_cached :] = new
    batch.scheduled_indices = plan.all_indices
    batch.refresh_metadata()


def _take_counts(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> None:
    n, cached = len(plan.ids), so.scheduled_cached_reqs
    in_order: slice | Int64[np.ndarray, "n"] = slice(n) if batch.rows_in_order else batch.scheduled_rows
    batch.num_computed[in_order] = plan.computed
    batch.num_computed_tokens[batch.scheduled_indices] = plan.computed
    batch.scheduled_each = plan.each
    batch.num_scheduled[in_order] = plan.each or plan.counts
    if cached.new_token_ids and any(map(len, cached.new_token_ids)):
        _append_tokens(batch, plan.indices, cached.num_computed_tokens, cached.new_token_ids)
    known = batch.num_known[:n]
    batch.num_tokens.take(batch.row_indices, out=known, mode="clip")  # clip: all are inside, no second look
    if plan.outputs is not None:
        _drop_surplus_outputs(batch, plan)


def _drop_surplus_outputs(batch: InputBatch, plan: StepPlan) -> None:
    """The scheduler counts fewer outputs than the batch has (a failed load dropped some): its count holds."""
    k, outputs = plan.num_cached, plan.outputs
    assert outputs is not None
    rows: slice | Int64[np.ndarray, "k"] = slice(k) if batch.rows_in_order else batch.scheduled_rows[:k]
    told = np.add(outputs, batch.num_prompt[rows], out=outputs)
    fewer = np.less(told, batch.num_known[rows], out=batch.flagged[:k])
    if np.count_nonzero(fewer):
        kept = np.minimum(told, batch.num_known[rows])
        batch.num_known[rows] = kept
        batch.num_tokens[plan.indices] = kept


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


def _take_blocks(batch: InputBatch, plan: StepPlan, checked: bool) -> None:
    """One scatter a group, for the requests that grew and those that entered."""
    if plan.blocks:
        rows = batch.scheduled_indices[plan.growing]
        for table, new in zip(batch.block_table.tables, plan.blocks, strict=True):
            table.append_flat(new.block_ids, new.lengths, rows)
    if not checked and (plan.blocks or plan.changed):
        for owners in batch.block_owners:
            owners.stale = True


def _take_drafts(batch: InputBatch, plan: StepPlan) -> None:
    """Drafts lie behind the request's tokens; they count as scheduled, not as known."""
    n, drafts = len(plan.ids), plan.drafts
    same = drafts is not None and drafts.each == batch.drafts_each > 0 and not plan.changed  # as many as last time
    if batch.any_drafts and not same:
        batch.num_draft_tokens[:] = 0
        batch.num_draft[:] = 0
    batch.any_drafts, batch.drafts_each = drafts is not None, 0
    if drafts is None:
        return
    indices = batch.scheduled_indices[drafts.positions]
    if not same:
        batch.num_draft_tokens[indices] = drafts.lengths
        batch.num_draft[batch.scheduled_rows[drafts.positions]] = drafts.lengths
    at = indices * batch.token_row_stride + batch.num_tokens[indices]
    if drafts.each:
        batch.drafts_each = drafts.each
        batch.flat_token_ids[at[:, None] + batch.ascending[: drafts.each]] = drafts.token_ids.reshape(n, drafts.each)
    else:
        batch.flat_token_ids[runs(at, drafts.lengths)] = drafts.token_ids


def _note_features(batch: InputBatch) -> None:
    """Which sampling features this step needs: bits over all rows."""
    batch.flags = batch.row_flags
    if batch.row_holds is not None and np.count_nonzero(batch.row_holds > batch.num_known[: batch.num_reqs]):
        batch.flags |= HELD_BACK
