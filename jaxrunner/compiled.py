"""One executable of a runner, and what it took to make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Compiled:
    """One executable and what it took to make.

    Attributes:
        call: raises ``ArgumentMismatch`` for what it was not compiled for.
        seconds: tracing, lowering and compiling, or loading.
        temp_bytes, code_bytes: of its temporaries, and of the program itself where the backend says so.
        cached: it came out of the persistent cache, or of saved executables; None: there is neither.
        fresh: XLA made it for this entry; else it came out of a cache, or JAX had it in memory, from wherever.
        executable: JAX's own.
        compile_anew: makes another one.
    """

    name: str
    call: Callable[..., Any]
    seconds: float
    temp_bytes: int
    code_bytes: int = 0
    cached: bool | None = None
    fresh: bool = False
    executable: Any = field(default=None, repr=False)
    compile_anew: Callable[[], Any] | None = field(default=None, repr=False)

    def describe(self) -> str:
        """Its shape, the seconds and the memory it took."""
        kept = ", was kept" if self.cached else ""
        return f"{self.name}: {self.seconds:.1f} s{kept}, {self.temp_bytes / 2**20:.1f} MiB of temporaries"
