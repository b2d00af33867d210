"""Step shapes in a file, a JSON object a line: what a sweep chooses buckets by."""

from __future__ import annotations

import gzip
import json
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Literal, NamedTuple, cast

from jaxrunner.batch import StepInputs


class StepRecord(NamedTuple):
    """What a step asked of its shape, before padding.

    Attributes:
        tokens, requests, logits_rows: in use.
        max_query: scheduled tokens of the request that has most; 1 where all decode.
        max_len: tokens of the longest sequence after the step.
        mode: "FULL", "PIECEWISE" or "NONE".
    """

    tokens: int
    requests: int
    logits_rows: int
    max_query: int
    max_len: int
    mode: str = "FULL"

    def line(self) -> str:
        return json.dumps(self._asdict())


class ShapeRecorder:
    """Writes a line for each step, at once: what a crash leaves behind is whole up to the last step.

    Raises:
        OSError: the file can't be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "w", buffering=1, encoding="utf-8")
        weakref.finalize(self, self._file.close)

    def write(self, inputs: StepInputs) -> None:
        n = inputs.num_reqs
        query_lens, seq_lens = inputs.query_lens[:n], inputs.seq_lens[:n]
        longest = (int(query_lens.max()), int(seq_lens.max()))
        record = StepRecord(inputs.num_tokens, n, inputs.num_logits, *longest, inputs.shape.mode.name)
        self._file.write(record.line() + "\n")


def read_shapes(paths: Iterable[str | Path]) -> list[StepRecord]:
    """The steps of one or several files, one after another; a name that ends in .gz is of a compressed one.

    Raises:
        ValueError: a line that is no step record; names file and line.
        OSError: a file can't be read.
    """
    steps = []
    for path in paths:
        with _open(path) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    steps.append(_record(json.loads(line)))
                except (ValueError, TypeError) as error:
                    fields = ", ".join(StepRecord._fields)
                    raise ValueError(f"{path}:{number}: expected a JSON object with {fields}: {error}") from None
    return steps


def write_shapes(path: str | Path, steps: Iterable[StepRecord]) -> None:
    """A file that ``read_shapes`` reads; compressed where its name ends in .gz."""
    with _open(path, "w") as file:
        file.writelines(step.line() + "\n" for step in steps)


def _open(path: str | Path, mode: Literal["r", "w"] = "r") -> IO[str]:
    if str(path).endswith(".gz"):
        return cast(IO[str], gzip.open(path, f"{mode}t", encoding="utf-8"))
    return open(path, mode, encoding="utf-8")


def _record(facts: dict[str, object]) -> StepRecord:
    record = StepRecord(**facts)  # type: ignore[arg-type]
    counts = record[:-1]
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
        raise ValueError(f"counts must be integers of at least 0, got {counts}")
    if record.tokens < 1:
        raise ValueError("a step has at least one token")
    return record
