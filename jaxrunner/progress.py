"""A progress bar for a run of requests, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from jaxrunner.compiled import Compiled


class RunProgress(Protocol):
    """Told of every step: tokens that came, and requests that ended in it."""

    def step(self, num_tokens: int, num_finished: int) -> None: ...

    def close(self) -> None: ...


class NoProgress:
    """Shows nothing."""

    def step(self, num_tokens: int, num_finished: int) -> None: ...

    def close(self) -> None: ...


class RichProgress:
    """Requests done and tokens per second. On something that is no terminal only the last state is written.

    Args:
        num_requests: that are going to run.
        max_tokens: that they can yield in all. The bar counts tokens: requests of a batch tend to end together.
    """

    def __init__(self, num_requests: int, max_tokens: int) -> None:
        self._num_requests = num_requests
        self._finished = self._tokens = 0
        self._start = time.perf_counter()
        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            TextColumn("{task.fields[requests]} requests, {task.fields[speed]:.1f} tokens/s"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
        )
        self._task = self._progress.add_task("", total=max_tokens, requests=f"0/{num_requests}", speed=0.0)
        self._progress.start()

    def step(self, num_tokens: int, num_finished: int) -> None:
        self._tokens += num_tokens
        self._finished += num_finished
        speed = self._tokens / max(time.perf_counter() - self._start, 1e-9)
        done = self._finished == self._num_requests
        self._progress.update(
            self._task,
            total=self._tokens if done else None,  # None leaves it; requests may end early
            completed=self._tokens,
            requests=f"{self._finished}/{self._num_requests}",
            speed=speed,
        )

    def close(self) -> None:
        self._progress.stop()


class TqdmProgress:
    """Drives a bar of tqdm's kind; it counts requests."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def step(self, num_tokens: int, num_finished: int) -> None:
        if num_finished:
            self._bar.update(num_finished)

    def close(self) -> None:
        self._bar.close()


@contextmanager
def compile_status(quiet: bool) -> Iterator[Callable[[Compiled, int], None]]:
    """A bar on stderr, where that is a terminal, over the programs that the warm-up compiles."""
    if quiet:
        yield lambda compiled, total: None
        return
    columns = (TextColumn("getting ready"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def tell(compiled: Compiled, total: int) -> None:
            progress.update(task, advance=1, total=total, description=compiled.describe())

        yield tell


def make_progress(use_tqdm: bool | Callable[..., Any], num_requests: int, max_tokens: int) -> RunProgress:
    """The bar that ``LLM.generate``'s ``use_tqdm`` asks for: none, the project's own, or a callable like tqdm."""
    if not use_tqdm or not num_requests:
        return NoProgress()
    if callable(use_tqdm):
        return TqdmProgress(use_tqdm(total=num_requests, desc="generating"))
    return RichProgress(num_requests, max_tokens)
