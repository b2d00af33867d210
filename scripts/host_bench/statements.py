"""How long each statement takes: a clock that is read at every line, by Python's own monitoring of chosen functions.

A statement's time is its own: what a watched function takes that it calls is that function's, while calls of anything
else (NumPy, builtins, a generator's body) are the statement's that makes them.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from types import CodeType, FunctionType
from typing import Any, NamedTuple

_EVENTS = sys.monitoring.events
_WATCHED = _EVENTS.LINE | _EVENTS.PY_START | _EVENTS.PY_RETURN
_START, _RETURN = 0, -1  # in place of a line


class Statement(NamedTuple):
    """Where a statement begins, and in which function."""

    file: str
    line: int
    function: str


@dataclass(slots=True)
class Spent:
    """On a statement: how often it was run, nanoseconds, and how often the clock was read in them."""

    times: int = 0
    nanoseconds: int = 0
    readings: int = 0

    def add(self, more: Spent) -> None:
        self.times += more.times
        self.nanoseconds += more.nanoseconds
        self.readings += more.readings


class StatementClock:
    """Watches all functions that live in some files, while it is open; ``watching`` says when.

    Args:
        files: paths as their code has them.
        clock: nanoseconds.

    Raises:
        ValueError: another profiler is at work.
    """

    def __init__(self, *files: Path, clock: Callable[[], int] = perf_counter_ns) -> None:
        self._tool = sys.monitoring.PROFILER_ID
        sys.monitoring.use_tool_id(self._tool, "jaxrunner statements")
        names = {str(file) for file in files}
        functions = (f for f in gc.get_objects() if type(f) is FunctionType)
        self._codes = {f.__code__ for f in functions if f.__code__.co_filename in names}
        # Code, line and time in turn. Containers that stay would call the garbage collector into what is watched.
        self._readings: list[Any] = []
        read = self._readings.extend
        callbacks: dict[int, Callable[..., object]] = {
            _EVENTS.LINE: lambda code, line: read((code, line, clock())),
            _EVENTS.PY_START: lambda code, offset: read((code, _START, clock())),
            _EVENTS.PY_RETURN: lambda code, offset, value: read((code, _RETURN, clock())),
        }
        for event, callback in callbacks.items():
            sys.monitoring.register_callback(self._tool, event, callback)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The clock is read in here. Each function is prepared for it on its first call: leave that out."""
        self._set(_WATCHED)
        try:
            yield
        finally:
            self._set(0)

    def mark(self) -> int:
        """A point in time, for ``spent_between``."""
        return len(self._readings)

    def spent_between(self, start: int, end: int) -> dict[Statement, Spent]:
        """What was spent between two marks, by statement; ``forget`` makes them void."""
        spent: dict[Statement, Spent] = {}
        running: list[tuple[CodeType, Statement | None]] = []  # functions, and what each is at
        last = 0
        readings = iter(self._readings[start:end])
        for code, line, now in zip(readings, readings, readings, strict=True):
            at = running[-1][1] if running else None
            if at is not None:
                entry = spent.setdefault(at, Spent())
                entry.nanoseconds += now - last
                entry.readings += 1
            last = now
            if line == _START:
                running.append((code, at))  # entering it is still the caller's
                continue
            while running[-1][0] is not code:  # an exception has left these
                running.pop()
            if line == _RETURN:
                running.pop()
                continue
            now_at = Statement(code.co_filename, _first_line(code.co_filename, line), code.co_qualname)
            if now_at != running[-1][1]:  # the other lines of a statement are no statements
                spent.setdefault(now_at, Spent()).times += 1
            running[-1] = code, now_at
        return spent

    def forget(self) -> None:
        """Drops what was read so far."""
        self._readings.clear()

    def close(self) -> None:
        """Ends the watching; another profiler may start."""
        for event in (_EVENTS.LINE, _EVENTS.PY_START, _EVENTS.PY_RETURN):
            sys.monitoring.register_callback(self._tool, event, None)
        sys.monitoring.free_tool_id(self._tool)

    def _set(self, events: int) -> None:
        for code in self._codes:
            sys.monitoring.set_local_events(self._tool, code, events)


def source_of(statement: Statement) -> str:
    """The statement's text on one line; of a compound one, its head."""
    lines = Path(statement.file).read_text(encoding="utf-8").splitlines()
    last = _statements(statement.file)[1].get(statement.line, statement.line)
    return " ".join(line.strip() for line in lines[statement.line - 1 : last])


def _first_line(file: str, line: int) -> int:
    return _statements(file)[0].get(line, line)


@cache
def _statements(file: str) -> tuple[dict[int, int], dict[int, int]]:
    """(the first line of the statement that each line belongs to, the last line by the first)."""
    first, last = dict[int, int](), dict[int, int]()
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            last[node.lineno] = max(node.lineno, end)
            first.update(dict.fromkeys(range(node.lineno, last[node.lineno] + 1), node.lineno))
    return first, last
