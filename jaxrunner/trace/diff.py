"""Comparing two traces by request: another order of the rows, another index or other padding is no difference."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from jaxrunner.trace.reader import Line
from jaxrunner.trace.replay import Difference, first_cell

_BY_ROW = ("scheduled", "computed", "known", "prompt", "drafts", "seq_lens", "discard")
_BY_TOKEN = ("token_ids", "positions")


def diff_traces(a: Iterable[Line], b: Iterable[Line], *, blocks: bool = True) -> Difference | None:
    """The first difference, by request and field, or None.

    Args:
        blocks: physical blocks and slots must be the same too. Two runs may place the same work elsewhere.
    """
    number = 0
    for x, y in zip_longest(a, b):
        if x is None or y is None:
            return Difference(number, "trace", "", *("ends" if line is None else "goes on" for line in (x, y)))
        number = max(x.get("step", number), y.get("step", number))
        if x.get("event") != y.get("event"):
            return Difference(number, "event", "", x.get("event"), y.get("event"))
        if "event" in x:
            continue
        mine, theirs = by_request(x, blocks), by_request(y, blocks)
        if mine.keys() != theirs.keys():
            return Difference(number, "requests of the step", "", sorted(mine), sorted(theirs))
        for req_id, fields in mine.items():
            for field, value in fields.items():
                if value != theirs[req_id][field]:
                    return Difference(number, field, *first_cell(value, theirs[req_id][field]), req_id)
    return None


def by_request(line: Line, blocks: bool = True) -> dict[str, dict[str, Any]]:
    """What a step says of each request, without rows, indices and padding."""
    starts = line.get("query_start_loc", [])
    found = {}
    for row, req_id in enumerate(line["req_ids"]):
        span = slice(starts[row], starts[row + 1])
        fields: dict[str, Any] = {name: line[name][row] for name in _BY_ROW}
        fields |= {name: line[name][span] for name in _BY_TOKEN}
        picks = [at - starts[row] for at in line["logits_indices"][: line["num_logits"]]]
        fields["logits_indices"] = [at for at in picks if 0 <= at < starts[row + 1] - starts[row]]
        if blocks:
            fields["block_rows"] = [rows[row] for rows in line["block_rows"]]
            fields["slot_mapping"] = [slots[span] for slots in line["slot_mapping"]]
        fields["sampled"] = line["sampled"][row] if row < len(line["sampled"]) else None
        found[req_id] = fields
    return found
