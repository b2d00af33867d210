"""What a step's time is, statement by statement, for one trace.

Reading a clock at every line makes a step twice as slow, or three times. So blocks of steps are watched and left alone
in turn. From a statement's time goes what the readings in it cost: each as much as makes all statements together take
what the steps took that were left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, median
from time import perf_counter_ns
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

import jaxrunner
from scripts.host_bench import replay
from scripts.host_bench.statements import Spent, Statement, StatementClock, source_of
from scripts.host_bench.workload import TraceConfig, trace

LEAST_STEPS = 2 * replay.BLOCK
_UNCOUNTED = 2  # first steps of a block: functions are made ready for being watched, or for not being
_HICCUP = 3  # times the median of its block: the step was interrupted
_PACKAGE = Path(jaxrunner.__file__).parent
_PHASES = ("before_forward", "record_sampled")
_SOURCE_WIDTH = 100

_Spent = dict[Statement, Spent]


class _Block(NamedTuple):
    """One phase of a block's counted steps: how many, nanoseconds a step, and if they were watched, who took them."""

    num_steps: int
    nanoseconds: float
    spent: _Spent


class _Span(NamedTuple):
    """One phase of one step, and the clock's marks around it."""

    nanoseconds: int
    first: int
    last: int


def profile(
    config: TraceConfig,
    now: Callable[[], int] = perf_counter_ns,
    on_step: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Statements of "before_forward" and "record_sampled", those that take most first; functions outside of the package
    count for the statement that calls them.

    Args:
        now: the clock, in nanoseconds.

    Returns:
        For each of the two "us": microseconds a step when left alone, "watched_us", "reading_us": what a reading of the
        clock costs, and "statements": of each file, line, function, source, "times" a step, "us" a step and "share".
    """
    path = replay.HostPath(config)
    clock = StatementClock(*_PACKAGE.rglob("*.py"), Path(replay.__file__), clock=now)
    alone: dict[str, list[_Block]] = {phase: [] for phase in _PHASES}
    watched: dict[str, list[_Block]] = {phase: [] for phase in _PHASES}
    try:
        for i, steps in enumerate(replay.in_blocks(trace(config))):
            counted, watching = steps[0].measured and len(steps) == replay.BLOCK, i % 2 == 1
            ran = list[tuple[_Span, _Span]]()
            with clock.watching() if counted and watching else nullcontext():
                for step in steps:
                    ran.append(_run(path, step, clock.mark, now))
                    on_step()
            if counted:
                for phase, spans in zip(_PHASES, zip(*ran[_UNCOUNTED:], strict=True), strict=True):
                    (watched if watching else alone)[phase].append(_block(spans, clock))
            clock.forget()
    finally:
        clock.close()
    return _summary({p: _quieter(b) for p, b in alone.items()}, {p: _quieter(b) for p, b in watched.items()})


def _run(
    path: replay.HostPath, step: replay.TraceStep, mark: Callable[[], int], now: Callable[[], int]
) -> tuple[_Span, _Span]:
    first, start = mark(), now()
    path.update(step, check=False)
    inputs = path.prepare(step)
    before = _Span(now() - start, first, mark())
    sampled = path.sampled(step)
    first, start = mark(), now()
    path.record(inputs, sampled)
    return before, _Span(now() - start, first, mark())


def _block(spans: Sequence[_Span], clock: StatementClock) -> _Block:
    most = _HICCUP * median(span.nanoseconds for span in spans)
    spans = [span for span in spans if span.nanoseconds <= most]
    spent = _together(clock.spent_between(span.first, span.last) for span in spans)
    return _Block(len(spans), fmean(span.nanoseconds for span in spans), spent)


def _quieter(blocks: list[_Block]) -> list[_Block]:
    """The half that took less: the others tell what else the machine did."""
    return sorted(blocks, key=lambda block: block.nanoseconds)[: (len(blocks) + 1) // 2]


def _together(several: Iterable[_Spent]) -> _Spent:
    out: _Spent = {}
    for spent in several:
        for statement, more in spent.items():
            out.setdefault(statement, Spent()).add(more)
    return out


def _summary(alone: dict[str, list[_Block]], watched: dict[str, list[_Block]]) -> dict[str, dict[str, Any]]:
    us, watched_us = ({p: fmean(b.nanoseconds for b in kind[p]) / 1e3 for p in _PHASES} for kind in (alone, watched))
    totals = {p: _together(block.spent for block in blocks) for p, blocks in watched.items()}
    steps = {p: sum(block.num_steps for block in blocks) for p, blocks in watched.items()}
    readings = sum(spent.readings / steps[p] for p in _PHASES for spent in totals[p].values())
    reading_us = max(0.0, sum(watched_us.values()) - sum(us.values())) / readings
    out: dict[str, dict[str, Any]] = {}
    for phase, total in totals.items():
        own = {s: max(0.0, spent.nanoseconds / 1e3 - reading_us * spent.readings) for s, spent in total.items()}
        to_share = 1 / sum(own.values())
        statements = [
            {
                "file": Path(s.file).relative_to(_PACKAGE.parent).as_posix(),
                "line": s.line,
                "function": s.function,
                "source": source_of(s),
                "times": total[s].times / steps[phase],
                "us": own[s] * to_share * us[phase],
                "share": own[s] * to_share,
            }
            for s in sorted(own, key=own.__getitem__, reverse=True)
        ]
        out[phase] = {
            "us": us[phase],
            "watched_us": watched_us[phase],
            "reading_us": reading_us,
            "statements": statements,
        }
    return out


def as_table(title: str, phase: dict[str, Any], most: int) -> Table:
    """The ``most`` statements that take most of a phase of ``profile``."""
    table = Table(
        title=f"{title}: {phase['us']:.1f} µs a step",
        caption=f"scaled from {phase['watched_us']:.1f} µs when watched; each reading: {phase['reading_us']:.2f} µs",
    )
    for head in ("share", "µs", "times"):
        table.add_column(head, justify="right")
    table.add_column("statement", no_wrap=True)
    table.add_column("source", no_wrap=True)
    for s in phase["statements"][:most]:
        source = s["source"]
        table.add_row(
            f"{s['share']:.1%}",
            f"{s['us']:.2f}",
            f"{s['times']:.2f}",
            f"{Path(s['file']).name}:{s['line']}",
            escape(source if len(source) <= _SOURCE_WIDTH else source[: _SOURCE_WIDTH - 1] + "…"),
        )
    return table
