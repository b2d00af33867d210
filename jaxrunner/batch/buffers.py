"""Host buffers that are uploaded, and when one may be written again.

On the CPU backend a NumPy array whose address is 64-byte aligned is not copied: the step reads the very memory. So a
buffer is written again only when an output of the step that read it is ready.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from jaxtyping import Int32

_ALIGNMENT = 64


class Ready(Protocol):
    """An output of a step, as a JAX array is one."""

    def block_until_ready(self) -> object: ...


def aligned_zeros(size: int) -> Int32[np.ndarray, "size"]:
    """int32 zeros at a 64-byte aligned address: always the case that aliasing can hurt, never by luck."""
    raw = np.zeros(size * 4 + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size * 4].view(np.int32)


class BufferRing:
    """``depth`` buffers used in turn; ``depth`` is the steps that may be in flight, plus one."""

    def __init__(self, size: int, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"a ring needs at least one buffer, got {depth}")
        self._buffers = [aligned_zeros(size) for _ in range(depth)]
        self._readers: list[Ready | None] = [None] * depth
        self._turn = -1

    def acquire(self) -> Int32[np.ndarray, "size"]:
        """The next buffer, once the step that read it last has an output ready."""
        self._turn = (self._turn + 1) % len(self._buffers)
        reader = self._readers[self._turn]
        if reader is not None:
            reader.block_until_ready()
            self._readers[self._turn] = None
        return self._buffers[self._turn]

    def read_by(self, output: Ready) -> None:
        """The buffer acquired last is read by the step that makes ``output``."""
        self._readers[self._turn] = output
