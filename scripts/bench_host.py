#!/usr/bin/env python
"""What the host path costs a step: merging a scheduler's differences, packing the upload, bookkeeping.

Replays scheduler traces on update_states, prepare_inputs and record_sampled: no model, one thread. A yardstick runs
beside it in the same process, so that times can be compared between machines as multiples of floor_us.

Examples:
  bench_host.py                                             every scenario at 8 to 1024 requests; some minutes
  bench_host.py --scenario steady,mixed --reqs 64           two scenarios, one size
  bench_host.py --check --steps 20                          no times: every array of every step against a reference
  bench_host.py --profile 20 --scenario preempt --reqs 64   which statements the time goes to
  OMP_NUM_THREADS=1 nice -n -15 bench_host.py --repeats 3 --json out.json

before_forward is all that stands between the scheduler's plan and the upload: it includes packing, block-table and
sampling-parameter updates, and not the upload itself, which is timed apart. bare is the same steps' least in NumPy:
the reads and writes that the plans cannot do without (host_bench/bare.py). membership is the part that only runs when
requests come, go or change their order. The garbage collector is on.

--profile replays each trace once more, and every other ten steps reads a clock at each line of the host path. Times of
statements are scaled so that together they are what the ten steps between take, which nothing disturbs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.command import output_file, run_command  # noqa: E402
from scripts.host_bench.bare import time_bare  # noqa: E402
from scripts.host_bench.floor import Yardstick  # noqa: E402
from scripts.host_bench.profile import LEAST_STEPS, profile  # noqa: E402
from scripts.host_bench.profile import as_table as statements_table  # noqa: E402
from scripts.host_bench.replay import CLOCKS, PHASES, Replay, compare_with_reference, time_details, time_phases  # noqa: E402
from scripts.host_bench.workload import SCENARIOS, TraceConfig  # noqa: E402
from scripts.tables import show_table  # noqa: E402

DETAILS = 50  # steps whose details are timed


def measure(config: TraceConfig, repeats: int, clock: str, on_step: Any) -> dict[str, Any]:
    """One row: medians over the measured steps; of several repeats the median of their medians."""
    yardstick = Yardstick(config.num_reqs)
    plain, checked = list[Replay](), list[Replay]()
    for _ in range(repeats):
        for check, runs in ((False, plain), (True, checked)):
            runs.append(
                time_phases(config, yardstick, check=check, lists=not check, clock=CLOCKS[clock], on_step=on_step)
            )
    membership, upload = time_details(config, DETAILS, on_step)
    bare = time_bare(config, yardstick, CLOCKS[clock], on_step)

    def median(values: Iterable[float]) -> float:
        return float(np.median(list(values)))

    before, record = "before_forward", "record_sampled"
    return {
        "scenario": config.scenario,
        "reqs": config.num_reqs,
        "clock": clock,
        "phase_us": {name: median(r.median(name) for r in plain) for name in PHASES},
        "before_forward_us": median(r.median(before) for r in plain),
        "record_us": median(r.median(record) for r in plain),
        "record_flat_us": median(r.median(record) for r in checked),
        "bare_us": bare.median("bare"),
        "membership_us": median(membership),
        "upload_us": median(upload),
        "validation_us": median(r.median(before) for r in checked) - median(r.median(before) for r in plain),
        "p99_us": {name: median(np.percentile(r.phases[name], 99) for r in plain) for name in plain[0].phases},
        "floor_us": median(np.median(r.floor) for r in plain),
        "ratio_to_floor": median(r.in_floors(before) for r in plain),
        "bare_to_floor": bare.in_floors("bare"),
        "record_to_floor": median(r.in_floors(record) for r in plain),
        "record_flat_to_floor": median(r.in_floors(record) for r in checked),
        "validation_to_floor": median(r.in_floors(before) for r in checked)
        - median(r.in_floors(before) for r in plain),
    }


def rounded(value: Any) -> Any:
    """``value`` with all its floats cut to a thousandth."""
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        title="Host path, microseconds a step: median / p99",
        caption="× floor: a multiple of the yardstick, block by block, so that a change of the machine's speed cancels",
    )
    heads = ("scenario", "reqs", "update", "prepare", "before\nforward", "×\nfloor", "bare", "×\nfloor",
             "record", "×\nfloor", "no\nlists", "×\nfloor", "member-\nship", "vali-\ndation", "×\nfloor",
             "upload", "floor")  # fmt: skip
    for head in heads:
        table.add_column(head, justify="left" if head == "scenario" else "right", no_wrap=True)
    for row in rows:
        both = {name: f"{us:.0f}/{row['p99_us'][name]:.0f}" for name, us in row["phase_us"].items()}
        table.add_row(
            row["scenario"],
            str(row["reqs"]),
            both["update_states"],
            both["prepare_inputs"],
            f"{row['before_forward_us']:.0f}/{row['p99_us']['before_forward']:.0f}",
            f"{row['ratio_to_floor']:.2f}",
            f"{row['bare_us']:.0f}",
            f"{row['bare_to_floor']:.2f}",
            both["record_sampled"],
            f"{row['record_to_floor']:.2f}",
            f"{row['record_flat_us']:.0f}",
            f"{row['record_flat_to_floor']:.2f}",
            f"{row['membership_us']:.0f}",
            f"{row['validation_us']:.0f}",
            f"{row['validation_to_floor']:.2f}",
            f"{row['upload_us']:.0f}",
            f"{row['floor_us']:.0f}",
        )
    return table


def configs(arguments: argparse.Namespace) -> list[TraceConfig]:
    names = list(SCENARIOS) if arguments.scenario == "all" else arguments.scenario.split(",")
    if unknown := sorted(set(names) - SCENARIOS.keys()):
        raise SystemExit(f"unknown scenarios {unknown}; known: {','.join(SCENARIOS)}")
    try:
        sizes = [int(size) for size in arguments.reqs.split(",")]
    except ValueError:
        raise SystemExit(f"--reqs must be numbers with commas between, got {arguments.reqs!r}") from None
    if min(sizes) < 1 or max(sizes) > TraceConfig.max_num_reqs:
        raise SystemExit(f"--reqs must be from 1 to {TraceConfig.max_num_reqs}, got {sizes}")
    if arguments.steps < 1 or arguments.repeats < 1 or arguments.warmup < 0:
        raise SystemExit("--steps and --repeats must be at least 1, --warmup at least 0")
    if arguments.profile is not None and (arguments.profile < 1 or arguments.steps < LEAST_STEPS):
        raise SystemExit(f"--profile must be at least 1, and needs --steps of at least {LEAST_STEPS}")
    return [
        TraceConfig(name, size, warmup_steps=arguments.warmup, measured_steps=arguments.steps)
        for name in names
        for size in sizes
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--scenario", default="all", help=f"of {','.join(SCENARIOS)}, with commas between (default all)"
    )
    parser.add_argument("--reqs", default="8,64,256,1024", help="numbers of requests (default %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="measured steps (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=50, help="steps before them (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="replays per row; medians of medians (default 1)")
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="cpu: the thread's own time, for a machine that others use too (default %(default)s)",
    )
    parser.add_argument(
        "--profile",
        type=int,
        nargs="?",
        const=15,
        metavar="N",
        help="show the N statements that take most, of each row (default %(const)s); the file gets all of them",
    )
    parser.add_argument("--check", action="store_true", help="compare every array with the reference, time nothing")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows here")
    arguments = parser.parse_args(argv)
    todo, rows = configs(arguments), list[dict[str, Any]]()
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn by the measured thread itself, between steps: a drawing thread would take the time of others.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        for config in todo:
            name = f"{config.scenario} {config.num_reqs}"
            steps = 1 + config.warmup_steps + config.measured_steps
            passes = 1 if arguments.check else 2 * arguments.repeats + 1 + (arguments.profile is not None)
            details = 0 if arguments.check else 1 + config.warmup_steps + min(DETAILS, config.measured_steps)
            task = progress.add_task(name, total=steps * passes + details)

            done = count(1)

            def on_step(task: Any = task, done: Any = done) -> None:
                if not (steps_done := next(done)) % 25:
                    progress.update(task, completed=steps_done)
                    progress.refresh()

            if arguments.check:
                compared = compare_with_reference(config, on_step)
                rows.append({"scenario": config.scenario, "reqs": config.num_reqs, "steps_compared": compared})
                progress.console.print(f"{name}: {compared} steps equal the reference")
            else:
                row = measure(config, arguments.repeats, arguments.clock, on_step)
                if arguments.profile is not None:
                    row["profile"] = profile(config, CLOCKS[arguments.clock], on_step)
                rows.append(rounded(row))
            progress.remove_task(task)
    if not arguments.check:
        show_table(as_table(rows), console)
        for row in rows:
            for phase, found in row.get("profile", {}).items():
                title = f"{row['scenario']} {row['reqs']}, {phase}"
                show_table(statements_table(title, found, arguments.profile), console)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
