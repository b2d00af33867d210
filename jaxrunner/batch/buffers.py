"""Host buffers that are uploaded, and when one may be written again.

On the CPU backend a NumPy array whose address is 64-byte aligned is not copied: the step reads the very memory. So a
buffer is written again only when an output of the step that read it is ready.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from jaxtyping import Int32

from jaxrunner.shapes import StepLayout

_ALIGNMENT = 64


class Ready(Protocol):
    """An output of a step, as a JAX array is one."""

    def block_until_ready(self) -> object: ...


def aligned_zeros(size: int) -> Int32[np.ndarray, "size"]:
    """int32 zeros at a 64-byte aligned address: always the case that aliasing can hurt, never by luck."""
    raw = np.zeros(size * 4 + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size * 4].view(np.int32)


StepViews = dict[str, np.ndarray]
"""A view per field of a layout, and the whole under "buffer"."""

ROW_FIELDS = ("idx_mapping", "num_computed", "num_known", "num_prompt", "num_draft", "use_device")
"""The layout's fields of one number a row. They lie one behind the other, so that one copy fills them."""
LIVE_FIELDS = slice(1, 3)  # of these, what changes although the rows hold the same requests

_UPDATE_FIELDS = ("update_group", "update_cell", "update_value")
_PAST_EVERY_TABLE = np.iinfo(np.int32).max  # a scatter drops it
_PADDING_UPDATE = np.array([[0], [_PAST_EVERY_TABLE], [0]], np.int32)


class LayoutViews(StepViews):
    """The fields of one layout in one buffer, by name, and those that are written together, as one array.

    What lies behind a step's numbers is padding, as ``StepLayout`` says. It is kept from step to step: only what the
    last step wrote and this one doesn't has to be cleared. In the same way a step leaves alone what the last one in
    this buffer wrote just as it would itself: ``written_rows`` and ``written_ends`` say what that was.

    Attributes:
        rows: [len(ROW_FIELDS), R].
        updates: [3, U]: groups, cells, values.
        written_rows: whose fields are in ``rows``, except for the live ones (``InputBatch.fields_stamp``).
        written_ends: (rows, tokens of each, logits rows) that query_start_loc and logits_indices were written for, if
            every row had the same number of both.
        has_groups: an entry of ``update_group`` may be other than 0.
    """

    def __init__(self, memory: Int32[np.ndarray, "size"], layout: StepLayout) -> None:
        super().__init__({name: memory[at : at + n] for name, (at, n) in layout.fields.items()})
        self["buffer"] = self.buffer = memory[: layout.size]
        self.layout = layout
        self.query_start_loc = self["query_start_loc"]
        self.logits_indices = self["logits_indices"]
        self.token_ids = self["token_ids"]
        self.rows = self._together(layout, ROW_FIELDS)
        self.updates = self._together(layout, _UPDATE_FIELDS)
        self.update_group, self.update_cell, self.update_value = self.updates
        self.cut_to(0)
        self.forget()

    def forget(self) -> None:
        """Another layout has written to this memory."""
        layout = self.layout
        self._used = layout.num_reqs, layout.num_tokens, layout.num_logits, layout.num_updates
        self._last_start = -1
        self.written_rows: object = None
        self.written_ends: object = None
        self.update_group[...] = 0
        self.has_groups = False

    def cut_to(self, rows: int) -> None:
        """Cuts the fields to the rows in use; steps with as many of them share the views."""
        self.num_rows = rows
        self.used_rows: Int32[np.ndarray, "fields n"] = self.rows[:, :rows]
        self.live_rows: Int32[np.ndarray, "live n"] = self.used_rows[LIVE_FIELDS]
        self.starts: Int32[np.ndarray, "n"] = self.query_start_loc[:rows]
        self.ends: Int32[np.ndarray, "n"] = self.query_start_loc[1 : rows + 1]

    def pad(self, rows: int, tokens: int, logits: int, updates: int, scratch_index: int) -> None:
        """The padding behind a step of so many rows, tokens, logits rows and updates."""
        used = rows, tokens, logits, updates
        if used == self._used and tokens == self._last_start:
            return
        last_rows, last_tokens, last_logits, last_updates = self._used
        if rows < last_rows:
            self.rows[:, rows:last_rows] = 0
            self.rows[0, rows:last_rows] = scratch_index
        if rows < last_rows or tokens != self._last_start:
            self.query_start_loc[rows + 1 :] = self._last_start = tokens
        if tokens < last_tokens:
            self.token_ids[tokens:last_tokens] = 0
        if logits < last_logits:
            self.logits_indices[logits:last_logits] = 0
        if updates < last_updates:
            self.updates[:, updates:last_updates] = _PADDING_UPDATE
        self._used = used

    def _together(self, layout: StepLayout, names: tuple[str, ...]) -> Int32[np.ndarray, "fields n"]:
        start, length = layout.fields[names[0]]
        if [layout.fields[name] for name in names] != [(start + i * length, length) for i in range(len(names))]:
            raise ValueError(f"the layout must hold {names} one behind the other, got {layout.fields}")
        return self.buffer[start : start + len(names) * length].reshape(len(names), length)


class StepBuffer:
    """One buffer, and its views by layout: cut once, used every step."""

    _MOST_LAYOUTS = 256  # unpadded steps have a layout each

    def __init__(self, size: int) -> None:
        self.memory = aligned_zeros(size)
        self._views: dict[StepLayout, LayoutViews] = {}
        self._last: LayoutViews | None = None

    def views(self, layout: StepLayout) -> LayoutViews:
        """The fields of ``layout`` in this buffer."""
        if self._last is not None and self._last.layout is layout:
            return self._last
        found = self._views.get(layout)
        if found is None:
            if len(self._views) >= self._MOST_LAYOUTS:
                self._views.clear()
            found = self._views[layout] = LayoutViews(self.memory, layout)
        found.forget()
        self._last = found
        return found


class BufferRing:
    """``depth`` buffers used in turn; ``depth`` is the steps that may be in flight, plus one."""

    def __init__(self, size: int, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"a ring needs at least one buffer, got {depth}")
        self._buffers = [StepBuffer(size) for _ in range(depth)]
        self._readers: list[Ready | None] = [None] * depth
        self._turn = -1

    def acquire(self, layout: StepLayout) -> LayoutViews:
        """The next buffer, cut by ``layout``, once the step that read it last has an output ready."""
        self._turn = (self._turn + 1) % len(self._buffers)
        reader = self._readers[self._turn]
        if reader is not None:
            reader.block_until_ready()
            self._readers[self._turn] = None
        return self._buffers[self._turn].views(layout)

    def read_by(self, output: Ready) -> None:
        """The buffer acquired last is read by the step that makes ``output``."""
        self._readers[self._turn] = output
