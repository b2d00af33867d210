#!/usr/bin/env python
"""The serial host time of a decode step, by segment; and what the calls of its executables cost for themselves.

Every request decodes. The modes given run in turns, a step each, so that what else the machine does hits all alike:

  bench_dispatch.py                                          the demo's model at 256 requests, mode FULL
  bench_dispatch.py --reqs 8 --modes FULL,PIECEWISE,NONE     what each mode costs here: host, step, compiling
  nice -n -15 bench_dispatch.py --steps 15 --json out.json

Times of segments and calls are CPU time of the calling thread, which other load on the machine doesn't lengthen (but it
empties the processor's caches); a step's is wall time. Each is the least and the median of the steps.

  update      merging the scheduler's plan, checks included        prepare   packing the upload
  dispatch    the upload, and the calls of forward and head: all until the device works by itself
  calls       executables that a step calls                        programs  compiled for the forward

For mode FULL a second table takes the calls apart. "call" is the executable's; "nothing" is a program that gets, is
donated and returns as many arrays and does nothing: behind a step, when that has emptied the processor's caches (here
device and host share them; beside a GPU the host keeps its own), and hot, one call after the other. What a call costs
beyond a cold nothing is the executable's own doing in the calling thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import track
from rich.table import Table

from scripts.command import report_error, run_command  # noqa: E402

stderr = Console(stderr=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    head, _, rest = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="smollm2-135m-instruct",
        help="a path, or a name of scripts/fetch_model.py (default: %(default)s)",
    )
    parser.add_argument("--reqs", type=int, default=256, metavar="R", help="requests that decode (default: 256)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="timed steps of each mode (default: 8)")
    parser.add_argument("--modes", default="FULL", help="of FULL,PIECEWISE,NONE, with commas between (default: FULL)")
    parser.add_argument("--json", metavar="FILE", help="the numbers; - writes to stdout, and only that")
    options = parser.parse_args(arguments)
    options.modes = options.modes.split(",")
    if unknown := sorted(set(options.modes) - {"FULL", "PIECEWISE", "NONE"}):
        parser.error(f"--modes are FULL, PIECEWISE and NONE, got {', '.join(unknown)}")
    if options.reqs < 1 or options.steps < 1:
        parser.error("--reqs and --steps must be at least 1")
    return options


def least_and_median(values: Sequence[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from jaxrunner.loading import load_model
    from scripts.host_bench.dispatch import Decoding, calls_of, collector_off

    decoder = load_model(options.model).decoder
    with stderr.status(f"compiling {', '.join(options.modes)}"):
        runs = [Decoding(decoder, mode, options.reqs, options.steps) for mode in options.modes]
    with collector_off():
        for _ in track(range(options.steps), "measuring", console=stderr, transient=True):
            for run in runs:
                run.step()
    report: dict[str, Any] = {"model": options.model, "reqs": options.reqs, "steps": options.steps}
    report["modes"] = {
        run.mode: {
            "calls": run.calls,
            "segments_us": {name: least_and_median(values) for name, values in run.segments.items()},
            "step_ms": least_and_median(run.step_ms),
            "compile_cpu_s": run.compile_cpu_s,
            "executables": run.executables,
        }
        for run in runs
    }
    for run in runs:
        if run.mode == "FULL":
            with stderr.status("calls alone"):
                calls = calls_of(run, options.steps)
            report["calls"] = {
                name: {
                    what: least_and_median(values) if isinstance(values, list) else values
                    for what, values in each.items()
                }
                for name, each in calls.items()
            }
    return report


def both(value: dict[str, float], digits: int = 0) -> str:
    return f"{value['least']:.{digits}f}/{value['median']:.{digits}f}"


def table(title: str, heads: Sequence[str]) -> Table:
    found = Table(title=title)
    for number, head in enumerate(heads):
        found.add_column(head, justify="right" if number else "left", no_wrap=True)
    return found


def show(report: dict[str, Any]) -> None:
    console = Console()
    title = f"{report['model']}, {report['reqs']} requests decode: least/median of {report['steps']} steps"
    heads = (
        "mode",
        "calls",
        "update\nus",
        "prepare\nus",
        "dispatch\nus",
        "step\nms",
        "compile\nCPU s",
        "pro-\ngrams",
    )
    modes = table(title, heads)
    for mode, row in report["modes"].items():
        segments = [both(value) for value in row["segments_us"].values()]
        compiled = f"{row['compile_cpu_s']:.1f}", str(len(row["executables"]))
        modes.add_row(mode, str(row["calls"]), *segments, both(row["step_ms"]), *compiled)
    console.print(modes)
    if "calls" not in report:
        return
    of_calls = ("mode FULL", "arrays in,\ndonated, out", "call\nus", "nothing,\nbehind a step", "nothing,\nhot")
    calls = table("Calls, us of the calling thread", of_calls)
    for name, row in report["calls"].items():
        arrays = ", ".join(map(str, row["arrays"].values()))
        calls.add_row(name, arrays, both(row["call"]), both(row["nothing"]), both(row["nothing, hot"]))
    console.print(calls)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        report = measure(options)
    except (ValueError, OSError) as error:
        return report_error("bench_dispatch", error, options)
    except KeyboardInterrupt:
        return 130
    if options.json == "-":
        print(json.dumps(report))
        return 0
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(report)
    return 0


if __name__ == "__main__":
    run_command(main)
