"""What a step is given: its upload, and every array that can be derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int32, Int64

from jaxrunner.batch.buffers import LayoutViews, StepViews
from jaxrunner.batch.input_batch import InputBatch
from jaxrunner.batch.spec_decode import SpecDecodeMetadata, spec_decode_metadata
from jaxrunner.shapes import StepLayout, StepShape

PAD_SLOT_ID = -1


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
        names, req_ids: requests of the rows.
        overflow: block-table cells to upload before it.
        entered: request indices whose sampling record has to be uploaded before it.
    """

    def __init__(self, batch: InputBatch, layout: StepLayout, shape: StepShape, views: LayoutViews) -> None:
        self.layout, self.shape = layout, shape
        self._views: StepViews = views
        self.buffer: Int32[np.ndarray, "size"] = views.buffer
        self.names = names = batch.names
        self.req_ids = names.req_ids
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
