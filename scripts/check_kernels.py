#!/usr/bin/env python
"""Compiles every GPU kernel configuration that a step can pick, for GPUs that aren't here, and looks at the code.

  check_kernels.py                                          all of them, for all GPUs
  check_kernels.py --targets h200 --only 'paged_attention/mosaic_sm90'
  check_kernels.py --json out.json --keep ptx               the figures as data, and the PTX to run ptxas on again
  check_kernels.py --quick                                  what CI compiles
  check_kernels.py --list                                   what there is, compiling nothing

Each is really compiled, by XLA's GPU compiler and ptxas, down to machine code, which is then disassembled and counted.
Nothing runs, so this says nothing of time or results. It fails on: a register spill or local memory, an inner loop that
loads scalars, a missing tensor-core, TMA, cp.async or vector instruction where the configuration needs it, shared
memory past the GPU's limit, a copy of a donated cache, and on whatever a compiler refuses.

The first call installs the compiler into your cache folder (0.3 GB of wheels; nothing into this environment).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pallas_kernels.configurations import KernelConfiguration
from pallas_kernels.gpus import GPUS
from scripts.command import run_command  # noqa: E402
from scripts.gpu.compiler import CompilerUnavailable, ensure_compiler
from scripts.gpu.pool import Job, compile_all
from scripts.gpu.verdict import row_of
from scripts.gpu.worker import listed
from scripts.tables import show_table  # noqa: E402

# Column of the table: classes of instructions that it adds up. ld16: loads of 16 bytes a thread, ld4: of 4.
COLUMNS = {
    "wgmma": ("HGMMA", "QGMMA", "UTCMMA"),
    "mma": ("HMMA", "IMMA"),
    "TMA": ("UTMALDG", "UTMASTG", "UBLKCP"),
    "cp.async": ("LDGSTS.128",),
    "ld16": ("LDG.128", "LDG.256"),
    "ld4": ("LDG.32", "LDGSTS.32"),
    "st16": ("STG.128", "STG.256"),
}


def jobs_for(all_configurations: Sequence[KernelConfiguration], args: argparse.Namespace) -> list[Job]:
    """The pairs of a configuration and a GPU that are asked for."""
    return [
        Job(configuration, target)
        for target in args.targets
        for configuration in all_configurations
        if GPUS[target].capability in configuration.capabilities
        and (configuration.in_ci or not args.quick)
        and (args.only is None or args.only.search(configuration.name))
    ]


def table_of(target: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"compiled for {target} ({GPUS[target].arch}), not run")
    table.add_column("kernel/implementation/configuration", overflow="fold")
    for name in ("regs", "spill B", "shared B", *COLUMNS, "s"):
        table.add_column(name, justify="right")
    for row in rows:
        counts = [str(sum(row["sass"].get(kind, 0) for kind in kinds) or "") for kinds in COLUMNS.values()]
        figures = [str(row[key]) for key in ("registers", "spill_bytes", "shared_bytes")]
        name = f"{row['kernel']}/{row['implementation']}/{row['config']}"
        table.add_row(name, *figures, *counts, f"{row['compile_s']:.1f}", style=None if row["ok"] else "red")
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def targets(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(GPUS):
            raise argparse.ArgumentTypeError(
                f"no data sheet of {', '.join(sorted(unknown))}; there is {','.join(GPUS)}"
            )
        return names

    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog=__doc__.split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    everything = ",".join(GPUS)
    parser.add_argument("--targets", type=targets, default=everything, help=f"GPUs, by name (default: {everything})")
    parser.add_argument(
        "--only", type=re.compile, metavar="RE", help="those whose kernel/implementation/config matches"
    )
    parser.add_argument("--quick", action="store_true", help="only those that CI compiles")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the PTX there")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="that compile at once (default: 2)")
    parser.add_argument("--list", action="store_true", help="name the configurations, compile nothing")
    parser.add_argument("--configurations", default="pallas_kernels.configurations", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    console = Console(highlight=False)
    jobs = jobs_for(list(listed(args.configurations)), args)
    if args.list:
        for job in jobs:
            print(f"{job.target}  {job.configuration.name}")
        return 0
    if not jobs:
        console.print("no configuration is both asked for and made for these GPUs (--list names them)")
        return 2
    try:
        compiler = ensure_compiler(lambda line: print(line, file=sys.stderr))
    except CompilerUnavailable as error:
        print(f"the GPU compiler can't be had, so nothing was checked: {error}", file=sys.stderr)
        return 3
    print(f"GPU compiler: {', '.join(f'{p} {v}' for p, v in compiler.versions.items())}", file=sys.stderr)
    rows = []
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    failed = TextColumn("{task.fields[failed]} failed")
    with (
        tempfile.TemporaryDirectory(prefix="check_kernels.") as folder,
        Progress(*columns, failed, console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("", total=len(jobs), failed=0)
        for job, answer in compile_all(jobs, compiler, args.configurations, args.processes, Path(folder), args.keep):
            row = row_of(job.configuration, job.target, GPUS[job.target], answer)
            rows.append(row)
            progress.update(task, advance=1, failed=sum(not r["ok"] for r in rows))
            if not row["ok"]:
                progress.console.print(
                    f"[red]{row['target']} {row['implementation']} {row['config']}[/red]: {row['why']}"
                )
    order = {(job.target, job.configuration.name): i for i, job in enumerate(jobs)}
    rows.sort(key=lambda r: order[r["target"], f"{r['kernel']}/{r['implementation']}/{r['config']}"])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    for target in args.targets:
        if mine := [row for row in rows if row["target"] == target]:
            show_table(table_of(target, mine), console)
    bad = [row for row in rows if not row["ok"]]
    for row in bad:
        console.print(f"FAILED {row['target']} {row['kernel']}/{row['implementation']}/{row['config']}: {row['why']}")
    console.print(f"{len(rows) - len(bad)} of {len(rows)} as they should be")
    return 1 if bad else 0


if __name__ == "__main__":
    run_command(main)
