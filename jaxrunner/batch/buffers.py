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


class StepBuffer:
    """One buffer, and its views by layout: cut once, used every step."""

    def __init__(self, size: int) -> None:
        self._memory = aligned_zeros(size)
        self._views: dict[StepLayout, StepViews] = {}

    def views(self, layout: StepLayout) -> StepViews:
        """The fields of ``layout`` in this buffer."""
        found = self._views.get(layout)
        if found is None:
            found = {name: self._memory[at : at + n] for name, (at, n) in layout.fields.items()}
            found["buffer"] = self._memory[: layout.size]
            self._views[layout] = found
        return found


class BufferRing:
    """``depth`` buffers used in turn; ``depth`` is the steps that may be in flight, plus one."""

    def __init__(self, size: int, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"a ring needs at least one buffer, got {depth}")
        self._buffers = [StepBuffer(size) for _ in range(depth)]
        self._readers: list[Ready | None] = [None] * depth
        self._turn = -1

    def acquire(self, layout: StepLayout) -> StepViews:
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
