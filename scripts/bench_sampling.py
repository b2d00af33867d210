#!/usr/bin/env python3
"""What each sampling feature costs on a decode step: the sampler over a batch in which every row uses it.

Logits are random, parameters and token histories as a running batch has them. One program serves all lines: a feature
is a branch that a batch-wide flag takes. The base is a batch that samples with a temperature and nothing else. All
lines are measured in turns, so that whatever the machine does meanwhile, it does to all of them.

Two features have a part on the host, beside the step: grammars (the masks of the next tokens, which llguidance fills in
parallel) and log probabilities. That is a table of its own, in milliseconds a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxrunner import SamplingParams  # noqa: E402
from jaxrunner.request_tables import TableSizes, pack  # noqa: E402
from jaxrunner.sampling_columns import HELD_BACK, LOGPROBS, sampling_flags, sampling_record  # noqa: E402
from jaxrunner.step import (  # noqa: E402
    DeviceState,
    enter_requests,
    enter_tables,
    init_state,
    packed_logprobs,
    sample,
)
from models.checkpoint import open_checkpoint  # noqa: E402
from models.resolve import resolve_model  # noqa: E402
from scripts.command import run_command  # noqa: E402
from scripts.host_bench import features  # noqa: E402
from scripts.tables import show_table  # noqa: E402

EOS = (0, 1)
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "logit_bias": {"logit_bias": {i: 1.0 for i in range(2, 34)}},
    "allowed_token_ids": {"allowed_token_ids": range(2, 2000)},
    "bad_words": {"bad_words_token_ids": [[5, 6], [7], [8, 9, 10]]},
    "min_tokens": {"min_tokens": 1000, "max_tokens": 2000},
    "logprobs": {"logprobs": 20},
}
BASE = "temperature"
WITHOUT = "temperature, a program without the branches"  # what they cost a step that takes none of them
NOT_TOGETHER = ("greedy",)  # all the others are, in the line "all"


def main() -> None:
    args = parse_args()
    host = {name: statistics.median(times) for name, times in measure_host(args).items()}
    if args.host_only:
        show(args, {}, host)
        return
    lines = FEATURES | {"all": all_together()}
    run = {name: prepare(args, fields) for name, fields in lines.items()}
    run[WITHOUT] = prepare(args, FEATURES[BASE], branches=False)
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for _ in track(range(args.rounds), "measuring", console=Console(stderr=True), transient=True):
        for name, step in run.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            seconds[name].append(time.perf_counter() - start)
    base = seconds[BASE]
    report = {
        name: {
            "ms": 1e3 * statistics.median(times),
            "ratio": statistics.median(t / b for t, b in zip(times, base, strict=True)),
        }
        for name, times in seconds.items()
    }
    show(args, report, host)


def show(args: argparse.Namespace, report: dict[str, dict[str, float]], host: dict[str, float]) -> None:
    device = jax.devices()[0].device_kind
    if args.json:
        in_ms = {name: 1e3 * seconds for name, seconds in host.items()}
        print(json.dumps({"device": device, **vars(args), "lines": report, "host_ms": in_ms}, indent=2))
        return
    table = Table(title=f"sampler, {args.rows} rows x {args.vocab} tokens, {device}")
    for header in ("every row has", "ms", f"to {BASE} alone"):
        table.add_column(header, justify="left" if header == "every row has" else "right")
    for name, line in report.items():
        table.add_row(name, f"{line['ms']:.1f}", f"{line['ratio']:.2f}")
    if report:
        show_table(table)
    table = Table("every row has", "ms", title=f"host, {args.rows} rows, a step")
    for name, seconds in host.items():
        table.add_row(name, f"{1e3 * seconds:.2f}")
    show_table(table)


def measure_host(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each of the host's lines, in turns."""
    tokenizer = None if args.tokenizer is None else open_checkpoint(resolve_model(args.tokenizer)).tokenizer
    run = features.lines(args.rows, args.vocab, args.logprobs, tokenizer)
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(args.host_rounds):
        for name, step in run.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def all_together() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, feature in FEATURES.items():
        fields |= {} if name in NOT_TOGETHER else feature
    return fields


def prepare(args: argparse.Namespace, fields: dict[str, Any], branches: bool = True) -> Callable[[], Any]:
    """A call of the sampler over a batch in which every row has these parameters.

    Args:
        branches: False: of a sampler that knows neither constraints and penalties nor log probabilities.
    """
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.gumbel(0, args.spread, (args.rows, args.vocab)), jnp.float32)
    position = jnp.asarray(rng.integers(args.history // 2, args.history, args.rows), jnp.int32)
    if "allowed_token_ids" in fields:
        fields = fields | {"allowed_token_ids": [i for i in fields["allowed_token_ids"] if i < args.vocab]}
    params = SamplingParams(**fields)
    flags = sampling_flags(params) | (HELD_BACK if params.min_tokens else 0)
    state = make_state(args, params)
    raw = logits + 0.0  # an array of its own: in a step, log probabilities compute the logits again
    call = sampler(args, branches, state, logits, raw, position)
    return lambda: call(state, logits, raw, position, np.int32(flags))


def make_state(args: argparse.Namespace, params: SamplingParams) -> DeviceState:
    sizes = TableSizes(args.rows, args.history, args.vocab)
    state = init_state(args.rows, [1], sizes)
    records = [sampling_record(params, f"r{i}", args.history // 4, EOS, 0) for i in range(args.rows)]
    stacked = np.stack([np.frombuffer(record, np.int32) for record in records])
    state = enter_requests(state, jnp.arange(args.rows, dtype=jnp.int32), jnp.asarray(stacked))
    rng, tables = np.random.default_rng(1), state.tables
    assert tables is not None
    words = jnp.asarray(
        pack(sizes, params, rng.integers(2, args.vocab, args.history).astype(np.int32), args.history // 4)
    )
    for i in range(args.rows):
        tables = _enter(tables, jnp.int32(i), words)
    return DeviceState(state.block_tables, state.last_sampled, state.sampling, tables)


_enter = jax.jit(enter_tables, donate_argnums=0)
_compiled: dict[str, Any] = {}


def sampler(args: argparse.Namespace, branches: bool, *arguments: Any) -> Any:
    """The one program of all lines: tokens, and log probabilities if any row wants them; or one without branches."""

    def step(state: DeviceState, logits: jax.Array, raw: jax.Array, position: jax.Array, flags: jax.Array) -> Any:
        index = jnp.arange(args.rows, dtype=jnp.int32)
        if not branches:
            return sample(logits, position, state.sampling.rows(index), flags)
        token = sample(logits, position, state.sampling.rows(index), flags, state.tables, index)
        logprobs = jax.lax.cond(
            (flags & LOGPROBS) != 0,
            lambda: packed_logprobs(raw, token, args.logprobs),
            lambda: jnp.zeros((args.rows, 2 * args.logprobs + 3), jnp.int32),
        )
        return token, logprobs

    name = "step" if branches else "plain"
    if name not in _compiled:
        start = time.perf_counter()
        _compiled[name] = jax.jit(step).lower(*arguments, jnp.int32(0)).compile()
        Console(stderr=True).print(f"compiled in {time.perf_counter() - start:.1f} s")
    return _compiled[name]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="requests of the step (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=49152, help="words of the vocabulary (default: %(default)s)")
    parser.add_argument("--history", type=int, default=1024, help="tokens of the longest request (default: 1024)")
    parser.add_argument("--spread", type=float, default=1.5, help="spread of the random logits (default: 1.5)")
    parser.add_argument("--logprobs", type=int, default=20, help="most likely tokens a row (default: 20)")
    parser.add_argument("--rounds", type=int, default=9, help="times each line is measured (default: %(default)s)")
    parser.add_argument("--host-rounds", type=int, default=60, help="times each of the host's lines is (default: 60)")
    parser.add_argument("--host-only", action="store_true", help="the host's table alone")
    parser.add_argument("--tokenizer", metavar="MODEL", help="whose vocabulary grammars have (default: a made one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
