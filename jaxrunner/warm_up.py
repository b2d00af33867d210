"""Compiling what a configuration asks for before the first step; the rest, if it wants that, beside the work."""

from __future__ import annotations

from collections.abc import Callable

from jaxrunner.background import BackgroundCompilation
from jaxrunner.compilation_counter import CompilationCounter
from jaxrunner.compiled import Compiled
from jaxrunner.config import RunnerConfig
from jaxrunner.executables import StepExecutables
from jaxrunner.shapes import StepShapes

OnCompiled = Callable[[Compiled, int], None]
"""Called with each executable as it is ready, and the number of programs that the warm-up makes in all."""


def warm_up(
    executables: StepExecutables,
    config: RunnerConfig,
    shapes: StepShapes,
    counter: CompilationCounter,
    on_compiled: OnCompiled | None = None,
) -> BackgroundCompilation | None:
    """Compiles what ``config.warmup`` says. Returns what goes on beside the work, if ``background_compilation``
    wants that; the token budget's bucket is compiled first in any case then.
    """
    wanted = config.warmup
    tokens = shapes.tokens if wanted == "all" else () if wanted == "lazy" else tuple(wanted)
    if config.background_compilation:
        tokens = tuple(sorted({*tokens, shapes.tokens[-1]}))
    if not tokens:
        return None
    total = len(executables.jobs(tokens))
    for compiled in executables.compile_all(tokens, config.compile_workers):
        if on_compiled is not None:
            on_compiled(compiled, total)
    executables.warm = True
    return BackgroundCompilation(executables, shapes, tokens, counter) if config.background_compilation else None
