"""A page to look at: one self-contained HTML file that shows the steps of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxrunner.trace.expected import Expected, PlanError
from jaxrunner.trace.reader import Trace

MOST_STEPS = 500
_LEFT_OUT = ("times_us", "buffer_intact", "flags")


def page_of(trace: Trace, first: int = 0, most_steps: int = MOST_STEPS) -> str:
    """The page's text. It needs no network and no other file.

    Args:
        first: number of the first step to show.
        most_steps: how many, at most. A page holds all its data, and a browser all of the page.

    Raises:
        ValueError: the trace has no such step, or most_steps is below 1.
    """
    if most_steps < 1:
        raise ValueError(f"a page shows at least 1 step, got {most_steps}")
    expected = Expected(trace.geometry)
    g = trace.geometry
    ratios = [ours // theirs for ours, theirs in zip(g.manager_block_sizes, g.block_sizes, strict=True)]
    steps: list[dict[str, Any]] = []
    occupancy: list[list[int]] = [[] for _ in ratios]
    skipped = 0
    for line in trace.lines():
        if line.get("event") == "reset":
            expected.reset()
        if "event" in line and not line.get("req_ids"):
            continue  # a reset, or a step that was refused
        try:
            expected.take_plan(line["plan"])
        except PlanError:  # check's to name; a faulty trace is what one wants to look at
            pass
        if line["step"] < first or len(steps) == most_steps:
            skipped += 1
            continue
        steps.append(_small(line))
        for group, ratio in enumerate(ratios):
            held = (known.blocks[group] for known in expected.requests.values() if known.blocks)
            # In blocks of the pool: a kernel may address parts of them.
            occupancy[group].append(len({block // ratio for blocks in held for block in blocks}))
    if not steps:
        raise ValueError(f"{trace.path} has {skipped} steps, none from step {first} on")
    shown = {
        "name": trace.path.name,
        "geometry": trace.header["geometry"],
        "steps": steps,
        "occupancy": occupancy,
        "skipped": skipped,
    }
    folder = Path(__file__).parent
    # "</script>" in a request id must not end the element.
    text = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
    script = (folder / "page.js").read_text(encoding="utf-8")
    page = (folder / "page.html").read_text(encoding="utf-8")
    return page.replace("/*SCRIPT*/", script).replace("/*DATA*/", text)


def _small(line: dict[str, Any]) -> dict[str, Any]:
    small = {name: value for name, value in line.items() if name not in _LEFT_OUT}
    plan = line["plan"]
    small["plan"] = {name: plan[name] for name in ("finished_req_ids", "preempted_req_ids")}
    return small
