#!/usr/bin/env python
"""Measures an engine: throughput, latency of a fixed batch, or serving under an arrival process.

Examples:
  bench.py throughput --num-prompts 64 --input-len 128 --output-len 64
  bench.py latency --batch-size 8 --input-len 32 --output-len 128 --iterations 5
  bench.py serve --rate 4 --num-prompts 50 --goodput ttft:200 tpot:50 --plot serve.png
  bench.py serve --arrivals bursts --rate 2 --burst-size 8
  bench.py serve --arrivals trace --trace-file azure.csv --speedup 10
  bench.py throughput --dataset sharegpt-json --file conversations.json --json out.json --csv requests.csv

Compilation, warm-up and the measured run are apart: executables are compiled first, a few requests run unmeasured, and
a compilation within the measured run is counted and reported (it must be 0). Latencies have the definitions of vLLM's
bench: TTFT from a request's arrival, TPOT = (t_last - t_first) / (N - 1), undefined below two tokens, ITL as the
sequence of gaps. Requests ignore end-of-sequence tokens, so that each has its planned length. draft_tokens and
accepted_tokens are there for logs of engines that speculate; this one proposes no drafts, so both are 0.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxrunner.arrival_trace import read_arrival_trace  # noqa: E402
from jaxrunner.bench import SLO, BenchRequest, RunLog, arrival_times, compute_metrics, drive  # noqa: E402
from jaxrunner.bench.arrivals import trace_times  # noqa: E402
from jaxrunner.bench.report import environment, metrics_table, peak_memory, plot, write_csv, write_json  # noqa: E402
from jaxrunner.bench.workload import file_requests, random_requests, sharegpt_requests, traced_requests  # noqa: E402
from jaxrunner.llm import DEFAULT_MODEL, LLM  # noqa: E402
from scripts.command import report_error, run_command  # noqa: E402
from scripts.tables import show_table  # noqa: E402

WARM_UP_REQUESTS = 2


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    try:
        run(args, console)
    except (ValueError, OSError, ImportError) as error:
        return report_error(f"bench.py {args.command}", error, args)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    engine = common.add_argument_group("engine")
    engine.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"folder, file, name or hub id (default: {DEFAULT_MODEL})"
    )
    engine.add_argument("--dtype", default="auto", help="float32, bfloat16 or auto")
    engine.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of a request (default: the longest needed)"
    )
    engine.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="sequences at once (default: 64)")
    engine.add_argument("--max-num-batched-tokens", type=int, default=512, metavar="N", help="a step's (default: 512)")
    engine.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens of a block (default: 16)")
    engine.add_argument("--num-blocks", type=int, metavar="N", help="KV-cache blocks (default: what there is room for)")
    engine.add_argument("--no-prefix-caching", action="store_true", help="compute common beginnings anew")
    engine.add_argument("--attention", default="auto", help="name of an attention implementation")
    engine.add_argument("--trace", metavar="FILE", help="record every step (scripts/trace.py)")
    engine.add_argument("--record", metavar="FILE", help="write every step's shape (scripts/sweep_buckets.py)")
    work = common.add_argument_group("workload")
    work.add_argument("--dataset", choices=("random", "sharegpt-json", "file"), default="random")
    work.add_argument(
        "--file", metavar="FILE", help="of the dataset: ShareGPT's JSON, or requests as generate.py takes them"
    )
    work.add_argument("--num-prompts", type=int, default=32, help="requests (default: 32)")
    work.add_argument("--input-len", type=int, default=128, help="tokens of a random prompt (default: 128)")
    work.add_argument(
        "--output-len", type=int, help="tokens that each generates (default: 64; ShareGPT's: the answer's)"
    )
    work.add_argument(
        "--range-ratio", type=float, default=0.0, help="random lengths vary by this fraction (default: 0)"
    )
    work.add_argument("--prefix-share", type=float, default=0.0, help="fraction of the input that prompts share")
    work.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    work.add_argument("--seed", type=int, default=0, help="of prompts, arrivals and sampling (default: 0)")
    out = common.add_argument_group("output")
    out.add_argument(
        "--json", metavar="FILE", help="numbers, events, configuration, versions; - prints numbers to stdout"
    )
    out.add_argument("--csv", metavar="FILE", help="a line per request")
    out.add_argument("--plot", metavar="FILE", help="ITL and the three segments of steps (needs matplotlib)")
    out.add_argument("--goodput", nargs="+", metavar="SLO", help="objectives in ms: ttft:200 tpot:50 e2el:3000")
    out.add_argument(
        "--profile", metavar="DIR", help="wrap the measured run in jax.profiler; view with xprof or Perfetto"
    )

    commands.add_parser("throughput", parents=[common], help="all requests at once")
    latency = commands.add_parser("latency", parents=[common], help="a fixed batch, again and again")
    latency.add_argument("--batch-size", type=int, default=8, help="requests that run together (default: 8)")
    latency.add_argument("--iterations", type=int, default=5, help="measured batches (default: 5)")
    serve = commands.add_parser("serve", parents=[common], help="requests that arrive over time")
    serve.add_argument("--arrivals", choices=("poisson", "fixed", "bursts", "trace"), default="poisson")
    serve.add_argument("--rate", type=float, default=float("inf"), help="requests per second (default: all at once)")
    serve.add_argument("--burstiness", type=float, default=1.0, help="shape of the gaps; 1, the default, is Poisson")
    serve.add_argument("--burst-size", type=int, default=8, help="requests that come together (default: 8)")
    serve.add_argument("--trace-file", metavar="FILE", help="arrivals and lengths: Azure's, BurstGPT's or Mooncake's")
    serve.add_argument("--speedup", type=float, default=1.0, help="run a trace so many times as fast")
    serve.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="requests in the engine at once; TTFT and E2E count from a request's arrival, waiting outside included"
        " (vLLM's bench counts from its sending)",
    )
    return parser.parse_args(arguments)


def run(args: argparse.Namespace, console: Console) -> None:
    slo = SLO.parse(args.goodput) if args.goodput else None
    check_arguments(args)
    start = time.perf_counter()
    llm = load(args)
    loaded = time.perf_counter() - start
    requests = workload(args, llm)
    wanted = args.batch_size if args.command == "latency" else args.num_prompts
    if len(requests) < wanted:
        console.print(f"there are {len(requests)} requests to be had, not {wanted}: these are measured")
    console.print(f"{len(requests)} requests; loaded and compiled in {loaded:.1f} s")
    warm_up(llm, requests)
    warmed = time.perf_counter() - start - loaded
    with profiled(args.profile) as step_context:
        log = measure(args, llm, requests, console, step_context)
    metrics, memory = compute_metrics(log, slo), peak_memory()
    title = f"{args.command}: {llm.model.source}, {jax.devices()[0].device_kind}"
    about = {
        "command": args.command,
        # JSON has no infinity, which --rate is if nothing is said.
        "arguments": {k: str(v) if v == math.inf else v for k, v in vars(args).items() if k != "command"},
        "load_and_compile_s": loaded,
        "warm_up_s": warmed,
        "compiled": [{"name": c.name, "seconds": c.seconds} for c in llm.runner.executables.compiled.values()],
    }
    if args.json == "-":
        print(json.dumps({**about, **environment(), "metrics": metrics.as_json(), "memory": memory}, default=str))
    else:
        show_table(metrics_table(metrics, memory, title))
        if args.json:
            write_json(args.json, metrics, log, about)
    if args.csv:
        write_csv(args.csv, log)
    if args.plot:
        plot(args.plot, log, title)


def check_arguments(args: argparse.Namespace) -> None:
    """What can be told before a model is loaded.

    Raises:
        ValueError, OSError, ImportError: what is missing.
    """
    for name in ("num_prompts", "input_len", "output_len", "batch_size", "iterations", "max_concurrency"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for path in (args.json, args.csv, args.plot):
        if path and path != "-" and not Path(path).parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {Path(path).parent}")
    if args.dataset != "random":
        if not args.file:
            raise ValueError(f"--dataset {args.dataset} needs --file")
        open(args.file, encoding="utf-8").close()
    if args.command == "serve":
        arrivals(args, 1)
    if args.plot:
        import matplotlib  # noqa: F401


def load(args: argparse.Namespace) -> LLM:
    output_len = args.output_len or 64
    longest = args.max_model_len
    if longest is None and args.dataset == "random" and getattr(args, "trace_file", None) is None:
        longest = int((args.input_len + output_len) * (1 + args.range_ratio)) + 1
    return LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=longest,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=max(args.max_num_batched_tokens, args.max_num_seqs),
        block_size=args.block_size,
        num_gpu_blocks_override=args.num_blocks,
        enable_prefix_caching=not args.no_prefix_caching,
        attention=args.attention,
        trace=args.trace,
        record_shapes=args.record,
        warmup="all",
    )


def workload(args: argparse.Namespace, llm: LLM) -> list[BenchRequest]:
    count = args.batch_size if args.command == "latency" else args.num_prompts
    vocab, longest = llm.runner.model_config.vocab_size, llm.runner.config.max_model_len
    if getattr(args, "trace_file", None):
        return traced_requests(read_arrival_trace(args.trace_file, count), longest, vocab, args.seed)
    if args.dataset == "random":
        return random_requests(count, args.input_len, args.output_len or 64, vocab, range_ratio=args.range_ratio,
                               prefix_share=args.prefix_share, seed=args.seed)  # fmt: skip
    if args.dataset == "file":
        return file_requests(args.file, count, args.output_len or 64, llm)
    return sharegpt_requests(args.file, count, llm.get_tokenizer(), longest, output_len=args.output_len, seed=args.seed)


def warm_up(llm: LLM, requests: Sequence[BenchRequest]) -> None:
    """A few requests to their second token: every kind of call has been made once. What they cached is forgotten."""
    few = [BenchRequest(r.token_ids, min(r.num_output_tokens, 2)) for r in requests[:WARM_UP_REQUESTS]]
    drive(llm, few, [0.0] * len(few))
    llm.reset_prefix_cache()


def measure(
    args: argparse.Namespace,
    llm: LLM,
    requests: list[BenchRequest],
    console: Console,
    step_context: Callable[[int], AbstractContextManager[Any]] | None,
) -> RunLog:
    rounds = args.iterations if args.command == "latency" else 1
    total = rounds * sum(r.num_output_tokens for r in requests)
    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.completed} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)

        def on_step(tokens: int, finished: int) -> None:
            progress.advance(task, tokens)

        options: dict[str, Any] = {"temperature": args.temperature, "seed": args.seed, "on_step": on_step,
                                   "step_context": step_context}  # fmt: skip
        if args.command == "serve":
            return drive(llm, requests, arrivals(args, len(requests)), max_concurrency=args.max_concurrency, **options)
        log = drive(llm, requests, [0.0] * len(requests), **options)
        for _ in range(rounds - 1):
            llm.reset_prefix_cache()
            append(log, drive(llm, requests, [0.0] * len(requests), **options))
        return log


def arrivals(args: argparse.Namespace, count: int) -> list[float]:
    if args.arrivals == "trace":
        if not args.trace_file:
            raise ValueError("--arrivals trace needs --trace-file")
        return trace_times(read_arrival_trace(args.trace_file, count), args.speedup)
    return arrival_times(count, args.rate, args.arrivals, burstiness=args.burstiness, burst_size=args.burst_size,
                         seed=args.seed)  # fmt: skip


def append(log: RunLog, more: RunLog) -> None:
    """One run behind another."""
    shift = log.duration
    for request in more.requests:
        request.arrival += shift
        request.finished = None if request.finished is None else request.finished + shift
        request.outputs = [(t + shift, n) for t, n in request.outputs]
    for step in more.steps:
        step.start, step.end = step.start + shift, step.end + shift
    log.requests += more.requests
    log.steps += more.steps
    log.duration += more.duration
    log.num_compilations += more.num_compilations
    log.num_draft_tokens += more.num_draft_tokens
    log.num_accepted_tokens += more.num_accepted_tokens


class profiled:  # noqa: N801  # reads as a verb: with profiled(folder)
    """Wraps a run in jax.profiler, and gives each step its number there. None profiles nothing."""

    def __init__(self, folder: str | None) -> None:
        self._trace: AbstractContextManager[Any] = nullcontext() if folder is None else jax.profiler.trace(folder)
        self._on = folder is not None

    def __enter__(self) -> Callable[[int], AbstractContextManager[Any]] | None:
        self._trace.__enter__()
        return (lambda number: jax.profiler.StepTraceAnnotation("step", step_num=number)) if self._on else None

    def __exit__(self, *error: Any) -> None:
        self._trace.__exit__(*error)


if __name__ == "__main__":
    run_command(main)
