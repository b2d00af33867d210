"""Running a recorded trace again, and comparing every array with what was recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxrunner.batch import NOT_SAMPLED, prepare_inputs, record_sampled, update_states
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.sampling_columns import FIRST_CUSTOM
from jaxrunner.shapes import ExecutionMode, StepShape, StepShapes
from jaxrunner.trace.encode import Encoder, Geometry, StepRecord
from jaxrunner.trace.format import ARRAYS
from jaxrunner.trace.plan_json import plan_from_json
from jaxrunner.trace.reader import Line


@dataclass(frozen=True)
class Difference:
    """The first cell at which two steps differ."""

    step: int
    field: str
    cell: str
    recorded: Any
    again: Any
    req_id: str | None = None

    def __str__(self) -> str:
        whose = "" if self.req_id is None else f" (request {self.req_id!r})"
        return f"step {self.step}: {self.field}{self.cell}{whose} was {self.recorded!r}, is now {self.again!r}"


class Stepper(Protocol):
    """Runs one plan and gives the line that a trace would have of it."""

    def run(self, plan: SchedulerOutput, recorded: Line) -> Line: ...

    def reset(self) -> None: ...


def replay(lines: Iterable[Line], stepper: Stepper) -> tuple[int, Difference | None]:
    """Runs the recorded plans in order; (steps run, first difference or None). Stops at a difference.

    Raises:
        ValueError: a plan that a trace cannot hold whole, see ``plan_from_json``.
    """
    steps = 0
    for recorded in lines:
        if "event" in recorded:
            if recorded["event"] == "reset":
                stepper.reset()
            continue  # a step that failed is left out: it was refused, or a reset comes next
        again = stepper.run(plan_from_json(recorded["plan"]), recorded)
        steps += 1
        if (difference := compare_lines(recorded, again)) is not None:
            return steps, difference
    return steps, None


def compare_lines(recorded: Line, again: Line) -> Difference | None:
    """The first array, in the order in which a step's data flows, and its first cell that differ."""
    for field in ARRAYS:
        a, b = recorded.get(field), again.get(field)
        if a != b:
            cell, x, y = first_cell(a, b)
            return Difference(recorded["step"], field, cell, x, y)
    return None


def first_cell(a: Any, b: Any) -> tuple[str, Any, Any]:
    """Where two nested lists or dicts differ first: (its subscript, what is there in a, and in b)."""
    if isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                cell, x, y = first_cell(x, y)
                return f"[{i}]{cell}", x, y
        if len(a) != len(b):
            i = min(len(a), len(b))
            return f"[{i}]", a[i] if i < len(a) else "nothing", b[i] if i < len(b) else "nothing"
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            if a.get(key) != b.get(key):
                cell, x, y = first_cell(a.get(key), b.get(key))
                return f"[{key!r}]{cell}", x, y
    return "", a, b


class HostStepper:
    """The batch alone, without a model: what was sampled is taken from the trace."""

    def __init__(self, geometry: Geometry, logits_buckets: tuple[int, ...] | None = None) -> None:
        self._geometry, self._logits = geometry, logits_buckets
        self.reset()

    def reset(self) -> None:
        self._batch, self._encoder = self._geometry.new_batch(), Encoder(self._geometry)

    def run(self, plan: SchedulerOutput, recorded: Line) -> Line:
        g = self._geometry
        update_states(self._batch, plan)
        record = StepRecord(plan)
        if self._batch.num_reqs:
            bucket = recorded["bucket"]
            mode = ExecutionMode[recorded["mode"]]
            shape = StepShape(bucket["tokens"], bucket["requests"], bucket["logits_rows"], mode, bucket["uniform"])
            inputs = prepare_inputs(self._batch, plan, _shapes_of(g, shape), shape=shape)
            # Logits processors are no part of a trace, so which of them a step used is taken from it as well.
            inputs["flags"][0] |= recorded["flags"] & -FIRST_CUSTOM
            record.buffer, record.layout, record.shape = inputs.buffer.tobytes(), inputs.layout, inputs.shape
            record.req_ids, record.overflow = inputs.req_ids, inputs.overflow
            sampled = recorded["sampled"]
            width = max(map(len, sampled), default=0) or 1
            tokens = [[*row, *[NOT_SAMPLED] * (width - len(row))] for row in sampled]
            line = self._encoder.line(record)
            line["sampled"] = record_sampled(self._batch, np.array(tokens, np.int32))
        else:
            line = self._encoder.line(record)
        line["step"] = recorded["step"]
        return line


def _shapes_of(g: Geometry, shape: StepShape) -> StepShapes:
    """Shapes with just this token bucket: a trace says which bucket a step had, whatever ladder it was taken from."""
    return StepShapes(
        max_num_batched_tokens=g.max_num_batched_tokens,
        max_num_reqs=g.max_num_reqs,
        num_speculative_tokens=g.num_speculative_tokens,
        num_groups=len(g.block_sizes),
        min_block_size=min(g.block_sizes),
        token_buckets=(shape.num_tokens,),
        logits_buckets=(shape.num_logits,),
    )
