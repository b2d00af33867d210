#!/usr/bin/env python
"""A step's arrays, printed: how requests of different lengths become one packed token stream.

Examples:
  packed.py                                   six tokens of three requests: A [2 tokens], B [1], C [3]
  packed.py --example first                   the other worked example: A decodes, B and C are prompts
  packed.py --example experiment              a decode beside the first chunk of a long prompt: its sample is discarded
  packed.py --lengths 4,1,6                   prompts of so many tokens, whole
  packed.py --scheduled 1,3,2 --computed 5,0,8 --block-size 4
  packed.py --scheduled 4,1 --computed 0,7 --tokens 10,8 --tables "3,9,4;5,6"
  packed.py --pad 4                           what the padded tail looks like (T = 10 for the default example)
  packed.py pack                              a padded [2, 3, 4] tensor packed to [5, 4] with cu_seqlens
  packed.py pack --lengths 4,1,2 --dim 3

Everything printed is computed by the project's own batch code, the code that a running step uses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxrunner.batch import InputBatch, StepInputs, prepare_inputs, update_states  # noqa: E402
from jaxrunner.invariants import check_invariants  # noqa: E402
from jaxrunner.protocol import NewRequestData, SchedulerOutput  # noqa: E402
from jaxrunner.shapes import StepShapes  # noqa: E402
from scripts.command import run_command, with_flags  # noqa: E402
from scripts.tables import show_table  # noqa: E402

MOST_TOKENS = 2**14  # of a step that is printed, a line each
MOST_VALUES = 2**20  # of a padded tensor

EXAMPLES = {
    "second": {"scheduled": [2, 1, 3], "computed": [4, 10, 0], "tables": [[7, 2], [1, 3, 5], [8]]},
    "first": {"scheduled": [1, 3, 2], "computed": [5, 0, 8], "tables": [[6, 2], [5], [1, 3, 4]]},
    "experiment": {"scheduled": [1, 3], "computed": [8, 0], "tokens": [9, 10], "tables": [[1, 2, 3], [4, 5, 6]]},
}


def one_step(
    scheduled: Sequence[int],
    computed: Sequence[int],
    tokens: Sequence[int] | None = None,
    tables: Sequence[Sequence[int]] | None = None,
    block_size: int = 4,
    padded_tokens: int | None = None,
    token_ids: Sequence[Sequence[int]] | None = None,
) -> StepInputs:
    """The inputs of a step in which requests A, B, C, ... arrive with so many of their tokens computed.

    Args:
        tokens: tokens each request has; None: just those that are computed after the step.
        tables: physical blocks per request; None: consecutive ones, shuffled so that addresses show.
        padded_tokens: T of the step; None: no padding.
        token_ids: what the requests hold; None: request A holds 0, 1, 2, ..., B 100, 101, ...

    Raises:
        ValueError: the numbers contradict each other.
    """
    n = len(scheduled)
    if len(computed) != n or (tokens and len(tokens) != n) or (tables and len(tables) != n):
        raise ValueError(f"{n} requests are scheduled: computed, tokens and tables need {n} entries each")
    if min(computed) < 0:
        raise ValueError(f"computed tokens must be 0 or more, got {list(computed)}")
    tokens = tokens or [c + s for c, s in zip(computed, scheduled, strict=True)]
    if max(sum(tokens), sum(scheduled), padded_tokens or 0, block_size) > MOST_TOKENS:
        raise ValueError(f"this command is for steps and blocks of up to {MOST_TOKENS} tokens, padding included")
    needed = [-(-t // block_size) for t in tokens]
    if tables is None:
        ids = (np.random.default_rng(0).permutation(sum(needed)) + 1).tolist()
        tables = [[ids.pop() for _ in range(blocks)] for blocks in needed]
    check_sharing(tables, computed, block_size)
    width = max(max(tokens), max(len(t) for t in tables) * block_size)
    budget = max(sum(scheduled), padded_tokens or 0)
    batch = InputBatch(
        max_num_reqs=n,
        max_model_len=width,
        max_num_batched_tokens=budget,
        vocab_size=max(100 * n, width) + width,
        block_sizes=(block_size,),
    )
    new = [
        NewRequestData(
            request_name(i),
            token_ids[i] if token_ids else list(range(100 * i, 100 * i + tokens[i])),
            (tables[i],),
            computed[i],
        )
        for i in range(n)
    ]
    so = SchedulerOutput(
        scheduled_new_reqs=new,
        num_scheduled_tokens={d.req_id: s for d, s in zip(new, scheduled, strict=True)},
        total_num_scheduled_tokens=sum(scheduled),
    )
    update_states(batch, so)
    buckets = (sum(scheduled), budget)
    shapes = StepShapes(budget, n, min_block_size=block_size, token_buckets=buckets)
    shape = shapes.dispatch(padded_tokens or sum(scheduled), n)
    inputs = prepare_inputs(batch, so, shapes, shape=shape)
    check_invariants(batch, so, inputs)
    return inputs


def request_name(i: int) -> str:
    return chr(ord("A") + i) if i < 26 else f"r{i}"


def check_sharing(tables: Sequence[Sequence[int]], computed: Sequence[int], block_size: int) -> None:
    """Requests may share a block that is full for both (a common prefix), since none of them writes to it any more.

    Raises:
        ValueError: a block is in two places of the tables, and at one of them not below the computed tokens.
    """
    seen: dict[int, tuple[int, int]] = {}
    for i, table in enumerate(tables):
        for place, block in enumerate(table):
            other, other_place = seen.setdefault(block, (i, place))
            if (other, other_place) == (i, place):
                continue
            full = all((p + 1) * block_size <= computed[r] for r, p in ((i, place), (other, other_place)))
            if other == i or not full:
                raise ValueError(
                    f"block {block} is entry {other_place} of request {request_name(other)}'s table and entry {place} "
                    f"of {request_name(i)}'s: requests can only share blocks that lie below the computed tokens of both"
                )


def token_rows(inputs: StepInputs, block_size: int) -> list[dict]:
    """One record a token of the stream, padding included."""
    slots, rows, positions = inputs.slot_mapping(), inputs.req_indices, inputs.positions
    table, picks = inputs.block_table(), set(inputs.logits_indices[: inputs.num_logits].tolist())
    out = []
    for t in range(inputs.layout.num_tokens):
        real = t < inputs.num_tokens
        logical = int(positions[t]) // block_size if real else None
        out.append(
            {
                "token": t,
                "request": inputs.req_ids[rows[t]] if real else "padding",
                "input_id": int(inputs["token_ids"][t]),
                "query_pos": int(inputs.query_pos[t]) if real else None,
                "position": int(positions[t]) if real else None,
                "logical_block": logical,
                "physical_block": int(table[rows[t], logical]) if logical is not None else None,
                "kv_slot": int(slots[t]),
                "visible_keys": int(positions[t]) + 1 if real else 0,
                "logits": t in picks,
            }
        )
    return out


def row_records(inputs: StepInputs) -> list[dict]:
    """One record a row, padding included."""
    starts, n = inputs.query_start_loc.tolist(), inputs.num_reqs
    return [
        {
            "row": r,
            "request": inputs.req_ids[r] if r < n else "padding",
            "interval": f"[{starts[r]}, {starts[r + 1]})",
            "num_computed": int(inputs["num_computed"][r]),
            "num_tokens": int(inputs["num_known"][r]),
            "seq_len": int(inputs.seq_lens[r]),
            "logits_index": int(inputs.logits_indices[r]) if r < n else None,
            "discard": bool(inputs.discard[r]) if r < n else None,
            "block_table": inputs.block_table()[r].tolist(),
        }
        for r in range(inputs.layout.num_reqs)
    ]


def show(console: Console, title: str, records: Sequence[dict], left: Sequence[str] = ("request",)) -> None:
    console.print(title, highlight=False)
    table = Table()
    for name in records[0]:
        table.add_column(name, justify="left" if name in left else "right")
    for record in records:
        cells = ("" if v is None or v is False else "yes" if v is True else str(v) for v in record.values())
        table.add_row(*cells)
    show_table(table, console)


def step_arrays(inputs: StepInputs) -> dict[str, list]:
    """The arrays of the step, without padding."""
    n, t = inputs.num_reqs, inputs.num_tokens
    arrays = {
        "req_indices": inputs.req_indices[:t],
        "query_pos": inputs.query_pos[:t],
        "query_start_loc": inputs.query_start_loc[: n + 1],
        "positions": inputs.positions[:t],
        "seq_lens": inputs.seq_lens[:n],
        "slot_mapping": inputs.slot_mapping()[:t],
        "logits_indices": inputs.logits_indices[: inputs.num_logits],
        "discard": inputs.discard[:n],
    }
    return {name: values.tolist() for name, values in arrays.items()}


def print_step(console: Console, inputs: StepInputs, block_size: int) -> None:
    show(console, f"tokens (block size {block_size})", token_rows(inputs, block_size))
    show(console, "rows", row_records(inputs), left=("request", "interval"))
    for name, values in step_arrays(inputs).items():
        console.print(f"{name:16s} {values}", highlight=False, soft_wrap=True)


def pack(lengths: Sequence[int], width: int, dim: int) -> dict:
    """A padded [requests, width, dim] tensor without its padding: row t comes from (req_indices[t], query_pos[t])."""
    if max(lengths) > width or min(lengths) < 1:
        raise ValueError(f"lengths must be from 1 to the padded width {width}, got {list(lengths)}")
    if len(lengths) * width * dim > MOST_VALUES:
        raise ValueError(f"this command is for padded tensors of up to {MOST_VALUES} values")
    padded = np.arange(len(lengths) * width * dim).reshape(len(lengths), width, dim)
    inputs = one_step(lengths, [0] * len(lengths))
    requests, offsets = inputs.req_indices, inputs.query_pos
    packed = padded[requests, offsets]
    return {
        "padded_shape": list(padded.shape),
        "packed_shape": list(packed.shape),
        "cu_seqlens": inputs.query_start_loc.tolist(),
        "source_rows": np.stack([requests, offsets], axis=1).tolist(),
        "packed": packed.tolist(),
    }


def integers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def tables(text: str) -> list[list[int]]:
    return [integers(row) for row in text.split(";")]


def at_least(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, got {text}")
        return int(text)

    return number


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog=__doc__.split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=["step", "pack"], default="step")
    parser.add_argument("--example", choices=EXAMPLES, default="second", help="a worked example (default: second)")
    parser.add_argument("--scheduled", type=integers, metavar="2,1,3", help="tokens each request runs in this step")
    parser.add_argument("--computed", type=integers, metavar="4,10,0", help="tokens in the KV cache (default 0)")
    parser.add_argument("--tokens", type=integers, metavar="6,11,3", help="tokens each request has in all")
    parser.add_argument("--tables", type=tables, metavar="7,2;1,3,5;8", help="physical blocks of each request")
    parser.add_argument("--block-size", type=at_least(1), default=4, metavar="B")
    parser.add_argument("--pad", type=at_least(0), default=0, metavar="N", help="padding tokens behind the stream")
    parser.add_argument("--lengths", type=integers, metavar="3,2", help="pack: sequence lengths; step: as --scheduled")
    parser.add_argument("--width", type=at_least(1), metavar="W", help="pack: padded length (default: the longest)")
    parser.add_argument("--dim", type=at_least(1), metavar="D", help="pack: features of a token (default: 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = parser.parse_args(arguments)
    if args.what == "pack" and (args.scheduled or args.computed or args.tokens or args.tables or args.pad):
        parser.error("pack takes --lengths, --width and --dim; --scheduled and the like are of a step")
    if args.what == "step":
        if args.width or args.dim:
            parser.error("--width and --dim are of a padded tensor: packed.py pack --lengths 3,2 --width 3 --dim 4")
        if args.lengths and args.scheduled:
            parser.error("--lengths and --scheduled mean the same for a step: give one of them")
        args.scheduled = args.scheduled or args.lengths
        if not args.scheduled and (args.computed or args.tokens or args.tables):
            parser.error("--computed, --tokens and --tables are of requests of your own: give --scheduled too")
    console = Console()
    try:
        if args.what == "pack":
            lengths = args.lengths or [3, 2]
            result = pack(lengths, args.width or max(lengths), args.dim or 4)
            if args.json:
                print(json.dumps(result))
                return
            records = [
                {"packed row": t, "request": chr(ord("A") + r), "from": f"[{r}, {o}]", "values": result["packed"][t]}
                for t, (r, o) in enumerate(result["source_rows"])
            ]
            shapes = f"padded {result['padded_shape']} -> packed {result['packed_shape']}"
            show(console, f"{shapes}, cu_seqlens {result['cu_seqlens']}", records)
            return
        if args.scheduled:
            step = {"scheduled": args.scheduled, "computed": args.computed or [0] * len(args.scheduled)}
            step |= {"tokens": args.tokens, "tables": args.tables}
        else:
            step = dict(EXAMPLES[args.example])
        padded = sum(step["scheduled"]) + args.pad
        inputs = one_step(**step, block_size=args.block_size, padded_tokens=padded)
    except ValueError as e:
        parser.error(with_flags(str(e), args))
    if args.json:
        rows = {"tokens": token_rows(inputs, args.block_size), "rows": row_records(inputs)}
        print(json.dumps(step_arrays(inputs) | rows))
    else:
        print_step(console, inputs, args.block_size)


if __name__ == "__main__":
    run_command(main)
