#!/usr/bin/env python
"""Checks and measures everything that needs a GPU, in one go of under six minutes.

  bench_gpu.py --json out.json                  all of it, in order of value; results appear as they come
  bench_gpu.py --only numerics,attention        some of it
  bench_gpu.py --attention triton               a step and texts with an implementation of your choice
  bench_gpu.py --tiny                           sizes for a CPU (the default where there is no GPU): shows that it works

In this order: every kernel against float64 NumPy on ragged batches with poisoned padding; what this device's memory and
tensor cores reach now; attention and cache writes beside those ceilings; PyTorch's attention, where there is PyTorch;
ways of uploading a step's inputs; the decode step of an 8B-shaped random model, with and without command buffers; texts
of a small model. A part that no longer fits into --budget is left out, and what a part has not done by then as well,
and that is said. A kernel that hangs ends the run half a minute later; what was found until then is on disk.

Times are medians of warm calls until the results are there. Compare ratios to the ceilings, which are measured in the
same run: a GPU's clock depends on its power limit, heat and neighbours.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from scripts.command import run_command  # noqa: E402

# Parts, and the seconds that must be left of the budget to begin one.
PARTS = {
    "device": 0,
    "numerics": 60,
    "ceilings": 15,
    "attention": 60,
    "writes": 15,
    "torch": 40,
    "uploads": 10,
    "step": 90,
    "text": 40,
}

PATIENCE = 25  # seconds past the budget that a row may take before the run is ended


class Bench:
    """One run: parts that yield rows, printed and written as they come.

    Attributes:
        results: rows by part; a part that was left out has one row that says why.
    """

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        self.start = time.perf_counter()
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.ceilings: dict[str, float] = {}

    def left(self) -> float:
        """Seconds of the budget."""
        return self.args.budget - (time.perf_counter() - self.start)

    def run(self, parts: Sequence[str]) -> bool:
        """True if nothing was found wrong."""
        for part in parts:
            self.console.print(f"\n[bold]{part}[/bold] ({time.perf_counter() - self.start:.0f} s so far)")
            rows = self.results[part] = []
            if self.left() < PARTS[part] and not self.args.tiny:
                self._add(rows, {"left out": f"{self.left():.0f} s are left of --budget {self.args.budget:g}"})
                continue
            try:
                for row in self._rows(part):
                    self._add(rows, row)
                    if self.left() <= 0:
                        self._add(rows, {"left out": f"the rest of it: --budget {self.args.budget:g} is used up"})
                        break
            except Exception as error:  # the parts after it are worth having all the same
                self._add(rows, {"failed": f"{type(error).__name__}: {error}"[:2000]})
        return not any(row.get("ok") is False or "failed" in row for rows in self.results.values() for row in rows)

    def _add(self, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
        rows.append(row)
        self.console.print("  " + line_of(row), highlight=False, markup=False, soft_wrap=True)
        if self.args.json:
            unfinished = self.args.json.with_suffix(".part")
            unfinished.write_text(json.dumps(self.results, indent=1))
            unfinished.replace(self.args.json)

    def _rows(self, part: str) -> Iterator[dict[str, Any]]:
        from scripts.gpu_bench import attention_speed, model_step, numerics, timing, uploads
        from scripts.gpu_bench.text import text

        tiny, attention = self.args.tiny, self.args.attention
        match part:
            case "device":
                from scripts.doctor import device_facts, versions

                yield device_facts(None) | {"versions": versions()}
            case "numerics":
                yield from numerics.slots_and_writes(tiny)
                yield from numerics.attention(tiny)
            case "ceilings":
                for row in timing.ceilings(tiny):
                    self.ceilings[row["ceiling"]] = row.get("bytes_per_s") or row["flops_per_s"]
                    yield row
            case "attention":
                yield from attention_speed.attention(tiny, self.ceilings, room() / 3)
            case "writes":
                yield from attention_speed.writes(tiny, self.ceilings)
            case "torch":
                yield from self._torch()
            case "uploads":
                yield from uploads.uploads(tiny)
            case "step":
                yield from model_step.decode_step(tiny, attention, self.ceilings, room() * 0.8, self.left())
            case "text":
                yield from text(self.args.model, attention)

    def _torch(self) -> Iterator[dict[str, Any]]:
        from scripts.gpu_bench import attention_speed

        python = self.args.torch_python or (sys.executable if find_spec("torch") else None)
        if python is None:
            yield {"left out": "no PyTorch in this environment; --torch-python names the Python of one that has it"}
            return
        shapes: list[list[Any]] = [["decode 64 x 2k", 64, 1, 2048], ["decode 64 x 8k", 64, 1, 8192]]
        shapes += [["decode 1 x 1k", 1, 1, 1024], ["prefill 4k", 1, 4096, 4096], ["prefill 16k", 1, 16384, 16384]]
        if self.args.tiny:
            shapes = [["decode 4 x 16", 4, 1, 16]]
        script = Path(__file__).with_name("peers") / "torch_attention.py"
        command = [python, str(script), json.dumps(shapes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(self.left(), 30))
        by_name = {work.name: work for work in attention_speed.workloads(self.args.tiny)}
        for row in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
            work = by_name[row["workload"]]
            heads = attention_speed.Heads()
            yield row | (attention_speed.rates(work, heads, row["seconds"], self.ceilings) if "seconds" in row else {})
        if done.returncode:
            yield {"left out": f"PyTorch's side ended early: {done.stderr[-300:]}"}


def room() -> float:
    """Bytes of the device's memory that are free; 1 GB where the device doesn't say."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    return float(stats["bytes_limit"] - stats["bytes_in_use"]) if "bytes_limit" in stats else 1e9


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after every row")
    args = parser.parse_args(arguments)
    # PyTorch's side runs on the same GPU; without this JAX would have taken its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.default_backend() != "gpu" and not args.tiny:
        print(f"this machine computes on its {jax.default_backend()}: --tiny sizes, whose speeds mean nothing")
        args.tiny = True
    console = Console(width=None if sys.stdout.isatty() else shutil.get_terminal_size((160, 24)).columns)
    bench = Bench(args, console)
    # A hung kernel would be waited for without end: this says where, and ends the process.
    faulthandler.dump_traceback_later(max(args.budget + PATIENCE, 0.1), exit=True, file=2)  # stderr
    try:
        fine = bench.run(args.only)
    finally:
        faulthandler.cancel_dump_traceback_later()
    console.print(f"\n{time.perf_counter() - bench.start:.0f} s; {'nothing' if fine else 'SOMETHING'} was found wrong")
    return 0 if fine else 1


if __name__ == "__main__":
    run_command(main)
