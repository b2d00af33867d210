"""Embeddings: hidden states of a prompt, of its last token or the mean over all, out of the steps that compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int32

from jaxrunner.batch import InputBatch, StepInputs
from jaxrunner.protocol import SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt becomes one vector.

    Attributes:
        pooling: "last": the hidden state of the last token, after the final norm; "mean": the mean over all tokens.
        normalize: divide by the Euclidean norm.
        dimensions: keep the first so many, before normalizing (for models trained for it); None: all.

    Raises:
        ValueError: another value.
    """

    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in ("last", "mean"):
            raise ValueError(f"pooling must be 'last' or 'mean', got {self.pooling!r}")
        if not isinstance(self.normalize, bool):
            raise ValueError(f"normalize must be True or False, got {self.normalize!r}")
        if self.dimensions is not None and (not isinstance(self.dimensions, int) or self.dimensions < 1):
            raise ValueError(f"dimensions must be an integer of at least 1 or None, got {self.dimensions!r}")

    def finish(self, vector: Float32[np.ndarray, "E"]) -> Float32[np.ndarray, "D"]:
        """The embedding of a pooled hidden state."""
        vector = vector[: self.dimensions]
        return vector / max(float(np.linalg.norm(vector)), 1e-12) if self.normalize else vector


def check_pooling_params(params: PoolingParams, hidden_size: int) -> None:
    """Raises ValueError for what isn't PoolingParams, or wants more dimensions than a model has."""
    if not isinstance(params, PoolingParams):
        raise ValueError(f"pooling_params must be PoolingParams, got a {type(params).__name__}")
    if params.dimensions is not None and params.dimensions > hidden_size:
        raise ValueError(f"dimensions is {params.dimensions}, hidden states have {hidden_size}")


@dataclass(frozen=True, slots=True)
class PooledRows:
    """A step's rows of prompts that are pooled.

    Attributes:
        starts: query_start_loc, over max_num_reqs rows.
        rows: (row, request, tokens computed before, tokens of this step).
    """

    starts: Int32[np.ndarray, "R+1"]
    rows: list[tuple[int, str, int, int]]


class Pooling:
    """The requests that are pooled, and the sums of those whose prompts come in chunks."""

    def __init__(self) -> None:
        self._params: dict[str, PoolingParams] = {}
        self._sums: dict[str, Float32[np.ndarray, "E"]] = {}

    def check(self, scheduler_output: SchedulerOutput, hidden_size: int) -> None:
        """Raises ValueError for a request that can't be pooled."""
        for data in scheduler_output.scheduled_new_reqs:
            params = data.pooling_params
            if params is None:
                continue
            name = f"request {data.req_id!r}"
            try:
                check_pooling_params(params, hidden_size)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            if params.pooling == "mean" and data.num_computed_tokens:
                raise ValueError(
                    f"{name} wants the mean over its tokens and starts with {data.num_computed_tokens} computed: leave"
                    " it out of prefix caching"
                )

    def note(self, scheduler_output: SchedulerOutput) -> None:
        """Requests that begin or end with this step."""
        for req_id in scheduler_output.finished_req_ids:
            self._params.pop(req_id, None)
            self._sums.pop(req_id, None)
        for data in scheduler_output.scheduled_new_reqs:
            if data.pooling_params is not None:
                self._params[data.req_id] = data.pooling_params

    def rows_of(self, batch: InputBatch, inputs: StepInputs) -> PooledRows | None:
        """The step's rows that are pooled; None if there are none."""
        if not self._params:
            return None
        rows = [
            (row, req_id, int(batch.num_computed[row]), int(batch.num_scheduled[row]))
            for row, req_id in enumerate(inputs.req_ids)
            if req_id in self._params
        ]
        if not rows:
            return None
        starts = np.full(batch.max_num_reqs + 1, inputs.num_tokens, np.int32)
        starts[: inputs.num_reqs + 1] = inputs.query_start_loc[: inputs.num_reqs + 1]
        return PooledRows(starts, rows)

    def take(
        self, batch: InputBatch, pooled: PooledRows, values: Float32[np.ndarray, "R 2 E"]
    ) -> list[Float32[np.ndarray, "D"] | None]:
        """The embedding of each row whose prompt is complete, None for the others.

        Args:
            values: per row the sum of the step's hidden states, and the last of them.
        """
        out: list[Float32[np.ndarray, "D"] | None] = [None] * batch.num_reqs
        for row, req_id, computed, count in pooled.rows:
            params, length = self._params[req_id], batch.requests[req_id].num_prompt_tokens
            total = values[row, 0] + (self._sums[req_id] if computed and req_id in self._sums else 0)
            self._sums[req_id] = total
            if computed + count >= length:
                out[row] = params.finish(values[row, 1] if params.pooling == "last" else total / length)
                del self._sums[req_id], self._params[req_id]
        return out
