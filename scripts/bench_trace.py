#!/usr/bin/env python
"""What recording costs: the step thread's part beside the host path, and whole runs of a model with and without.

  bench_trace.py                       host path at 64 requests, decoding
  bench_trace.py --reqs 8,64,256
  bench_trace.py --model smollm2-135m-instruct --rounds 4

Both sides run in turns in one process. Quote the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxrunner.batch import BufferRing, InputBatch, prepare_inputs, record_sampled, update_states  # noqa: E402
from jaxrunner.protocol import CachedRequestData, NewRequestData, SchedulerOutput  # noqa: E402
from jaxrunner.shapes import StepShapes  # noqa: E402
from jaxrunner.trace import Geometry, StepRecorder  # noqa: E402
from scripts.command import positives, run_command  # noqa: E402
from scripts.tables import show_table  # noqa: E402

PROMPT, BLOCKS, WARM_UP = 100, 40, 50


def host(reqs: int, steps: int, path: Path) -> dict[str, float]:
    """Medians in microseconds of a decode step of so many requests."""
    budget = reqs * PROMPT
    batch = InputBatch(
        max_num_reqs=reqs, max_model_len=BLOCKS * 16, max_num_batched_tokens=budget, vocab_size=1000, block_sizes=(16,)
    )
    shapes = StepShapes(budget, reqs)
    ring = BufferRing(max(layout.size for layout in shapes.layouts.values()))
    recorder = StepRecorder(path, Geometry.of(batch))
    ids = [f"r{i}" for i in range(reqs)]
    tables = [(list(range(1 + i * BLOCKS, 1 + (i + 1) * BLOCKS)),) for i in range(reqs)]
    new = [NewRequestData(r, list(range(PROMPT)), blocks) for r, blocks in zip(ids, tables, strict=True)]
    plan = SchedulerOutput(new, num_scheduled_tokens=dict.fromkeys(ids, PROMPT), total_num_scheduled_tokens=budget)
    clock, times = time.perf_counter, []
    for step in range(min(steps, BLOCKS * 16 - PROMPT - WARM_UP) + WARM_UP):
        if step:
            known = CachedRequestData(list(ids), set(), [None] * reqs, [PROMPT + step - 1] * reqs, [step] * reqs)
            counts = dict.fromkeys(ids, 1)
            plan = SchedulerOutput(
                scheduled_cached_reqs=known, num_scheduled_tokens=counts, total_num_scheduled_tokens=reqs
            )
        sampled = np.ones((reqs, 1), np.int32)
        t0 = clock()
        update_states(batch, plan)
        inputs = prepare_inputs(batch, plan, shapes, buffers=ring)
        t1 = clock()
        record = recorder.begin(plan, inputs)
        t2 = clock()
        tokens = record_sampled(batch, sampled)
        t3 = clock()
        recorder.finish(record, tokens, {"update": t1 - t0})
        t4 = clock()
        times.append((t1 - t0 + t3 - t2, t2 - t1 + t4 - t3))
        time.sleep(0.001)  # the forward: the writer has the time that it would have then
    recorder.close()
    path_us, record_us = (1e6 * statistics.median(t) for t in zip(*times[WARM_UP:], strict=True))
    return {"reqs": reqs, "host_path_us": path_us, "recording_us": record_us, "fraction": record_us / path_us}


def model(name: str, rounds: int, folder: Path) -> dict[str, float]:
    """Seconds of the same requests with and without a trace, alternating; medians."""
    from jaxrunner import LLM, SamplingParams

    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 128, "quiet": True}
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(10 + i, 42 + i))} for i in range(8)]
    plain = LLM(name, **options)
    traced = LLM(plain.model, **options, trace=str(folder / "t.jsonl"))
    times: dict[str, list[float]] = {"plain": [], "traced": []}
    for round_ in range(rounds + 1):
        for kind, llm in (("plain", plain), ("traced", traced)):
            llm.reset_prefix_cache()
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if round_:
                times[kind].append(time.perf_counter() - start)
    ratios = [t / p for t, p in zip(times["traced"], times["plain"], strict=True)]
    return {"plain_s": statistics.median(times["plain"]), "traced_s": statistics.median(times["traced"]),
            "ratio": statistics.median(ratios)}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reqs", type=positives, default="64", help="requests that decode, with commas (default: 64)")
    parser.add_argument("--steps", type=int, default=300, help="measured steps (default: 300)")
    parser.add_argument("--model", help="also run this model with and without a trace")
    parser.add_argument("--rounds", type=int, default=4, help="of the model's runs (default: 4)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = [host(n, args.steps, Path(folder) / "h.jsonl") for n in args.reqs]
        whole = model(args.model, args.rounds, Path(folder)) if args.model else None
    if args.json:
        print(json.dumps({"host": rows, "model": whole}))
        return 0
    table = Table("requests", "host path (us)", "recording (us)", "of the host path", title="the step thread, decoding")
    for row in rows:
        table.add_row(
            str(row["reqs"]), f"{row['host_path_us']:.1f}", f"{row['recording_us']:.1f}", f"{row['fraction']:.1%}"
        )
    show_table(table)
    if whole is not None:
        seconds = f"{whole['plain_s']:.2f} s without, {whole['traced_s']:.2f} s with a trace"
        print(f"{args.model}: {seconds}: x {whole['ratio']:.3f}")
    return 0


if __name__ == "__main__":
    run_command(main)
