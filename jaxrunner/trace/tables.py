"""A step, or a request's life, as aligned tables of text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.table import Table

from jaxrunner.trace.encode import Geometry
from jaxrunner.trace.reader import Line

MOST_TOKENS = 64  # of a step that a table lists


def step_tables(line: Line, geometry: Geometry, most_tokens: int = MOST_TOKENS) -> list[Table]:
    """The rows and the tokens of a step."""
    plan = line["plan"]
    title = f"step {line['step']}{' (failed)' if 'error' in line else ''}"
    if plan is None:
        return [Table("no plan that could be read", title=title, caption=line["error"])]
    if line["req_ids"]:
        bucket = line["bucket"]
        padded = (
            f"{line['num_tokens']} tokens in {bucket['tokens']}, {len(line['req_ids'])} rows in {bucket['requests']}"
        )
        title += f": {padded}, {line['num_logits']} logits rows in {bucket['logits_rows']} {line['mode']}".rstrip()
    gone = {"finished": plan["finished_req_ids"], "preempted": plan["preempted_req_ids"]}
    said = [line["error"]] if "error" in line else []
    caption = "; ".join(said + [f"{what}: {', '.join(ids)}" for what, ids in gone.items() if ids])
    if not line["req_ids"]:
        return [Table("nothing scheduled", title=title, caption=caption)]
    return [_rows(line, title, caption), _tokens(line, geometry, most_tokens)]


def _rows(line: Line, title: str, caption: str) -> Table:
    table = Table(title=title, caption=caption or None, box=box.SIMPLE)
    names = ("row", "request", "index", "scheduled", "computed", "known", "prompt", "interval", "seq_len",
             "blocks", "logits at", "discard", "sampled")  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name in ("request", "blocks") else "right")
    starts, picks = line["query_start_loc"], line["logits_indices"][: line["num_logits"]]
    for row, req_id in enumerate(line["req_ids"]):
        a, b = starts[row], starts[row + 1]
        blocks = " | ".join(_blocks(rows[row], n[row]) for rows, n in _groups(line))
        table.add_row(
            *map(str, (row, req_id, line["request_indices"][row], line["scheduled"][row], line["computed"][row],
                       line["known"][row], line["prompt"][row], f"[{a}, {b})", line["seq_lens"][row], blocks,
                       " ".join(str(p) for p in picks if a <= p < b), "yes" if line["discard"][row] else "",
                       " ".join(map(str, line["sampled"][row])) if row < len(line["sampled"]) else "?"))
        )  # fmt: skip
    return table


def _tokens(line: Line, geometry: Geometry, most: int) -> Table:
    total = line["bucket"]["tokens"]
    table = Table(caption=f"{total - most} more tokens are left out" if total > most else None, box=box.SIMPLE)
    sizes = geometry.block_sizes
    names = ["token", "request", "offset", "position", "token id"]
    names += [f"{what}{f', group {g}' if len(sizes) > 1 else ''}" for g in range(len(sizes))
              for what in ("logical block", "physical block", "KV slot")]  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name == "request" else "right")
    for token in range(min(total, most)):
        if token >= line["num_tokens"]:
            slots = [cell for slots in line["slot_mapping"] for cell in ("", "", str(slots[token]))]
            table.add_row(str(token), "(padding)", "", "", "", *slots, style="dim")
            continue
        row = line["req_indices"][token]
        position = line["positions"][token]
        ids = line["req_ids"]
        # A faulty step may name a row that is none; it is what one wants to look at.
        if not 0 <= row < len(ids):
            table.add_row(str(token), f"row {row}?", "", str(position), str(line["token_ids"][token]))
            continue
        cells = [token, ids[row], token - line["query_start_loc"][row], position, line["token_ids"][token]]
        for size, slots in zip(sizes, line["slot_mapping"], strict=True):
            cells += [position // size, slots[token] // size, slots[token]]
        table.add_row(*map(str, cells))
    return table


def request_table(lines: Iterable[Line], req_id: str) -> Table:
    """A request's life: a row per step that concerns it.

    Raises:
        ValueError: no step knows it.
    """
    table = Table(title=f"request {req_id}", box=box.SIMPLE)
    for name in ("step", "what", "row", "scheduled", "computed", "seq_len", "blocks", "discard", "sampled", "in all"):
        table.add_column(name, justify="left" if name in ("what", "blocks") else "right")
    known, outputs = False, 0
    for line in lines:
        if "event" in line:
            table.add_row(str(line.get("step", "")), line["event"])
            known = False
            continue
        what = _what(line, req_id)
        known |= "new" in what
        if not known:
            continue
        if req_id not in line["req_ids"]:
            table.add_row(str(line["step"]), what or "not scheduled", style="dim")
            known = "finished" not in what
            continue
        row = line["req_ids"].index(req_id)
        sampled = line["sampled"][row]
        outputs += len(sampled)
        blocks = " | ".join(_blocks(rows[row], n[row]) for rows, n in _groups(line))
        table.add_row(*map(str, (line["step"], what, row, line["scheduled"][row], line["computed"][row],
                                 line["seq_lens"][row], blocks, "yes" if line["discard"][row] else "",
                                 " ".join(map(str, sampled)), outputs)))  # fmt: skip
    if not table.row_count:
        raise ValueError(f"no step of the trace knows a request {req_id!r}")
    return table


def _what(line: Line, req_id: str) -> str:
    plan: dict[str, Any] = line["plan"]
    said = []
    if req_id in plan["finished_req_ids"]:
        said.append("finished")
    if req_id in plan["preempted_req_ids"]:
        said.append("preempted")
    if req_id in plan["cached"]["resumed_req_ids"]:
        said.append("resumed")
    for data in plan["new"]:
        if data["req_id"] == req_id:
            hit = data["num_computed_tokens"]
            said.append(f"new, {hit} tokens cached" if hit else "new")
    return ", ".join(said)


def _groups(line: Line) -> list[tuple[list[list[int]], list[int]]]:
    return list(zip(line["block_rows"], line["block_row_lengths"], strict=True))


def _blocks(row: list[int], length: int, most: int = 12) -> str:
    shown = " ".join(map(str, row[:most]))
    return f"{shown} ... ({length})" if length > most else shown
