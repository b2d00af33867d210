"""Rare buckets compile beside the work, which rounds up to one that is ready until they are."""

from __future__ import annotations

import logging
import threading
import weakref

from jaxrunner.compilation_counter import CompilationCounter
from jaxrunner.executables import StepExecutables
from jaxrunner.shapes import StepShapes


class BackgroundCompilation:
    """A thread that compiles the token buckets that the warm-up left out, the smallest first.

    Args:
        tokens: token buckets that are ready, the token budget among them.
        counter: is told to leave this thread's compilations out: no step waits for them.

    Attributes:
        ready: the shapes that a step may take now. Replaced, never changed, so a step sees one state of it.
        failed: what ended the thread early, if anything did; the buckets that are ready go on serving.
    """

    def __init__(
        self, executables: StepExecutables, shapes: StepShapes, tokens: tuple[int, ...], counter: CompilationCounter
    ) -> None:
        self._executables, self._shapes, self._counter = executables, shapes, counter
        self._done = set(tokens)
        self._stop = threading.Event()
        self.ready = shapes.only(sorted(self._done), shapes.logits)
        self.failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="compile-in-background", daemon=True)
        # At exit a compilation that has begun is waited for: XLA must not be torn down under it.
        weakref.finalize(executables, _end, self._stop, self._thread)
        self._thread.start()

    def join(self) -> StepShapes:
        """Waits until every bucket is ready, and gives all shapes.

        Raises:
            RuntimeError: a bucket could not be compiled.
        """
        self._thread.join()
        if self.failed is not None:
            raise RuntimeError(f"compiling in the background failed: {self.failed}") from self.failed
        return self.ready

    def _run(self) -> None:
        self._counter.apart()
        for size in self._shapes.tokens:
            if size in self._done:
                continue
            for job in self._executables.jobs((size,)):
                if self._stop.is_set():
                    return
                try:
                    job()
                except Exception as error:  # the work goes on without this bucket; whoever looks is told
                    self.failed = error
                    logging.getLogger("jaxrunner").warning("compiling %d tokens in the background: %s", size, error)
                    return
            self._done.add(size)
            self.ready = self._shapes.only(sorted(self._done), self._shapes.logits)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join()
