#!/usr/bin/env python
"""Checks and measures everything that needs a GPU, in one go of under six minutes.

  bench_gpu.py --json out.json                  all of it, in order of value; results appear as they come
  bench_gpu.py --only numerics,attention        some of it
  bench_gpu.py --attention triton               a step and texts with an implementation of your choice
  bench_gpu.py --tiny                           sizes for a CPU (the default where there is no GPU): shows that it works

In this order: every kernel against float64 NumPy on ragged batches with poisoned padding; what this device's memory and
tensor cores reach now; attention and cache writes beside those ceilings; PyTorch's attention, where there is PyTorch;
ways of uploading a step's inputs; the decode step of an 8B-shaped random model, with and without command buffers; texts
of a small model. Each has a process of its own, each implementation of attention as well, with a time limit: a kernel
that hangs, or breaks what is there of the GPU for its process, is reported with the reason and the exit code, and the
others still run. What no longer fits into --budget is left out, and that is said.

Times are medians of warm calls until the results are there. Compare ratios to the ceilings, which are measured in the
same run: a GPU's clock depends on its power limit, heat and neighbours.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from scripts.command import output_file, run_command
from scripts.gpu_bench.child import failure
from scripts.gpu_bench.processes import Died, Processes
from scripts.gpu_bench.tasks import PARTS, Task, groups


class Bench:
    """One run: tasks that yield rows, printed and written as they come.

    Attributes:
        results: rows by part; what was left out or failed has a row that says why.
    """

    def __init__(self, args: argparse.Namespace, console: Console, processes: Processes) -> None:
        self.args, self.console, self.processes = args, console, processes
        self.start = time.perf_counter()
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.ceilings: dict[str, float] = {}

    def left(self) -> float:
        """Seconds of the budget."""
        return self.args.budget - (time.perf_counter() - self.start)

    def run(self, parts: Sequence[str]) -> bool:
        """True if nothing was found wrong."""
        self._part("device", [""], is_last=parts == ["device"])
        facts = self.results["device"][0]
        if "platform" not in facts:
            return False
        if facts["platform"] != "gpu" and not self.args.tiny:
            self.console.print(
                f"this machine computes on its {facts['platform']}: --tiny sizes, whose speeds mean nothing"
            )
            self.args.tiny = True
        for part in parts:
            if part != "device":
                self._part(part, groups(part, facts["implementations"]), is_last=part == parts[-1])
        return not any(row.get("ok") is False or "failed" in row for rows in self.results.values() for row in rows)

    def _part(self, part: str, of_part: Sequence[str], is_last: bool) -> None:
        self.console.print(f"\n[bold]{part}[/bold] ({time.perf_counter() - self.start:.0f} s so far)")
        rows = self.results[part] = []
        for group in of_part:
            about = {"group": group} if group else {}
            if part != "device" and self.left() < (0 if self.args.tiny else PARTS[part].needed):
                reason = f"{max(self.left(), 0):.0f} s are left of --budget {self.args.budget:g}"
                self._add(rows, about | {"left out": reason})
                continue
            try:
                for row in self._rows(part, group, is_last and group == of_part[-1]):
                    if "ceiling" in row:
                        self.ceilings[row["ceiling"]] = row.get("bytes_per_s") or row["flops_per_s"]
                    self._add(rows, (about if "failed" in row else {}) | row)
            except Died as died:
                if died.late and self.left() <= 0:
                    reason = f"the rest of it: --budget {self.args.budget:g} is used up"
                    self._add(rows, about | {"left out": reason})
                else:
                    self._add(rows, about | {"failed": str(died), "exit_code": died.exit_code})

    def _rows(self, part: str, group: str, is_last: bool) -> Iterator[dict[str, Any]]:
        args, limit = self.args, PARTS[part].most
        if part != "device":
            # A machine without a GPU may be slow otherwise, too.
            limit = min(self.left(), limit * 4 if args.tiny else limit)
        task = Task(part, group, args.tiny, args.attention, args.model, args.torch_python, self.ceilings, seconds=limit)
        if not args.one_process:
            yield from self.processes.rows(task, limit, is_last)
            return
        try:
            yield from import_module(args.parts).rows(task)
        except Exception as error:
            yield failure(error)

    def _add(self, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
        rows.append(row)
        self.console.print("  " + line_of(row), highlight=False, markup=False, soft_wrap=True)
        if self.args.json:
            unfinished = self.args.json.with_suffix(".part")
            unfinished.write_text(json.dumps(self.results, indent=1))
            unfinished.replace(self.args.json)


def line_of(row: dict[str, Any]) -> str:
    """A row in words and units."""
    units: dict[str, Callable[[float], str]] = {
        "seconds": lambda x: f"{x * 1e6:.1f} µs" if x < 1e-3 else f"{x * 1e3:.3f} ms",
        "bytes_per_s": lambda x: f"{x / 1e9:.1f} GB/s",
        "flops_per_s": lambda x: f"{x / 1e12:.2f} TFLOP/s",
        "of_memory_read": lambda x: f"{x:.1%} of memory read",
        "of_memory_copied": lambda x: f"{x:.1%} of memory copied",
        "of_products": lambda x: f"{x:.1%} of products",
        "tokens_per_s": lambda x: f"{x:.0f} tokens/s",
        "error_over_allowed": lambda x: f"error {x:.2f} of what is allowed",
        "ok": lambda x: "ok" if x else "WRONG",
        "bytes": lambda x: f"{x / 1e3:.1f} kB",
    }
    words = ("kernel", "implementation", "workload", "case", "ceiling", "upload", "model", "variant", "attention")
    parts = [str(row[key]) for key in words if key in row]
    parts += [units[key](row[key]) for key in units if row.get(key) is not None]
    shown = {*words, *units}
    parts += [f"{key}: {value}" for key, value in row.items() if key not in shown]
    return ", ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    def parts(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(PARTS):
            raise argparse.ArgumentTypeError(
                f"there is no part {', '.join(sorted(unknown))}; there is {', '.join(PARTS)}"
            )
        return [part for part in PARTS if part in names]

    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog=__doc__.split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", type=parts, default=list(PARTS), metavar="PARTS", help=f"of {','.join(PARTS)}")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, and no judgement of speed")
    parser.add_argument("--attention", default="auto", help="of the step and the texts (default: the best)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="that writes the texts")
    parser.add_argument("--budget", type=float, default=330.0, metavar="S", help="seconds for all (default: 330)")
    parser.add_argument("--torch-python", metavar="PYTHON", help="of an environment with PyTorch")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results there, after every row")
    parser.add_argument(
        "--one-process", action="store_true", help="all in this process, without limits: for a debugger or a profiler"
    )
    parser.add_argument("--parts", default="scripts.gpu_bench.parts", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else shutil.get_terminal_size((160, 24)).columns)
    with Processes(args.parts) as processes:
        bench = Bench(args, console, processes)
        fine = bench.run(args.only)
    console.print(f"\n{time.perf_counter() - bench.start:.0f} s; {'nothing' if fine else 'SOMETHING'} was found wrong")
    return 0 if fine else 1


if __name__ == "__main__":
    run_command(main)
