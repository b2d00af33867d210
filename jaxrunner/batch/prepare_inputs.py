"""Compiling a settled batch into one upload: the packed int32 buffer of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int32, Int64

from jaxrunner.batch.buffers import BufferRing, StepBuffer, StepViews
from jaxrunner.batch.input_batch import InputBatch
from jaxrunner.batch.spec_decode import SpecDecodeMetadata, spec_decode_metadata
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.shapes import StepLayout, StepShape, StepShapes, is_uniform_decode

PAD_SLOT_ID = -1
_PAST_EVERY_TABLE = np.iinfo(np.int32).max  # a scatter drops it


@dataclass(frozen=True)
class TableUpdates:
    """Block-table cells that did not fit into the step's own upload: they go ahead of it."""

    group: int
    cells: Int64[np.ndarray, "U"]
    values: Int32[np.ndarray, "U"]


class StepInputs:
    """A step's upload, and on request every array that can be derived from it, in NumPy.

    The device derives the same arrays from the same buffer; these are for invariants, traces, tests and people.
    Padding is included: arrays have the layout's T, R and S.

    Attributes:
        buffer: int32 [layout.size], what is uploaded.
        overflow: block-table cells to upload before it.
        entered: request indices whose sampling record has to be uploaded before it.
    """

    def __init__(self, batch: InputBatch, layout: StepLayout, shape: StepShape, views: StepViews) -> None:
        self.layout, self.shape, self._views = layout, shape, views
        self.buffer: Int32[np.ndarray, "size"] = views["buffer"]
        self.req_ids = batch.req_ids.copy()
        self.overflow: list[TableUpdates] = []
        self.entered: list[int] = []
        self._block_table, self._token_row_stride = batch.block_table, batch.token_row_stride

    def __getitem__(self, name: str) -> Int32[np.ndarray, "n"]:
        """The field ``name`` of the layout, a view of the buffer."""
        return self._views[name]

    @property
    def num_reqs(self) -> int:
        return int(self["num_reqs"][0])

    @property
    def num_tokens(self) -> int:
        return int(self["num_tokens"][0])

    @property
    def num_logits(self) -> int:
        return int(self["num_logits"][0])

    @property
    def query_start_loc(self) -> Int32[np.ndarray, "R+1"]:
        return self["query_start_loc"]

    @cached_property
    def query_lens(self) -> Int32[np.ndarray, "R"]:
        """Scheduled tokens per row; 0 for padding rows."""
        return np.diff(self.query_start_loc)

    @cached_property
    def req_indices(self) -> Int32[np.ndarray, "T"]:
        """Row of each token; padding tokens have R."""
        rows = np.repeat(np.arange(self.layout.num_reqs, dtype=np.int32), self.query_lens)
        return self._padded_tokens(rows, self.layout.num_reqs)

    @cached_property
    def query_pos(self) -> Int32[np.ndarray, "T"]:
        """Offset of each token in its row's interval; padding 0."""
        n = self.num_tokens
        starts = np.repeat(self.query_start_loc[:-1], self.query_lens)
        return self._padded_tokens(np.arange(n, dtype=np.int32) - starts, 0)

    @cached_property
    def positions(self) -> Int32[np.ndarray, "T"]:
        """Position of each token in its request; padding 0."""
        n = self.num_tokens
        return self._padded_tokens(self["num_computed"][self.req_indices[:n]] + self.query_pos[:n], 0)

    @cached_property
    def token_indices(self) -> Int64[np.ndarray, "T"]:
        """Where each token lies in the flat token table: position + request index * row length; padding 0."""
        n = self.num_tokens
        indices = self["idx_mapping"][self.req_indices[:n]].astype(np.int64)
        return self._padded_tokens(self.positions[:n] + indices * self._token_row_stride, 0)

    @cached_property
    def is_prefilling(self) -> Bool[np.ndarray, "R"]:
        """Rows whose prompt is not wholly computed before the step. By counts, never by length."""
        return (self.query_lens > 0) & (self["num_computed"] < self["num_prompt"])

    @cached_property
    def seq_lens(self) -> Int32[np.ndarray, "R"]:
        """Length of each row's sequence after this step; 0 for padding rows."""
        return np.where(self.query_lens > 0, self["num_computed"] + self.query_lens, 0).astype(np.int32)

    @cached_property
    def discard(self) -> Bool[np.ndarray, "R"]:
        """Rows whose sample must not count: their known tokens are not all computed. By counts, never by length."""
        return self.seq_lens < self["num_known"]

    @property
    def logits_indices(self) -> Int32[np.ndarray, "S"]:
        return self["logits_indices"]

    @cached_property
    def spec_decode_metadata(self) -> SpecDecodeMetadata:
        n = self.num_reqs
        return spec_decode_metadata(self.query_start_loc[1 : n + 1], self["num_draft"][:n])

    def block_table(self, group: int = 0) -> Int32[np.ndarray, "R W"]:
        """Table rows as the step sees them: null past each sequence's last block, null for padding rows.

        Reads the batch: right only until the batch changes.
        """
        table = self._block_table[group]
        rows = np.zeros((self.layout.num_reqs, table.width), np.int32)
        n = self.num_reqs
        rows[:n] = table.table[self["idx_mapping"][:n]]
        used = -(-self.seq_lens // table.block_size)
        rows[np.arange(table.width)[None, :] >= used[:, None]] = 0
        return rows

    def slot_mapping(self, group: int = 0) -> Int32[np.ndarray, "T"]:
        """KV slot of each token: block * block_size + offset; padding PAD_SLOT_ID."""
        size, n = self._block_table[group].block_size, self.num_tokens
        positions, rows = self.positions[:n], self.req_indices[:n]
        slots = self.block_table(group)[rows, positions // size] * size + positions % size
        return self._padded_tokens(slots, PAD_SLOT_ID)

    def _padded_tokens(self, values: np.ndarray, fill: int) -> np.ndarray:
        out = np.full(self.layout.num_tokens, fill, values.dtype)
        out[: len(values)] = values
        return out


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
    indices = batch.row_indices
    drafts = batch.num_draft_tokens[indices] if batch.any_drafts else None
    num_logits = n if drafts is None else n + int(drafts.sum())
    scheduled, computed = batch.num_scheduled[:n], batch.num_computed[:n]
    if shape is None:
        query_len = shapes.query_len
        uniform = (
            shapes.policy.separates
            and t == n * query_len
            and is_uniform_decode(scheduled.tolist(), (computed < batch.row_prompts).tolist(), query_len)
        )
        shape = shapes.dispatch(t, num_logits, n, uniform)
    elif t > shape.num_tokens or n > shape.num_reqs or num_logits > shape.num_logits:
        raise ValueError(f"{t} tokens, {n} rows and {num_logits} logits rows do not fit {shape}")
    layout = shapes.layout(shape)
    views = buffers.acquire(layout) if buffers is not None else StepBuffer(layout.size).views(layout)
    inputs = StepInputs(batch, layout, shape, views)

    views["num_reqs"][0], views["num_tokens"][0], views["num_logits"][0] = n, t, num_logits
    views["flags"][0] = batch.flags
    starts = views["query_start_loc"]
    starts[0] = 0
    scheduled.cumsum(out=starts[1 : n + 1])
    starts[n + 1 :] = t
    _fill(views["idx_mapping"], batch.idx_mapping[:n], batch.max_num_reqs)
    _fill(views["num_computed"], computed, 0)
    _fill(views["num_known"], batch.num_tokens[indices], 0)
    _fill(views["num_prompt"], batch.row_prompts, 0)
    if drafts is None:
        views["num_draft"].fill(0)
    else:
        _fill(views["num_draft"], drafts, 0)
    views["use_device"].fill(0)

    cells = batch.row_starts + computed
    if t != n:
        cells = np.repeat(cells - starts[:n], scheduled)
        cells += np.arange(t)
    tokens = views["token_ids"]
    batch.token_ids.reshape(-1).take(
        cells, out=tokens[:t], mode="clip"
    )  # clip: no second pass for bounds; all are inside
    tokens[t:] = 0

    if drafts is None:
        _fill(views["logits_indices"], starts[1 : n + 1] - 1, 0)
    else:
        _fill(views["logits_indices"], inputs.spec_decode_metadata.logits_indices, 0)
    commit_block_table(batch, inputs)
    inputs.entered = batch.take_entered()
    return inputs


def commit_block_table(batch: InputBatch, inputs: StepInputs) -> None:
    """The one seam for tables: cells changed since the last step go into the upload; what does not fit goes ahead."""
    room, at = inputs.layout.num_updates, 0
    groups, cells_out, values_out = inputs["update_group"], inputs["update_cell"], inputs["update_value"]
    for group, table in enumerate(batch.block_table.tables):
        cells, values = table.take_updates()
        ahead = max(len(cells) - (room - at), 0)
        if ahead:
            inputs.overflow.append(TableUpdates(group, cells[:ahead], values[:ahead]))
            cells, values = cells[ahead:], values[ahead:]
        end = at + len(cells)
        groups[at:end], cells_out[at:end], values_out[at:end] = group, cells, values
        at = end
    groups[at:] = 0
    values_out[at:] = 0
    cells_out[at:] = _PAST_EVERY_TABLE


def _fill(field: np.ndarray, values: np.ndarray, padding: int) -> None:
    n = len(values)
    field[:n] = values
    field[n:] = padding
