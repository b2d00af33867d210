"""Public arrival traces: when requests came, how long their prompts and answers were. No texts.

Taken as they are published: Azure's LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT
(CSV: Timestamp, Model, Request tokens, Response tokens, ...) and Mooncake's (JSON lines: timestamp in milliseconds,
input_length, output_length).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# How each format names (time, prompt tokens, output tokens).
_COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "mooncake": ("timestamp", "input_length", "output_length"),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds since the trace's first, tokens of its prompt (at least 1) and its output (at least 1)."""

    time: float
    num_prompt_tokens: int
    num_output_tokens: int


def read_arrival_trace(path: str | Path, limit: int | None = None) -> list[Arrival]:
    """The requests of a trace in the order of their arrival; the format is told by the column names.

    Requests without prompt or output tokens (failed ones, in BurstGPT) are left out.

    Args:
        limit: read so many requests at most.

    Raises:
        ValueError: another format, or a row that is none; the message names its line.
        OSError: the file cannot be read.
    """
    path = Path(path)
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows: Iterable[Mapping[str, Any]]
        if path.suffix in (".jsonl", ".json"):
            rows = (_parse(path, number, line) for number, line in enumerate(file, 1) if line.strip())
        else:
            rows = csv.DictReader(file)
        arrivals: list[Arrival] = []
        columns: tuple[str, str, str] | None = None
        for number, row in enumerate(rows, 1):
            if columns is None:
                columns = _format_of(path, row)
            try:
                when, prompt, output = (row[name] for name in columns)
                arrival = Arrival(_seconds(when, columns), int(prompt), int(output))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, request {number}: {dict(row)!r:.120} is no arrival: {error!r}") from None
            if arrival.num_prompt_tokens > 0 and arrival.num_output_tokens > 0:
                arrivals.append(arrival)
            if limit is not None and len(arrivals) >= limit:
                break
    if not arrivals:
        raise ValueError(f"{path} holds no request with prompt and output tokens")
    arrivals.sort(key=lambda a: a.time)
    start = arrivals[0].time
    return [Arrival(a.time - start, a.num_prompt_tokens, a.num_output_tokens) for a in arrivals]


def _parse(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number} must be a JSON object, got {line[:60]!r}")
    return row


def _format_of(path: Path, row: Mapping[str, Any]) -> tuple[str, str, str]:
    for columns in _COLUMNS.values():
        if row.keys() >= set(columns):
            return columns
    known = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in _COLUMNS.items())
    raise ValueError(f"{path} has the columns {list(row)}; known are {known}")


def _seconds(when: Any, columns: tuple[str, str, str]) -> float:
    if columns == _COLUMNS["mooncake"]:
        return float(when) / 1000
    if columns == _COLUMNS["burstgpt"]:
        return float(when)
    time = datetime.fromisoformat(str(when))  # the traces of 2024 say +00:00, those of 2023 nothing
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
