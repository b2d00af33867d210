#!/usr/bin/env python
"""Chooses token buckets for real traffic: the best ladder for each number of executables, beside the usual ones.

Every step is padded to a bucket, and every bucket is an executable to compile and keep. From a trace of step shapes
this finds, for each number of executables, the ladder at which the trace costs least: exactly, by dynamic programming.

  sweep_buckets.py                                       the example traces that come with the project
  generate.py --input requests.jsonl --record shapes.jsonl; sweep_buckets.py --trace shapes.jsonl
  sweep_buckets.py --arrivals AzureLLMInferenceTrace_conv.csv --speed 3     arrivals of a public trace, simulated
  sweep_buckets.py --max-executables 8,16 --csv ladders.csv --plot pareto.png --ladder ladder.json
  generate.py --token-buckets ladder.json ...            and then uses what was chosen
  sweep_buckets.py --cost measured --model smollm2-135m-instruct            time on this machine instead of tokens
  sweep_buckets.py --cost model --config llama-3.1-8b --target h200         a roofline of a GPU instead

Costs: "tokens" counts padded tokens. "measured" times the forward of a model at a few sizes here. "model" adds up, over
the forward's products of matrices, the longer of reading their bytes and doing their operations at the target's peaks.

In the output: padding_waste is the fraction of padded tokens, and step_time the mean cost of a step's forward: in
tokens with "tokens", in seconds else. compile_s adds up the forwards' compile seconds on this machine, memory_bytes
their code (as far as the compiler counts it) and the largest one's temporaries, caches left out; with lines between the
sizes compiled. "measured" compiles for this backend. "model" compiles the smallest and the largest for the target, if
the GPU compiler is installed (scripts/compile_step.py does that) and without --no-compile. "tokens" knows of no model.
Where they are null, "why_null" beside the ladders says why.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import track
from rich.table import Table

from pallas_kernels.gpus import GPUS
from scripts.command import positive, positives, report_error, run_command  # noqa: E402
from scripts.gpu.published import PUBLISHED
from scripts.tables import show_table  # noqa: E402

if TYPE_CHECKING:
    from jaxrunner.shape_record import StepRecord
    from jaxrunner.sweep import Ladder
    from jaxrunner.sweep.costs import Sampled

EXAMPLES = sorted((Path(__file__).parent / "data").glob("*_steps.jsonl.gz"))
UNITS = {"tokens": ("tokens a step", 1.0), "measured": ("ms a step", 1e3), "model": ("ms a step", 1e3)}
stderr = Console(stderr=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    head, _, rest = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--trace", nargs="+", metavar="FILE", help="recorded step shapes, .jsonl or .jsonl.gz")
    source.add_argument(
        "--arrivals", nargs="+", metavar="FILE", help="public traces of arrivals: Azure, BurstGPT, Mooncake"
    )
    parser.add_argument(
        "--max-executables", type=_counts, default=(4, 8, 16, 32), metavar="N,...", help="default: 4,8,16,32"
    )
    parser.add_argument("--cost", choices=UNITS, default="tokens", help="what is made least (default: tokens)")
    parser.add_argument("--model", help="for --cost measured: a path, or a name of scripts/fetch_model.py")
    parser.add_argument("--config", choices=PUBLISHED, default="llama-3.1-8b", help="for --cost model")
    parser.add_argument("--target", choices=GPUS, default="h200", help="for --cost model")
    parser.add_argument(
        "--no-compile", action="store_true", help="for --cost model: no compile_s, no memory_bytes, a minute less"
    )
    limits = parser.add_argument_group("limits of the runner")
    limits.add_argument("--max-num-seqs", type=positive, default=256, metavar="N", help="default: %(default)s")
    limits.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        metavar="N",
        help="the last bucket (default: 8192, or the largest step)",
    )
    simulation = parser.add_argument_group("simulation of --arrivals")
    simulation.add_argument("--speed", type=float, default=1.0, metavar="X", help="the trace runs X times as fast")
    simulation.add_argument(
        "--max-model-len", type=positive, default=16384, metavar="N", help="cuts longer ones (default: %(default)s)"
    )
    simulation.add_argument("--max-steps", type=positive, metavar="N", help="stop after so many steps")
    simulation.add_argument("--save-trace", metavar="FILE", help="keep the simulated steps (.jsonl or .jsonl.gz)")
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="{'ladders': [...], ...}; - writes to stdout, and only that")
    output.add_argument("--csv", metavar="FILE", help="the table")
    output.add_argument("--plot", metavar="FILE", help="waste and cost over the number of executables (.png, .svg)")
    output.add_argument("--ladder", metavar="FILE", help="the optimal ladder, as a runner takes it")
    output.add_argument("--pick", type=int, metavar="N", help="executables of --ladder (default: most of the above)")
    options = parser.parse_args(arguments)
    if options.cost == "measured" and not options.model:
        parser.error("--cost measured needs --model")
    if options.pick is not None and options.pick not in options.max_executables:
        parser.error(f"--pick {options.pick} is not among --max-executables {options.max_executables}")
    return options


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(positives(text))))


def steps_of(options: argparse.Namespace) -> list[StepRecord]:
    """The steps of all traces together."""
    from jaxrunner.shape_record import read_shapes, write_shapes

    if not options.arrivals:
        return read_shapes(options.trace or EXAMPLES)
    from jaxrunner.arrival_trace import read_arrival_trace
    from jaxrunner.scheduler import SchedulerConfig
    from jaxrunner.sweep import synthesize

    config = SchedulerConfig(options.max_num_seqs, options.max_num_batched_tokens or 8192, options.max_model_len)
    steps = []
    for path in track(options.arrivals, "simulating", console=stderr, disable=not stderr.is_terminal):
        arrivals = read_arrival_trace(path)
        steps += synthesize(arrivals, config, speed=options.speed, max_steps=options.max_steps)
    if options.save_trace:
        write_shapes(options.save_trace, steps)
    return steps


def cost_of(options: argparse.Namespace, budget: int) -> tuple[Callable[..., Any], Callable[..., Any], str | None]:
    """(the cost, what a ladder's executables need, why that isn't known)."""
    from jaxrunner.sweep import costs

    if options.cost == "tokens":
        return costs.tokens, lambda sizes: (None, None), "--cost tokens knows of no model to compile"
    sizes = costs.sample_sizes(budget)
    if options.cost == "model":
        needs, why_null = target_needs(options, sizes)
        return roofline(options, sizes), needs.needs, why_null
    from jaxrunner import LLM

    with stderr.status(f"compiling and timing {len(sizes)} sizes"):
        llm = LLM(
            options.model,
            max_num_seqs=min(options.max_num_seqs, budget),
            max_num_batched_tokens=budget,
            token_buckets=sizes,
            compilation_cache=False,  # compile seconds are to be those of a first start
            warmup="lazy",
            quiet=True,
        )
        sampled = costs.measure(llm.runner)
    return sampled, sampled.needs, None


def target_needs(options: argparse.Namespace, sizes: Sequence[int]) -> tuple[Sampled, str | None]:
    """What executables for the target need, by those of a few sizes; and why that isn't known."""
    from jaxrunner.sweep.costs import Sampled
    from scripts.gpu.compiler import CompilerUnavailable, find_compiler
    from scripts.gpu.forward_needs import forward_needs

    unknown = Sampled((), ())
    if options.no_compile:
        return unknown, "--no-compile"
    compiler = find_compiler()
    if compiler is None:
        return unknown, "the GPU compiler isn't installed here: scripts/compile_step.py installs it"
    few = sorted({sizes[0], sizes[-1]})
    with stderr.status(f"compiling {options.config} for {options.target} at {few} tokens"):
        try:
            found = forward_needs(compiler, options.config, options.target, few, options.max_num_seqs)
        except CompilerUnavailable as error:
            return unknown, str(error)
    return Sampled(tuple(few), (), *(tuple(found[name]) for name in ("compile_s", "temp_bytes", "code_bytes"))), None


def roofline(options: argparse.Namespace, sizes: Sequence[int]) -> Callable[..., Any]:
    from jaxrunner.sweep import costs
    from models import ModelConfig
    from pallas_kernels import choose_attention
    from scripts.gpu.step_programs import StepSize, step_programs

    config = ModelConfig.from_hf(PUBLISHED[options.config])
    attention, _ = choose_attention(config.attention_layers(), 16, "bfloat16", "cpu")

    def forward_at(size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        forward, _ = step_programs(config, attention, StepSize(size, min(size, options.max_num_seqs)))
        return forward.function, forward.args

    with stderr.status(f"tracing {options.config} at {len(sizes)} sizes"):
        return costs.roofline(forward_at, sizes, GPUS[options.target])


def show(ladders: list[Ladder], title: str, unit: str, scale: float) -> None:
    table = Table(title=title)
    columns: dict[str, Callable[[Ladder], str | None]] = {
        "ladder": lambda each: each.kind,
        "executables": lambda each: str(each.executables),
        "padding": lambda each: f"{each.padding_waste:.2%}",
        unit: lambda each: f"{each.step_time * scale:.2f}",
        "compile s": lambda each: None if each.compile_s is None else f"{each.compile_s:.1f}",
        "memory MiB": lambda each: None if each.memory_bytes is None else f"{each.memory_bytes / 2**20:.1f}",
    }
    known = {name: cells for name, cells in columns.items() if any(cells(each) is not None for each in ladders)}
    for name in known:
        table.add_column(name, justify="left" if name == "ladder" else "right", no_wrap=True)
    for each in ladders:
        table.add_row(*(cells(each) for cells in known.values()))
    console = Console()
    show_table(table, console)
    for each in ladders:
        if each.kind == "optimal":
            console.print(f"optimal {each.executables}: {', '.join(map(str, each.sizes))}")


def plot(ladders: list[Ladder], path: str, unit: str, scale: float) -> None:
    """Two panels over the number of executables: padding, and cost; the optimal ladders are the Pareto front."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'jaxrunner[plot]'") from None
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, label in zip(panels, ("padding, % of tokens run", unit), strict=True):
        for kind, mark in {"optimal": "o-", "bounded": "s--", "powers_of_two": "^", "vllm": "D"}.items():
            points = [each for each in ladders if each.kind == kind]
            values = [
                each.padding_waste * 100 if label.startswith("padding") else each.step_time * scale for each in points
            ]
            panel.plot([each.executables for each in points], values, mark, label=kind)
        panel.set(xlabel="executables", ylabel=label, xscale="log")
        panel.set_xticks(sorted({each.executables for each in ladders}), minor=False)
        panel.set_xticks([], minor=True)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.set_ylim(bottom=0 if label.startswith("padding") else None)
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=120)


def write(ladders: list[Ladder], options: argparse.Namespace, why_null: str | None) -> None:
    from jaxrunner.bucket_file import write_buckets

    rows = [each.as_dict() for each in ladders]
    report = {"ladders": rows, "cost": options.cost, "step_time_unit": "tokens" if options.cost == "tokens" else "s"}
    report |= {"why_null": why_null} if why_null else {}
    if options.json == "-":
        print(json.dumps(report))
    elif options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(row | {"sizes": " ".join(map(str, row["sizes"]))} for row in rows)
    if options.ladder:
        wanted = options.pick or max(options.max_executables)
        best = [each for each in ladders if each.kind == "optimal" and each.executables <= wanted][-1]
        write_buckets(options.ladder, token_buckets=best.sizes)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        from jaxrunner.sweep import StepCounts, compare

        steps = steps_of(options)
        tokens = [step.tokens for step in steps]
        budget = options.max_num_batched_tokens or (8192 if options.arrivals else max(tokens, default=1))
        counts = StepCounts.of(tokens, budget)
        cost, needs, why_null = cost_of(options, budget)
        ladders = compare(counts, cost, options.max_executables, options.max_num_seqs, needs)
        unit, scale = UNITS[options.cost]
        write(ladders, options, why_null)
        if options.plot:
            plot(ladders, options.plot, unit, scale)
    except (ValueError, OSError, EOFError) as error:
        return report_error("sweep_buckets", error, options)
    except KeyboardInterrupt:
        return 130
    if options.json != "-":
        title = f"{len(steps)} steps, {len(counts.sizes)} sizes, {sum(tokens) / len(tokens):.0f} tokens a step"
        show(ladders, title, unit, scale)
        if why_null and options.cost == "model":
            print(f"compile seconds and memory are not known: {why_null}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_command(main)
