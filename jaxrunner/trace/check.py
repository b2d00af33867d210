"""Checks every step of a trace against the scheduler's plans: the eight invariants, block ownership over time, counts.

It shares no address arithmetic with the batch: plans are followed request by request (``expected.py``), and each array
is compared with the list that follows. The first wrong number is named, with the likeliest cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxrunner.trace.encode import MOST_BLOCKS, Geometry
from jaxrunner.trace.expected import Expected, Known, PlanError
from jaxrunner.trace.reader import Line
from jaxrunner.trace.symptoms import SYMPTOMS, Symptom

PAD_SLOT = -1


@dataclass(frozen=True)
class Finding:
    """The first thing that is wrong.

    Attributes:
        rule: of the eight invariants, or 0 for one that spans steps (ownership, counts, buffers, plans).
        req_id, row: whose; None where it concerns no single request.
        field: which array; ``cell`` its index, if there is one.
    """

    step: int
    rule: int
    req_id: str | None
    row: int | None
    field: str
    cell: int | None
    got: Any
    expected: Any
    symptom: Symptom

    def __str__(self) -> str:
        whose = "" if self.req_id is None else f", request {self.req_id!r}"
        whose += "" if self.row is None else f", row {self.row}"
        at = "" if self.cell is None else f"[{self.cell}]"
        rule = f"invariant {self.rule}" if self.rule else "a rule over steps"
        return (
            f"step {self.step}{whose}: {self.field}{at} is {self.got!r}, expected {self.expected!r} ({rule}).\n"
            f"Looks like {self.symptom.name}: {self.symptom.sign}.\nLikely cause: {self.symptom.cause}"
            f" (breakpoint {self.symptom.stop})."
        )


class _Wrong(Exception):
    """Found; carries a Finding's parts."""

    def __init__(
        self, rule: int, row: int | None, field: str, cell: int | None, got: Any, expected: Any, symptom: str
    ) -> None:
        super().__init__(field)
        self.parts = (rule, row, field, cell, got, expected, symptom)


def check_trace(lines: Iterable[Line], geometry: Geometry) -> Finding | None:
    """The first thing wrong in a trace's lines, or None."""
    checker = TraceChecker(geometry)
    for line in lines:
        if (finding := checker.check(line)) is not None:
            return finding
    return None


class TraceChecker:
    """Checks lines one after another."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._expected = Expected(geometry)
        self._index_of: dict[str, int] = {}
        self._last_rows: list[str] = []  # of the step before, and their columns
        self._last_columns: dict[str, list[int]] = {}

    def check(self, line: Line) -> Finding | None:
        """What is wrong with the next line, or None."""
        if line.get("event") == "reset":
            self._expected.reset()
            self._index_of.clear()
            return None
        if "event" in line and not line.get("req_ids"):
            return None  # a step that was refused
        step, ids = line["step"], line["req_ids"]
        try:
            scheduled = self._expected.take_plan(line["plan"])
            self._check_edits(line["plan"])
            self._check_rows(ids, scheduled, line)
            if scheduled:
                rows = [scheduled[req_id] for req_id in ids]
                self._check_columns(line, rows)
                self._check_stream(line, rows)
                self._check_lengths(line, rows)
                self._check_blocks(line, rows)
                self._check_logits(line, rows)
                if "error" not in line:
                    self._take_sampled(line, rows)
            if not line["buffer_intact"]:
                raise _Wrong(0, None, "buffer", None, "changed in flight", "unchanged", "buffer_overwritten")
        except PlanError as e:
            row = ids.index(e.req_id) if e.req_id in ids else None
            return Finding(step, 0, e.req_id, row, e.field, None, e.got, e.expected, SYMPTOMS[e.symptom])
        except _Wrong as e:
            rule, at, field, cell, got, expected, symptom = e.parts
            req_id = ids[at] if at is not None and at < len(ids) else None
            return Finding(step, rule, req_id, at, field, cell, got, expected, SYMPTOMS[symptom])
        return None

    def _check_edits(self, plan: dict[str, Any]) -> None:
        """Blocks that are cleared or copied into before the step are written too."""
        targets = [("copied into", [[b for _, b in copies] for copies in plan["block_copies"]]),
                   ("cleared", plan["new_block_ids_to_zero"])]  # fmt: skip
        for what, groups in targets:
            for group, blocks in enumerate(groups):
                for block in blocks:
                    held = self._expected.holding_of_pool(group, block)
                    if len(held) > 1:
                        where, got = f"block {block} {what}, cache group {group}", f"held by {held}"
                        raise _Wrong(0, None, where, None, got, "held by one request at most", "shared_block_written")

    def _check_rows(self, ids: list[str], scheduled: dict[str, Known], line: Line) -> None:
        for row, req_id in enumerate(ids):
            if req_id not in scheduled:
                raise _Wrong(1, row, "req_ids", row, req_id, "a scheduled request", "stale_row")
        if len(ids) != len(scheduled) or len(set(ids)) != len(ids):
            missing = [r for r in scheduled if r not in ids]
            raise _Wrong(1, None, "req_ids", None, ids, f"{missing or 'each request'} once", "missing_row")
        if not scheduled:
            return
        known_ids = self._expected.requests
        self._index_of = {r: i for r, i in self._index_of.items() if r in known_ids and known_ids[r].blocks}
        resumed = {*line["plan"]["cached"]["resumed_req_ids"], *(d["req_id"] for d in line["plan"]["new"])}
        taken = {i: r for r, i in self._index_of.items() if r not in resumed}
        indices, limit = line["request_indices"], self._geometry.max_num_reqs
        for row, req_id in enumerate(ids):
            index = indices[row]
            holder = taken.get(index)
            if holder not in (None, req_id) or (req_id not in resumed and self._index_of.get(req_id, index) != index):
                expected = self._index_of.get(req_id, "an index of its own") if req_id not in resumed else "a free one"
                raise _Wrong(2, row, "request_indices", row, index, expected, "row_not_moved")
            taken[index] = req_id
            self._index_of[req_id] = index
        _padding("request_indices", 2, indices, len(ids), limit, "stale_padding")

    def _check_columns(self, line: Line, rows: list[Known]) -> None:
        wanted = {
            "prompt": [k.num_prompt for k in rows],  # first: the others are counted from it
            "known": [len(k.tokens) for k in rows],
            "computed": [k.computed for k in rows],
            "drafts": [len(k.drafts) for k in rows],
        }
        for name, expected in wanted.items():
            got = line[name]
            if got[: len(rows)] != expected:
                row = _first_difference(got, expected)
                symptom = self._of_another(row, got[row], expected)
                before = self._last_columns.get(name, [])
                if row < len(before) and self._last_rows[row] != rows[row].req_id and got[row] == before[row]:
                    symptom = "row_not_moved"  # it is what the row's last request had
                raise _Wrong(2, row, name, row, got[row], expected[row], symptom)
            _padding(name, 2, got, len(rows), 0, "stale_padding")
        self._last_rows, self._last_columns = line["req_ids"], wanted

    def _of_another(self, row: int, got: Any, expected: list[Any]) -> str:
        """Is a wrong value that of another request of the step?"""
        return "row_not_moved" if got in expected[:row] + expected[row + 1 :] else "wrong_count"

    def _check_stream(self, line: Line, rows: list[Known]) -> None:
        counts, total = [k.scheduled for k in rows], sum(k.scheduled for k in rows)
        if line["num_tokens"] != total:
            raise _Wrong(3, None, "num_tokens", None, line["num_tokens"], total, "wrong_count")
        starts, at = [0], 0
        for count in counts:
            at += count
            starts.append(at)
        got = line["query_start_loc"]
        if got[: len(starts)] != starts:
            row = max(_first_difference(got, starts) - 1, 0)
            lengths = [b - a for a, b in zip(got, got[1 : len(starts)], strict=False)]
            moved = sorted(lengths) == sorted(counts)
            cell = _first_difference(got, starts)
            raise _Wrong(4, row, "query_start_loc", cell, got[cell], starts[cell],
                         "built_before_condense" if moved else "wrong_count")  # fmt: skip
        _padding("query_start_loc", 4, got, len(starts), total, "stale_padding")

        req_indices = [row for row, count in enumerate(counts) for _ in range(count)]
        self._check_tokens(line, rows, starts, "req_indices", req_indices, "built_before_condense", 5)
        positions = [p for k in rows for p in range(k.computed, k.seq_len)]
        self._check_tokens(line, rows, starts, "positions", positions, "wrong_position", 5)
        tokens: list[int] = []
        for row, k in enumerate(rows):
            history = k.tokens[k.computed : k.seq_len - len(k.drafts)] + k.drafts
            if line["use_device"][row]:  # only the device knows it
                cell = starts[row + 1] - 1 - len(k.drafts)
                history[cell - starts[row] :] = line["token_ids"][cell : cell + 1] + k.drafts
            tokens += history
        self._check_tokens(line, rows, starts, "token_ids", tokens, "stale_tokens", 5)
        _padding("req_indices", 5, line["req_indices"], total, len(line["request_indices"]), "stale_padding")
        for name in ("positions", "token_ids"):
            _padding(name, 5, line[name], total, 0, "stale_padding")

    def _check_tokens(
        self, line: Line, rows: list[Known], starts: list[int], name: str, expected: list[int], symptom: str, rule: int
    ) -> None:
        got = line[name]
        if got[: len(expected)] == expected:
            return
        cell = _first_difference(got, expected)
        row = next(r for r in range(len(rows)) if cell < starts[r + 1])
        if name == "token_ids":
            own = got[starts[row] : starts[row + 1]]
            others = (o.tokens[rows[row].computed : rows[row].seq_len] for o in self._expected.requests.values()
                      if o is not rows[row])  # fmt: skip
            symptom = "row_not_moved" if own in others else symptom
        raise _Wrong(rule, row, name, cell, got[cell] if cell < len(got) else None, expected[cell], symptom)

    def _check_lengths(self, line: Line, rows: list[Known]) -> None:
        expected, got = [k.seq_len for k in rows], line["seq_lens"]
        if got[: len(rows)] != expected:
            row = _first_difference(got, expected)
            symptom = (
                "row_not_moved" if self._of_another(row, got[row], expected) == "row_not_moved" else "wrong_seq_len"
            )
            raise _Wrong(6, row, "seq_lens", row, got[row], expected[row], symptom)
        _padding("seq_lens", 6, got, len(rows), 0, "stale_padding")

    def _check_blocks(self, line: Line, rows: list[Known]) -> None:
        total = line["num_tokens"]
        for group, size in enumerate(self._geometry.block_sizes):
            lengths, listed = line["block_row_lengths"][group], line["block_rows"][group]
            slots, where = line["slot_mapping"][group], f", cache group {group}"
            wanted: list[int] = []
            for row, k in enumerate(rows):
                blocks = k.blocks[group]
                used = -(-k.seq_len // size)
                if lengths[row] != used or listed[row] != blocks[: min(used, MOST_BLOCKS)]:
                    symptom = self._table_symptom(k, group, listed[row], lengths[row], used)
                    raise _Wrong(7, row, f"block_rows{where}", None, listed[row], blocks[:used], symptom)
                wanted += [blocks[p // size] * size + p % size for p in range(k.computed, k.seq_len)]
            if slots[:total] != wanted:
                cell = _first_difference(slots, wanted)
                row = line["req_indices"][cell]
                raise _Wrong(7, row, f"slot_mapping{where}", cell, slots[cell], wanted[cell], "wrong_slot")
            _padding(f"slot_mapping{where}", 7, slots, total, PAD_SLOT, "padding_slot")
            _padding(f"block_row_lengths{where}", 7, lengths, len(rows), 0, "stale_padding")
        for row, k in enumerate(rows):
            for group, block, position in self._expected.written_blocks(k):
                if block == 0 or self._expected.holders(group, block) > 1:
                    held = [
                        r for r in self._expected.holding(group, block) if r != k.req_id
                    ] or "nobody: the null block"
                    what = f"block {block} written from position {position} on, cache group {group}"
                    alone = f"held by {k.req_id!r} alone"
                    raise _Wrong(0, row, what, None, f"held by {held}", alone, "shared_block_written")

    def _table_symptom(self, k: Known, group: int, got: list[int], length: int, used: int) -> str:
        right = k.blocks[group][:used]
        lost = k.lost_blocks[group] if k.lost_blocks else []
        if length > used and got[: len(right)] == right:
            return "stale_table_tail"
        if lost and got == (lost + right)[: len(got)]:
            return "append_on_resume"
        if any(o is not k and o.blocks and o.blocks[group][: len(got)] == got and got
               for o in self._expected.requests.values()):  # fmt: skip
            return "row_not_moved"
        return "blocks_not_taken"

    def _check_logits(self, line: Line, rows: list[Known]) -> None:
        starts = line["query_start_loc"]
        expected: list[int] = []
        for row, k in enumerate(rows):
            end = starts[row + 1]
            expected += range(end - 1 - len(k.drafts), end)
        got = line["logits_indices"]
        if line["num_logits"] != len(expected):
            raise _Wrong(8, None, "num_logits", None, line["num_logits"], len(expected), "wrong_logits_rows")
        if got[: len(expected)] != expected:
            cell = _first_difference(got, expected)
            shifts = {g - e for g, e in zip(got, expected, strict=False)}
            row = next(r for r in range(len(rows)) if expected[cell] < starts[r + 1])
            beside = bool(shifts & {1, -1}) and shifts <= {1, 0, -1}  # the ends may have been clipped
            raise _Wrong(8, row, "logits_indices", cell, got[cell], expected[cell],
                         "logits_off_by_one" if beside else "wrong_logits_rows")  # fmt: skip
        discard = [k.seq_len < len(k.tokens) for k in rows]
        if line["discard"][: len(rows)] != discard:
            row = _first_difference(line["discard"], discard)
            by_length = [k.scheduled > 1 + len(k.drafts) for k in rows]
            symptom = "discard_by_length" if line["discard"][: len(rows)] == by_length else "wrong_discard"
            raise _Wrong(8, row, "discard", row, line["discard"][row], discard[row], symptom)

    def _take_sampled(self, line: Line, rows: list[Known]) -> None:
        if len(line["sampled"]) != len(rows):
            got, expected = len(line["sampled"]), f"{len(rows)}, one a row"
            raise _Wrong(8, None, "number of sampled lists", None, got, expected, "discarded_sample_kept")
        for row, (k, tokens) in enumerate(zip(rows, line["sampled"], strict=False)):
            most = 0 if line["discard"][row] else 1 + len(k.drafts)
            if len(tokens) > most or (most and not tokens):
                wanted = "nothing" if not most else f"1 to {most} tokens"
                raise _Wrong(8, row, "sampled", row, tokens, wanted, "discarded_sample_kept")
            k.tokens += tokens


def _first_difference(got: list[Any], expected: list[Any]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected))
    )


def _padding(name: str, rule: int, values: list[Any], used: int, fill: Any, symptom: str) -> None:
    tail = values[used:]
    if tail.count(fill) != len(tail):
        cell = used + next(i for i, v in enumerate(tail) if v != fill)
        raise _Wrong(rule, None, f"{name} (padding)", cell, values[cell], fill, symptom)
