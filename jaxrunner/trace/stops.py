"""The eight breakpoints of a step: what each is to verify, with the step's values and the formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxrunner.trace.encode import Geometry
from jaxrunner.trace.reader import Line


@dataclass(frozen=True)
class Stop:
    """One breakpoint at one step.

    Attributes:
        where: the function, in this project.
        verify: what has to hold there.
        formula: how the values follow from one another; "" where there is none.
        values: what they are.
    """

    number: int
    where: str
    verify: str
    formula: str
    values: dict[str, Any]


def stops(line: Line, geometry: Geometry, before: Line | None = None) -> list[Stop]:
    """The breakpoints of a step.

    Args:
        before: the step before it, to tell which rows have moved.
    """
    plan, ids = line["plan"], line["req_ids"]
    if plan is None:
        raise ValueError(f"step {line['step']} failed before its plan was read ({line['error']})")
    counts = plan["num_scheduled_tokens"]
    new = plan["new"]
    first = [
        Stop(1, "update_states, on entry", "who ends, who is new, who is known, and how many tokens each gets",
             "sum(num_scheduled_tokens) = total_num_scheduled_tokens",
             {"finished": plan["finished_req_ids"], "preempted": plan["preempted_req_ids"],
              "new": [d["req_id"] for d in new], "cached": plan["cached"]["req_ids"],
              "num_scheduled_tokens": counts, "total": plan["total_num_scheduled_tokens"]}),
        Stop(2, "InputBatch.enter and take_row", "which row and index a new request got, where it starts, its blocks",
             "tokens before num_computed_tokens are there too: a prefix hit keeps the whole prompt",
             {d["req_id"]: {"row": ids.index(d["req_id"]) if d["req_id"] in ids else None,
                            "num_computed_tokens": d["num_computed_tokens"], "block_ids": d["block_ids"]}
              for d in new}),
        Stop(3, "InputBatch.condense, after it", "req_ids and req_id_to_index are inverse to each other",
             "req_id_to_index[req_ids[row]] = row",
             {"req_ids": ids, "moved": _moved(line, before)}),
    ]  # fmt: skip
    return first if not ids else first + _array_stops(line, geometry)


def _array_stops(line: Line, geometry: Geometry) -> list[Stop]:
    n, starts, size = len(line["req_ids"]), line["query_start_loc"], geometry.block_sizes[0]
    ends: dict[str, Any] = {}
    for row, req_id in enumerate(line["req_ids"]):
        a, b = starts[row], starts[row + 1] - 1
        ends[req_id] = {"first": (_at(line["positions"], a), _at(line["token_ids"], a)),
                        "last": (_at(line["positions"], b), _at(line["token_ids"], b))}  # fmt: skip
    groups = {f"group {g}": line["block_rows"][g][:n] for g in range(len(line["block_rows"]))}
    prefill = [c < p for c, p in zip(line["computed"][:n], line["prompt"][:n], strict=True)]
    return [
        Stop(4, "prepare_inputs, query_start_loc", "the intervals, and the length of the stream",
             "query_start_loc[r + 1] = query_start_loc[r] + scheduled[r]; the tail repeats the last value",
             {"scheduled": line["scheduled"][:n], "query_start_loc": starts, "num_tokens": line["num_tokens"]}),
        Stop(5, "prepare_inputs, token gather",
             "each request's first and last token come from their places in its history",
             "token_ids[t] = tokens of request req_indices[t] at positions[t], positions = computed + query_pos",
             {"(position, token)": ends}),
        Stop(6, "slot_mapping", "a position behind a block border, by hand",
             f"slot = block_table[row][position // {size}] * {size} + position % {size}; padding -1",
             _one_slot(line, size)),
        Stop(7, "CommonAttentionMetadata.make", "lengths, phases and block tables of every cache group",
             "seq_lens = computed + scheduled; is_prefilling = computed < prompt",
             {"max_query_len": max(line["scheduled"]), "max_seq_len": max(line["seq_lens"]),
              "seq_lens": line["seq_lens"],
              "is_prefilling": prefill, "block tables": groups}),
        Stop(8, "StepFunctions.forward, gather of hidden states",
             "no pick beyond its request's interval; a prompt not yet covered is discarded",
             "logits_indices = query_start_loc[1:] - 1 (with drafts: the last 1 + drafts); discard = seq_lens < known",
             {"logits_indices": line["logits_indices"][: line["num_logits"]], "known": line["known"][:n],
              "discard": line["discard"][:n]}),
    ]  # fmt: skip


def _at(values: list[Any], i: int) -> Any:
    """An entry, or None where a faulty step points outside."""
    return values[i] if 0 <= i < len(values) else None


def _moved(line: Line, before: Line | None) -> dict[str, str]:
    if before is None:
        return {}
    rows = {req_id: row for row, req_id in enumerate(before["req_ids"])}
    return {
        req_id: f"row {rows[req_id]} -> {row}"
        for row, req_id in enumerate(line["req_ids"])
        if rows.get(req_id, row) != row
    }


def _one_slot(line: Line, size: int) -> dict[str, Any]:
    """The first token behind a block border, or the first token."""
    used = line["num_tokens"]
    token = next((t for t in range(used) if line["positions"][t] >= size), 0)
    row, position = line["req_indices"][token], line["positions"][token]
    block = line["slot_mapping"][0][token] // size
    return {
        "token": token,
        "request": _at(line["req_ids"], row),
        "position": position,
        "by hand": f"block {block} (logical {position // size}) * {size} + {position % size}",
        "slot": line["slot_mapping"][0][token],
        "padding": line["slot_mapping"][0][used:],
    }
