#!/usr/bin/env python
"""Looks at recorded steps. Record them with `generate.py --trace t.jsonl ...`, or RunnerConfig(trace=PATH).

Examples:
  trace.py experiment                        a decode beside a chunked prefill: its ten small arrays, step by step
  trace.py show t.jsonl --step 3             a step as aligned tables
  trace.py show t.jsonl --request cmpl-0     a request's life across steps
  trace.py stops t.jsonl --step 3            the eight breakpoints of a step: what to verify, values and formulas
  trace.py check t.jsonl                     the eight invariants, block ownership, counts: names the first wrong step
  trace.py replay t.jsonl                    runs the plans again on the batch alone, compares every array
  trace.py replay t.jsonl --model NAME       ... and on a model: tokens too
  trace.py diff a.jsonl b.jsonl              the first difference by request, whatever the order of rows
  trace.py html t.jsonl -o step.html         a page to look at: streams, page maps, timelines; needs no network
  trace.py symptoms                          the table of faults: sign, cause, where to look

Exit status: 0 nothing wrong, 1 something found, 2 the command could not do its work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxrunner.trace import (  # noqa: E402
    SYMPTOMS,
    HostStepper,
    Trace,
    TraceChecker,
    diff_traces,
    open_trace,
    replay,
    run_experiment,
    stops,
)
from jaxrunner.trace.page import page_of  # noqa: E402
from jaxrunner.trace.tables import request_table, step_tables  # noqa: E402
from scripts.command import report_error, run_command  # noqa: E402

EXPERIMENT_ARRAYS = ("req_ids", "scheduled", "computed", "query_start_loc", "positions", "seq_lens", "block_rows",
                     "slot_mapping", "logits_indices", "discard")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        # Piped output is not cut at 80 columns.
        width = None if sys.stdout.isatty() else 200
        # Request ids are anybody's text: [b] or :key: in one is not ours to interpret.
        return args.run(args, Console(width=width, markup=False, emoji=False))
    except (ValueError, OSError) as error:
        return report_error(f"trace.py {args.command}", error, args)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Any, text: str, *traces: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        for trace in traces:
            sub.add_argument(trace, type=Path, help="a trace: JSON lines, written by --trace")
        sub.add_argument("--json", action="store_true", help="print JSON in place of text")
        sub.set_defaults(run=run)
        return sub

    sub = command("show", show, "a step, a request's life, or an overview, as aligned tables", "trace")
    sub.add_argument("--step", type=int, help="number of the step")
    sub.add_argument("--request", metavar="ID", help="a request id")
    sub.add_argument("--tokens", type=int, default=64, help="tokens to list at most (default: 64)")
    sub = command("stops", show_stops, "the eight breakpoints of a step, with values and formulas", "trace")
    sub.add_argument("--step", type=int, required=True, help="number of the step")
    command("check", check, "check a whole trace; names the first wrong step, request, rule and likely cause", "trace")
    sub = command("replay", run_again, "run the recorded plans again; stops at the first array that differs", "trace")
    sub.add_argument("--model", help="run them on this model, tokens included (default: on the batch alone)")
    sub.add_argument("--dtype", default="auto", help="of the model's parameters")
    sub = command("diff", diff, "the first difference of two traces, by request", "a", "b")
    sub.add_argument("--no-blocks", action="store_true", help="other physical blocks are no difference")
    sub = command("experiment", experiment, "the minimal experiment, its ten small arrays a step")
    sub.add_argument("--keep", type=Path, metavar="FILE", help="keep the trace here")
    sub.add_argument("--prompts", default="A=8,B=10", help="requests and prompt lengths (default: A=8,B=10)")
    sub.add_argument("--max-tokens", type=int, default=6, help="tokens that each generates (default: 6)")
    sub = command("html", html, "one self-contained page that shows the steps", "trace")
    sub.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="where to write the page")
    sub.add_argument("--first", type=int, default=0, metavar="N", help="first step to show (default: 0)")
    sub.add_argument("--steps", type=int, default=500, metavar="N", help="steps to show at most (default: 500)")
    command("symptoms", symptoms, "the table of faults: sign, cause, breakpoint")
    return parser.parse_args(arguments)


def _open(path: Path) -> Trace:
    """A trace whose last line was cut off, as a crash leaves it, is read as far as it goes; said once."""
    said: set[str] = set()

    def tell(what: str) -> None:
        if what not in said:
            print(f"warning: {what}", file=sys.stderr)
        said.add(what)

    return open_trace(path, tell)


def show(args: argparse.Namespace, console: Console) -> int:
    trace = _open(args.trace)
    if args.step is not None:
        line = trace.step(args.step)
        if args.json:
            print(json.dumps(line))
            return 0
        for table in step_tables(line, trace.geometry, args.tokens):
            console.print(table)
    elif args.request is not None:
        table = request_table(trace.lines(), args.request)
        if not args.json:
            console.print(table)
            return 0
        for line in trace.steps():
            if args.request in line["req_ids"]:
                print(json.dumps(line))
    else:
        overview(trace, args, console)
    return 0


def overview(trace: Trace, args: argparse.Namespace, console: Console) -> None:
    rows = [
        {
            "step": line["step"],
            "requests": len(line["req_ids"]),
            "tokens": line.get("num_tokens", 0),
            "bucket": line.get("bucket", {}).get("tokens", 0),
            "new": len(line["plan"]["new"]),
            "resumed": len(line["plan"]["cached"]["resumed_req_ids"]),
            "preempted": len(line["plan"]["preempted_req_ids"]),
            "finished": len(line["plan"]["finished_req_ids"]),
            "us": round(sum(line["times_us"].values())),
        }
        for line in trace.steps()
    ]
    failed = [_failure(line) for line in trace.lines() if "error" in line]
    if args.json:
        print(json.dumps({"header": trace.header, "steps": rows, "failed": failed}))
        return
    table = Table(title=f"{trace.path}: {len(rows)} steps")
    for name in rows[0] if rows else ["step"]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    for failure in failed:
        console.print(f"step {failure['step']} failed: {failure['error']}")


def _failure(line: dict[str, Any]) -> dict[str, Any]:
    return {"step": line["step"], "error": line["error"]}


def show_stops(args: argparse.Namespace, console: Console) -> int:
    trace = _open(args.trace)
    before = trace.step(args.step - 1) if args.step else None
    found = stops(trace.step(args.step), trace.geometry, before)
    if args.json:
        print(json.dumps([dataclasses.asdict(stop) for stop in found]))
        return 0
    for stop in found:
        console.print(Text(f"{stop.number}. {stop.where}", "bold") + f": {stop.verify}")
        console.print(f"   {stop.formula}", highlight=False)
        for name, value in stop.values.items():
            console.print(f"   {name}: {value}")
    return 0


def check(args: argparse.Namespace, console: Console) -> int:
    trace = _open(args.trace)
    checker, steps, finding = TraceChecker(trace.geometry), 0, None
    failed = []
    for line in _progress(trace, args, "checking"):
        steps += 1
        if "error" in line:
            failed.append(_failure(line))
        if (finding := checker.check(line)) is not None:
            break
    if args.json:
        found = None if finding is None else dataclasses.asdict(finding)
        print(json.dumps({"steps": steps, "finding": found, "failed": failed}))
    elif finding is None:
        print(f"{steps} steps: nothing wrong")
    else:
        print(finding)
    if not args.json:
        for failure in failed:
            print(f"step {failure['step']} failed: {failure['error']}")
    return 0 if finding is None else 1


def run_again(args: argparse.Namespace, console: Console) -> int:
    trace = _open(args.trace)
    stepper: Any = HostStepper(trace.geometry)
    if args.model is not None:
        from jaxrunner.trace.replay_model import ModelStepper

        stepper = ModelStepper.load(args.model, args.dtype, trace.header)
    steps, difference = replay(_progress(trace, args, "replaying"), stepper)
    if args.json:
        print(
            json.dumps({"steps": steps, "difference": None if difference is None else dataclasses.asdict(difference)})
        )
    else:
        print(f"{steps} steps: {difference or 'every array is the same'}")
    return 0 if difference is None else 1


def diff(args: argparse.Namespace, console: Console) -> int:
    a, b = _open(args.a), _open(args.b)
    difference = diff_traces(a.lines(), b.lines(), blocks=not args.no_blocks)
    if args.json:
        print(json.dumps(None if difference is None else dataclasses.asdict(difference)))
    else:
        print("no difference" if difference is None else difference)
    return 0 if difference is None else 1


def experiment(args: argparse.Namespace, console: Console) -> int:
    prompts = {}
    for part in args.prompts.split(","):
        name, _, length = part.partition("=")
        if not name or not length.isdigit() or int(length) < 1:
            raise ValueError(f"--prompts must be like A=8,B=10, got {args.prompts!r}")
        prompts[name] = int(length)
    with tempfile.TemporaryDirectory() as folder:
        path = args.keep or Path(folder) / "experiment.jsonl"
        run_experiment(path, prompts, args.max_tokens)
        for line in open_trace(path).steps():
            print_small(line, args.json)
    return 0


def print_small(line: dict[str, Any], as_json: bool) -> None:
    """The ten small arrays of a step, without padding."""
    if not line["req_ids"]:
        return
    n, total = len(line["req_ids"]), line["num_tokens"]
    length = {"query_start_loc": n + 1, "positions": total, "logits_indices": line["num_logits"]}
    small = {name: line[name][: length.get(name, n)] for name in EXPERIMENT_ARRAYS}
    small["block_rows"] = dict(zip(line["req_ids"], line["block_rows"][0], strict=False))
    small["slot_mapping"] = line["slot_mapping"][0][:total]
    if as_json:
        print(json.dumps({"step": line["step"], **small}))
        return
    print(f"step {line['step']}")
    for name, value in small.items():
        print(f"  {name:16}= {value}")


def html(args: argparse.Namespace, console: Console) -> int:
    args.output.write_text(page_of(_open(args.trace), args.first, args.steps), encoding="utf-8")
    size = args.output.stat().st_size
    print(json.dumps({"page": str(args.output), "bytes": size}) if args.json else f"{args.output}: {size / 1e6:.1f} MB")
    return 0


def symptoms(args: argparse.Namespace, console: Console) -> int:
    if args.json:
        print(json.dumps([dataclasses.asdict(s) for s in SYMPTOMS.values()]))
        return 0
    table = Table("symptom", "sign", "likely cause", "breakpoint", title="What goes wrong in a batch", show_lines=True)
    for s in SYMPTOMS.values():
        table.add_row(s.name, s.sign, s.cause, str(s.stop))
    console.print(table)
    return 0


def _progress(trace: Trace, args: argparse.Namespace, what: str) -> Iterator[dict[str, Any]]:
    quiet = args.json or not sys.stderr.isatty()
    yield from track(trace.lines(), f"{what} ...", console=Console(stderr=True), disable=quiet, transient=True)


if __name__ == "__main__":
    run_command(main)
