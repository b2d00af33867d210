#!/usr/bin/env python
"""Decode speed beside transformers': same weights, same prompts, same threads, in turns on one machine.

transformers runs in an environment of its own, whose Python --peer-python names:
  python3.11 -m venv peer && peer/bin/pip install torch==2.13.0 transformers==5.24.0
  bench_transformers.py --peer-python peer/bin/python --batch 1,8 --rounds 3 --json out.json

Each round runs transformers, then this project, in processes of their own. Transformers' figure is the better of a
bare loop over the model and its generate(). A decode step of this project is timed at the runner, host work included:
scheduling, packing, both executables, tokens on the host, stop checks. Quote the ratio; the machine's speed drifts.
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

sys.path.insert(0, str(Path(__file__).parents[1]))


def export(model: str, folder: Path) -> Path:
    """The model as a Hugging Face folder in float32: itself if it is one, else written to ``folder``."""
    import safetensors.numpy

    from models.checkpoint import open_checkpoint
    from models.gguf_file import read_gguf
    from models.gguf_model import hf_config
    from models.resolve import resolve_model

    path = resolve_model(model)
    if path.is_dir():
        return path
    safetensors.numpy.save_file(dict(open_checkpoint(path).tensors()), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(read_gguf(path))))
    return folder


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


def ours(args: argparse.Namespace) -> None:
    """One measurement of this project; prints JSON. Runs in a process of its own."""
    from jaxrunner import LLM, SamplingParams

    prompts = json.loads(Path(args.prompts).read_text())
    batch, length = len(prompts), len(prompts[0])
    # The second sequence length has nothing to share with the first: prefix caching would only hide prefill.
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=length + args.new_tokens + 1,
        max_num_seqs=batch,
        max_num_batched_tokens=max(512, batch),
        token_buckets=tuple(sorted({batch, 512})),
        logits_buckets=(batch,),
        warmup="all",
        enable_prefix_caching=False,
        quiet=True,
    )
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True, detokenize=False)
    llm.generate([p[:16] for p in prompts], replace(params, max_tokens=4), use_tqdm=False)  # first calls
    steps: list[tuple[int, float]] = []
    step = llm.engine.step

    def timed() -> object:
        start = time.perf_counter()
        result = step()
        steps.append((len(result.deltas), time.perf_counter() - start))
        return result

    llm.engine.step = timed  # type: ignore[method-assign, assignment]
    before = llm.runner.times.as_dict()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    total = time.perf_counter() - start
    after = llm.runner.times.as_dict()
    # A decode step gives a token to every row; the first such step may have finished a prompt.
    decode = [seconds for tokens, seconds in steps if tokens == batch][1:]
    prefill = total - sum(seconds for tokens, seconds in steps if tokens == batch)
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
    """The JSON object a process prints last."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{command[0]} {command[1]} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


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
            for round_ in range(args.rounds):
                peer, own = run(peer_command, args.threads), run(our_command, args.threads)
                peer_loop = statistics.median(peer["decode_step_s"])
                peer_step = min(peer_loop, (peer["generate_s"] - peer["prefill_s"]) / args.new_tokens)
                own_step = statistics.median(own["decode_step_s"])
                pairs = zip(peer["tokens"], own["tokens"], strict=True)
                same = sum(a == b for p, o in pairs for a, b in zip(p, o, strict=True))
                rows.append(
                    {
                        "batch": batch,
                        "round": round_,
                        "transformers_tokens_per_s": batch / peer_step,
                        "jaxrunner_tokens_per_s": batch / own_step,
                        "ratio": peer_step / own_step,
                        "prefill_ratio": peer["prefill_s"] / own["prefill_s"],
                        "same_tokens": same / (batch * args.new_tokens),
                        "compiled_late": own["compiled_late"],
                        "threads": args.threads,
                        "versions": peer["versions"],
                    }
                )
                console.print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()})
    return rows


def show(console: Console, rows: list[dict], args: argparse.Namespace) -> None:
    table = Table(title=f"{args.model}, {args.dtype}, prompt {args.prompt_len} + {args.new_tokens} tokens, medians")
    for name in ("rows", "transformers tokens/s", "jaxrunner tokens/s", "ratio", "prefill ratio", "same tokens"):
        table.add_column(name, justify="right")
    for batch in args.batch:
        mine = [r for r in rows if r["batch"] == batch]
        keys = ("transformers_tokens_per_s", "jaxrunner_tokens_per_s", "ratio", "prefill_ratio", "same_tokens")
        table.add_row(str(batch), *(f"{statistics.median(r[k] for r in mine):.2f}" for k in keys))
    console.print(table)


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
    parser.add_argument("--threads", type=int, default=2)
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
    console = Console(stderr=args.json is not None)
    rows = compare(args, console)
    show(console, rows, args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
