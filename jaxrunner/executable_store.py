"""Compiled programs by name: each made once, whoever asks first, and kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import wraps
from typing import Any

import jax

from jaxrunner.compilation_counter import CompilationCounter
from jaxrunner.compiled import Compiled
from jaxrunner.exact_call import exact
from jaxrunner.saved_executables import SavedExecutables


class ExecutableStore:
    """Compiles programs ahead of time, one of a name, and keeps them. Safe for threads.

    Args:
        counter: hears of JAX's compilations.

    Attributes:
        compiled: every executable so far, by name.
        warm: set once warm-up is over; ``late`` counts what was compiled after that.
        saved: executables of an earlier run, used in place of compiling.
    """

    def __init__(self, counter: CompilationCounter | None = None) -> None:
        self._counter = counter if counter is not None else CompilationCounter()
        self._futures: dict[str, Future[Compiled]] = {}
        self._lock = threading.Lock()
        self.compiled: dict[str, Compiled] = {}
        self.saved: SavedExecutables | None = None
        self.warm = False
        self.late = 0

    def _get(
        self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any], donate: tuple[int, ...]
    ) -> Callable[..., Any]:
        """The executable of that name, compiled by whoever asks first; others wait for it."""
        found = self.compiled.get(name)
        if found is not None:
            return found.call
        with self._lock:
            future, mine = self._futures.get(name), False
            if future is None:
                future, mine = self._futures.setdefault(name, Future()), True
        if mine:
            try:
                compiled = self._compile(name, function, arguments, donate)
            except BaseException as error:
                del self._futures[name]
                future.set_exception(error)
                raise
            self.compiled[name] = compiled
            future.set_result(compiled)
        return future.result().call

    def _compile(
        self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any], donate: tuple[int, ...]
    ) -> Compiled:
        start = time.perf_counter()
        self._counter.cached()  # forgets what was before
        self._counter.compiled()
        executable = self.saved.load(name) if self.saved is not None else None
        cached: bool | None = True
        fresh = False

        def compile_anew() -> Any:
            @wraps(function)
            def again(*values: Any) -> Any:  # JAX would find the function itself in its memory
                return function(*values)

            return jax.jit(again, donate_argnums=donate).lower(*arguments.values()).compile()

        if executable is None:
            executable = jax.jit(function, donate_argnums=donate).lower(*arguments.values()).compile()
            cached = self._counter.cached()
            fresh = self._counter.compiled() and not cached
        analysis = executable.memory_analysis()
        temp, code = (
            int(getattr(analysis, f"{what}_size_in_bytes", 0)) if analysis is not None else 0
            for what in ("temp", "generated_code")
        )
        call = exact(name, executable, tuple(arguments), tuple(arguments.values()))
        if self.warm and not self._counter.is_apart():
            self.late += 1
        return Compiled(name, call, time.perf_counter() - start, temp, code, cached, fresh, executable, compile_anew)
