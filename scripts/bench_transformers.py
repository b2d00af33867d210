#!/usr/bin/env python
"""Decode speed beside transformers': same weights, same prompts, same processors, in turns on one machine.

transformers runs in an environment of its own, whose Python --peer-python names:
  python3.11 -m venv peer && peer/bin/pip install torch==2.13.0 transformers==5.24.0
  bench_transformers.py --peer-python peer/bin/python --batch 1,8 --rounds 3 --json out.json

Each round runs transformers, then this project, in processes of their own. Transformers is measured twice: its batched
generate() (less the prefill), and a bare loop over the model without what generate() does around it. A decode step of
this project is timed at the engine, host work included: scheduling, packing, both executables, tokens on the host, stop
checks. Prefill is the time until every row has its first token. Quote the ratios; the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command import run_command  # noqa: E402
from scripts.export_hf import export  # noqa: E402
from scripts.tables import show_table  # noqa: E402


def make_prompts(model: str, batch: int, length: int) -> list[list[int]]:
    """Stretches of English from Python's own documentation, as long as asked."""
    import pydoc_data.topics

    from models.checkpoint import open_checkpoint
    from models.resolve import resolve_model

    tokenizer = open_checkpoint(resolve_model(model)).tokenizer
    assert tokenizer is not None
    text = "\n\n".join(pydoc_data.topics.topics.values())[: 12 * batch * length]
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [ids[i * length : (i + 1) * length] for i in range(batch)]


def split_steps(steps: list[tuple[int, float, float]], batch: int, start: float) -> tuple[float, list[float]]:
    """(seconds from ``start`` until every row had a token, seconds of each decode step of all rows after that).

    Args:
        steps: (tokens sampled, when it began, when it ended) of each step.

    Raises:
        ValueError: no step after the prompts gave every row a token: more new tokens are needed.
    """
    full = [(began, ended) for tokens, began, ended in steps if tokens == batch]
    if len(full) < 2:
        raise ValueError(f"{len(full)} steps with all {batch} rows at once are too few: raise --new-tokens")
    # The first of them finished the last prompt.
    return full[0][1] - start, [ended - began for began, ended in full[1:]]


def ours(args: argparse.Namespace) -> None:
    """One measurement of this project; prints JSON. Runs in a process of its own."""
    from jaxrunner import LLM, SamplingParams

    prompts = json.loads(Path(args.prompts).read_text())
    batch, length = len(prompts), len(prompts[0])
    step_tokens = max(args.max_num_batched_tokens, batch)
    # The second sequence length has nothing to share with the first: prefix caching would only hide prefill.
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=length + args.new_tokens + 1,
        max_num_seqs=batch,
        max_num_batched_tokens=step_tokens,
        token_buckets=tuple(sorted({batch, step_tokens})),
        logits_buckets=(batch,),
        block_size=args.block_size,
        warmup="all",
        enable_prefix_caching=False,
        quiet=True,
    )
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True, detokenize=False)
    llm.generate([p[:16] for p in prompts], replace(params, max_tokens=4), use_tqdm=False)  # first calls
    steps: list[tuple[int, float, float]] = []
    step = llm.engine.step

    def timed() -> object:
        start = time.perf_counter()
        result = step()
        steps.append((len(result.deltas), start, time.perf_counter()))
        return result

    llm.engine.step = timed  # type: ignore[method-assign, assignment]
    before = llm.runner.times.as_dict()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    after = llm.runner.times.as_dict()
    prefill, decode = split_steps(steps, batch, start)
    print(
        json.dumps(
            {
                "prefill_s": prefill,
                "decode_step_s": decode,
                "tokens": [list(o.outputs[0].token_ids) for o in outputs],
                "segments_s": {name: after[name] - before[name] for name in after},
                "compiled_late": llm.runner.executables.late,
            }
        )
    )


def run(command: list[str], threads: int) -> dict:
    """The JSON object a process prints last. It runs on this process's processors, see `pin`."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{command[0]} {command[1]} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def pin(threads: int) -> None:
    """Keeps this process and its children on that many processors: XLA has no flag for its number of threads.

    Raises:
        ValueError: there are fewer.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("this system can't keep a process on some of its processors; run the comparison on Linux")
    processors = sorted(os.sched_getaffinity(0))
    if not 1 <= threads <= len(processors):
        raise ValueError(f"--threads {threads}: this process may use {len(processors)} processors")
    os.sched_setaffinity(0, processors[:threads])


def compare(args: argparse.Namespace, console: Console) -> list[dict]:
    here = Path(__file__)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exported = export(args.model, folder)
        for batch in args.batch:
            prompts = folder / f"prompts{batch}.json"
            prompts.write_text(json.dumps(make_prompts(args.model, batch, args.prompt_len)))
            common = ["--prompts", str(prompts), "--new-tokens", str(args.new_tokens), "--dtype", args.dtype]
            peer_command = [args.peer_python, str(here.parent / "peers" / "transformers_decode.py"), str(exported)]
            peer_command += [*common, "--threads", str(args.threads)]
            our_command = [sys.executable, str(here), "--model", args.model, *common, "--ours"]
            our_command += ["--block-size", str(args.block_size)]
            our_command += ["--max-num-batched-tokens", str(args.max_num_batched_tokens)]
            for round_ in range(args.rounds):
                peer, own = run(peer_command, args.threads), run(our_command, args.threads)
                peer_loop = statistics.median(peer["decode_step_s"])
                peer_generate = (peer["generate_s"] - peer["prefill_s"]) / (args.new_tokens - 1)
                own_step = statistics.median(own["decode_step_s"])
                pairs = zip(peer["tokens"], own["tokens"], strict=True)
                same = sum(a == b for p, o in pairs for a, b in zip(p, o, strict=True))
                rows.append(
                    {
                        "batch": batch,
                        "round": round_,
                        "generate_tokens_per_s": batch / peer_generate,
                        "bare_loop_tokens_per_s": batch / peer_loop,
                        "jaxrunner_tokens_per_s": batch / own_step,
                        "ratio_to_generate": peer_generate / own_step,
                        "ratio_to_bare_loop": peer_loop / own_step,
                        "prefill_ratio": peer["prefill_s"] / own["prefill_s"],
                        "same_tokens": same / (batch * args.new_tokens),
                        "compiled_late": own["compiled_late"],
                        "threads": args.threads,
                        "block_size": args.block_size,
                        "max_num_batched_tokens": args.max_num_batched_tokens,
                        "versions": peer["versions"],
                    }
                )
                console.print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()})
    return rows


def show(console: Console, rows: list[dict], args: argparse.Namespace) -> None:
    table = Table(title=f"{args.model}, {args.dtype}, prompt {args.prompt_len} + {args.new_tokens} tokens, medians")
    names = {
        "rows": "batch",
        "generate() tokens/s": "generate_tokens_per_s",
        "bare loop tokens/s": "bare_loop_tokens_per_s",
        "jaxrunner tokens/s": "jaxrunner_tokens_per_s",
        "ratio to generate()": "ratio_to_generate",
        "ratio to bare loop": "ratio_to_bare_loop",
        "prefill ratio": "prefill_ratio",
        "same tokens": "same_tokens",
    }
    for name in names:
        table.add_column(name, justify="right")
    for batch in args.batch:
        mine = [r for r in rows if r["batch"] == batch]
        values = (statistics.median(r[key] for r in mine) for key in names.values())
        table.add_row(*(str(value) if isinstance(value, int) else f"{value:.2f}" for value in values))
    show_table(table, console)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog=__doc__.split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--peer-python", default="", help="Python of an environment with torch and transformers")
    parser.add_argument("--batch", default="1,8", type=lambda s: [int(x) for x in s.split(",")])
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2, help="processors that either side may use (default: 2)")
    parser.add_argument("--block-size", type=int, default=16, help="of this project's KV cache (default: 16)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=512, help="tokens of one of this project's steps (default: 512)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows of all rounds here")
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--prompts", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ours:
        ours(args)
        return
    if not args.peer_python:
        parser.error("--peer-python is needed: see --help for how to make that environment")
    try:
        pin(args.threads)
    except ValueError as error:
        parser.error(str(error))
    console = Console(stderr=args.json is not None)
    rows = compare(args, console)
    show(console, rows, args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    run_command(main)
