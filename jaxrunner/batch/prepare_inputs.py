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
    n, t = batch.num_reqs, scheduler_output.total_num_scheduled_tokens
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
    inputs = StepInputs(batch, layout, shape, views)

    _HEADER.pack_into(views.buffer, 0, n, t, num_logits, batch.flags)
    _write_rows(batch, views, n)
    _write_tokens(batch, views, n, t)
    _write_logits_indices(batch, views, inputs, n, num_logits)
    num_updates, inputs.overflow = commit_block_table(batch, views)
    views.pad(n, t, num_logits, num_updates, batch.max_num_reqs)
    inputs.entered = batch.take_entered()
    return inputs


def _dispatch(batch: InputBatch, shapes: StepShapes, t: int, num_logits: int, n: int) -> tuple[StepShape, StepLayout]:
    """The step's shape. Steps ask the same again and again, so answers are kept."""
    uniform = shapes.policy.separates and _is_uniform(batch, n, shapes.query_len)
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


def _write_rows(batch: InputBatch, views: LayoutViews, n: int) -> None:
    starts, each = views.query_start_loc, batch.scheduled_each
    if each == 1:
        starts[: n + 1] = batch.ascending32[: n + 1]
    elif each:
        np.multiply(batch.ascending32[: n + 1], each, out=starts[: n + 1])
    else:
        starts[0] = 0
        batch.num_scheduled[:n].cumsum(out=starts[1 : n + 1], dtype=np.int32)
    views.rows[:, :n] = batch.row_fields[:, :n]


def _write_tokens(batch: InputBatch, views: LayoutViews, n: int, t: int) -> None:
    first, each = batch.row_starts + batch.num_computed[:n], batch.scheduled_each
    if each == 1:
        cells = first
    elif each:
        cells = (first[:, None] + batch.ascending[:each]).reshape(-1)
    else:
        cells = (first - views.query_start_loc[:n]).repeat(batch.num_scheduled[:n])
        cells += batch.ascending[:t]
    batch.flat_token_ids.take(
        cells, out=views.token_ids[:t], mode="clip"
    )  # clip: all are inside, no second look at bounds


def _write_logits_indices(batch: InputBatch, views: LayoutViews, inputs: StepInputs, n: int, num_logits: int) -> None:
    out: Int32[np.ndarray, "S"] = views.logits_indices
    if batch.scheduled_each == 1 + batch.drafts_each:
        out[:num_logits] = batch.ascending32[:num_logits]
    elif batch.any_drafts:
        out[:num_logits] = inputs.spec_decode_metadata.logits_indices
    else:
        np.subtract(views.query_start_loc[1 : n + 1], 1, out=out[:n])


def commit_block_table(batch: InputBatch, views: LayoutViews) -> tuple[int, list[TableUpdates]]:
    """The one seam for tables: cells changed since the last step go into the upload.

    Returns:
        How many cells that were, and those that did not fit: they have to go ahead of it.
    """
    ahead: list[TableUpdates] = []
    updates, at, room = views.updates, 0, views.layout.num_updates
    for group, table in enumerate(batch.block_table.tables):
        cells, values = table.take_updates()
        if not len(cells):
            continue
        surplus = max(len(cells) - (room - at), 0)
        if surplus:
            ahead.append(TableUpdates(group, cells[:surplus], values[:surplus]))
            cells, values = cells[surplus:], values[surplus:]
        end = at + len(cells)
        updates[0, at:end], updates[1, at:end], updates[2, at:end] = group, cells, values
        at = end
    return at, ahead
