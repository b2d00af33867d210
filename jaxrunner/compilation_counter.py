"""Counts what JAX compiles, and what it found in its persistent cache instead."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_HIT, _MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


class CompilationCounter:
    """Listens to this process's compilations for as long as it lives.

    Attributes:
        compilations: programs compiled or loaded from the persistent cache, but for those of ``apart`` threads.
        hits, misses: of the persistent cache, in all threads. Both stay 0 where there is none.
    """

    def __init__(self) -> None:
        self.compilations = self.hits = self.misses = 0
        self._apart: set[int] = set()
        self._of_thread = threading.local()
        this = weakref.ref(self)

        def on_duration(event: str, duration_secs: float, **facts: Any) -> None:
            counter = this()
            if counter is None or event != _COMPILED:
                return
            counter._of_thread.compiled = True
            if threading.get_ident() not in counter._apart:
                counter.compilations += 1

        def on_event(event: str, **facts: Any) -> None:
            counter = this()
            if counter is not None and event in (_HIT, _MISS):
                counter._heard(event == _HIT)

        jax.monitoring.register_event_duration_secs_listener(on_duration)
        jax.monitoring.register_event_listener(on_event)
        weakref.finalize(self, _stop, on_duration, on_event)

    def apart(self) -> None:
        """From now on the calling thread's compilations are not counted: it compiles ahead, beside the work."""
        self._apart.add(threading.get_ident())

    def is_apart(self) -> bool:
        """Whether the calling thread compiles beside the work."""
        return threading.get_ident() in self._apart

    def cached(self) -> bool | None:
        """Whether this thread's last lookup in the persistent cache was a hit; None before any. Then forgets it."""
        last = getattr(self._of_thread, "last", None)
        self._of_thread.last = None
        return last

    def compiled(self) -> bool:
        """Whether this thread compiled a program or loaded one from the persistent cache. Then forgets it."""
        was = getattr(self._of_thread, "compiled", False)
        self._of_thread.compiled = False
        return was

    def _heard(self, hit: bool) -> None:
        self._of_thread.last = hit
        if hit:
            self.hits += 1
        else:
            self.misses += 1


def _stop(on_duration: Any, on_event: Any) -> None:
    jax.monitoring.unregister_event_duration_listener(on_duration)
    jax.monitoring.unregister_event_listener(on_event)
