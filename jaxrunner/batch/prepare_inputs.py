"""Compiling a settled batch into one upload: the packed int32 buffer of a step."""

from __future__ import annotations

import struct

import numpy as np
from jaxtyping import Int32

from jaxrunner.batch.buffers import BufferRing, LayoutViews, StepBuffer
from jaxrunner.batch.input_batch import InputBatch
from jaxrunner.batch.step_inputs import StepInputs, TableUpdates
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.shapes import StepLayout, StepShape, StepShapes, is_uniform_decode

_MOST_SHAPES = 4096
_LONG = 96  # tokens a row from which on copying row by row is faster than gathering token by token
_HEADER = struct.Struct("4i")  # num_reqs, num_tokens, num_logits, flags


def prepare_inputs(
    batch: InputBatch,
    scheduler_output: SchedulerOutput,
    shapes: StepShapes,
    *,
    shape: StepShape | None = None,
    buffers: BufferRing | None = None,
) -> StepInputs:
    """Packs the step that ``update_states`` has settled.

    Args:
        shapes: all shapes of the runner; the smallest that holds the step is taken unless ``shape`` names one.
        buffers: where the upload is written; None allocates it.

    Raises:
        ValueError: the step does not fit ``shape``, or nothing is scheduled.
    """
    n, t, each = batch.num_reqs, scheduler_output.total_num_scheduled_tokens, batch.scheduled_each
    if not n:
        raise ValueError("nothing is scheduled: there is no step to prepare")
    num_logits = n * (1 + batch.drafts_each)
    if batch.any_drafts and not batch.drafts_each:
        num_logits += int(batch.num_draft[:n].sum())
    if shape is None:
        shape, layout = _dispatch(batch, shapes, t, num_logits, n)
    elif t > shape.num_tokens or n > shape.num_reqs or num_logits > shape.num_logits:
        raise ValueError(f"{t} tokens, {n} rows and {num_logits} logits rows do not fit {shape}")
    else:
        layout = shapes.layout(shape)
    views = buffers.acquire(layout) if buffers is not None else StepBuffer(layout.size).views(layout)
    if views.num_rows != n:
        views.cut_to(n)
    inputs = StepInputs(batch, layout, shape, views)

    _HEADER.pack_into(views.buffer, 0, n, t, num_logits, batch.flags)
    _write_rows(batch, views)
    ends = (n, each, num_logits) if each == 1 + batch.drafts_each else None
    if ends is None or ends != views.written_ends:
        _write_ends(batch, views, inputs, n, num_logits)
        views.written_ends = ends
    _write_tokens(batch, views, n, t)
    num_updates, inputs.overflow = commit_block_table(batch, views)
    views.pad(n, t, num_logits, num_updates, batch.max_num_reqs)
    inputs.entered = batch.take_entered()
    return inputs


def _dispatch(batch: InputBatch, shapes: StepShapes, t: int, num_logits: int, n: int) -> tuple[StepShape, StepLayout]:
    """The step's shape. Steps ask the same again and again, so answers are kept."""
    uniform = shapes.separates and _is_uniform(batch, n, shapes.query_len)
    asked = (t, num_logits, n, uniform)
    if batch.dispatched_by is not shapes or len(batch.dispatched) > _MOST_SHAPES:
        batch.dispatched_by, batch.dispatched = shapes, {}
    found = batch.dispatched.get(asked)
    if found is None:
        shape = shapes.dispatch(*asked)
        found = batch.dispatched[asked] = shape, shapes.layout(shape)
    return found


def _is_uniform(batch: InputBatch, n: int, query_len: int) -> bool:
    """``is_uniform_decode`` of the rows; it is told the different counts, not each row's."""
    if not batch.scheduled_each:
        return False
    prefilling = bool((batch.num_computed[:n] < batch.num_prompt[:n]).any())
    return is_uniform_decode((batch.scheduled_each,), (prefilling,), query_len)


def _write_rows(batch: InputBatch, views: LayoutViews) -> None:
    if views.written_rows is batch.fields_stamp:
        views.live_rows[...] = batch.by_row.live
    else:
        views.used_rows[...] = batch.by_row.fields
        views.written_rows = batch.fields_stamp


def _write_ends(batch: InputBatch, views: LayoutViews, inputs: StepInputs, n: int, num_logits: int) -> None:
    """Where each row's tokens end, and which of them get logits."""
    starts, each = views.query_start_loc, batch.scheduled_each
    if each:
        np.multiply(batch.ascending32[: n + 1], each, out=starts[: n + 1])
    else:
        starts[0] = 0
        np.add.accumulate(batch.by_row.scheduled, out=views.ends)  # as cumsum, without its Python
    out: Int32[np.ndarray, "S"] = views.logits_indices
    if each == 1 + batch.drafts_each:
        out[:num_logits] = batch.ascending32[:num_logits]
    elif batch.any_drafts:
        out[:num_logits] = inputs.spec_decode_metadata.logits_indices
    else:
        np.subtract(views.ends, batch.by_row.ones, out=out[:n])


def _write_tokens(batch: InputBatch, views: LayoutViews, n: int, t: int) -> None:
    rows, each, tokens = batch.by_row, batch.scheduled_each, batch.flat_token_ids
    first = np.add(batch.row_starts, rows.computed, out=rows.cells)
    if each == 1:
        cells = first
    elif batch.next_drafts is not None and each == 1 + batch.drafts_each:
        out = views.token_ids[:t].reshape(n, each)
        out[:, 0], out[:, 1:] = tokens[first], batch.next_drafts
        return
    elif each:
        cells = (first[:, None] + batch.ascending[:each]).reshape(-1)
    elif n <= t // _LONG:
        at = 0
        for start, count in zip(first.tolist(), rows.scheduled.tolist(), strict=True):
            views.token_ids[at : at + count] = tokens[start : start + count]
            at += count
        return
    else:
        cells = (first - views.starts).repeat(rows.scheduled)
        cells += batch.ascending[:t]
    tokens.take(cells, out=views.token_ids[:t], mode="clip")  # clip: all are inside, no second look at bounds


def commit_block_table(batch: InputBatch, views: LayoutViews) -> tuple[int, list[TableUpdates]]:
    """The one seam for tables: cells changed since the last step go into the upload.

    Returns:
        How many cells that were, and those that did not fit: they have to go ahead of it.
    """
    ahead: list[TableUpdates] = []
    at, room = 0, views.layout.num_updates
    for group, table in enumerate(batch.block_table.tables):
        if not table.has_updates:
            continue
        cells, values = table.take_updates()
        surplus = len(cells) - (room - at)
        if surplus > 0:
            ahead.append(TableUpdates(group, cells[:surplus], values[:surplus]))
            cells, values = cells[surplus:], values[surplus:]
        end = at + len(cells)
        views.has_groups |= group > 0
        if views.has_groups:
            views.update_group[at:end] = group
        views.update_cell[at:end], views.update_value[at:end] = cells, values
        at = end
    return at, ahead
