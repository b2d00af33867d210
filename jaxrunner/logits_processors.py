"""A protocol for logits processors of your own, and the host's part in running them.

A processor is two pure JAX functions over the rows of a step, compiled into the head like every other feature, and a
declaration of what it keeps of each request. State is by request index on the device: rows may move, requests may be
preempted, and nothing has to be told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxrunner.batch import InputBatch, StepInputs
from jaxrunner.sampling_columns import FIRST_CUSTOM
from jaxrunner.sampling_params import SamplingParams

State = Mapping[str, Any]
CustomEntry = tuple[int, int, dict[str, np.ndarray]]  # processor, request index, its columns


class LogitsProcessor(ABC):
    """Changes logits after penalties and before the temperature. Give instances to ``LLM(logits_processors=[...])``.

    Attributes:
        extra_args: the keys of ``SamplingParams.extra_args`` that it reads; keys that nobody reads are refused.
        columns: a request's part of each state array, by name: zeros of its shape and dtype (int32 or float32).
    """

    extra_args: tuple[str, ...] = ()
    columns: Mapping[str, np.ndarray] = {}

    @abstractmethod
    def enter(
        self, params: SamplingParams, prompt: Int32[np.ndarray, "p"], output: Int32[np.ndarray, "o"]
    ) -> State | None:
        """On the host, when a request enters, or comes back from preemption (then with the output it has). Called
        once more before a request is queued (with no output), so that parameters it can't use are refused then.

        Returns:
            Its state, a value for each column; None if the request does not use this processor.
        """

    @abstractmethod
    def apply(self, logits: Float32[Array, "S V"], state: State, position: Int32[Array, "S"]) -> Float32[Array, "S V"]:
        """In JAX: new logits. ``state`` has the columns [S, ...]; rows of other requests are left as they were."""

    def update(self, state: State, token: Int32[Array, "S"], position: Int32[Array, "S"]) -> State:
        """In JAX: the state after ``token`` was sampled at ``position``."""
        return state


def init_custom(processors: Sequence[LogitsProcessor], max_num_reqs: int) -> tuple[dict[str, jax.Array], ...]:
    """State of no request; ``used`` says whose state counts."""
    columns = ({"used": np.zeros((), np.int32), **p.columns} for p in processors)
    return tuple(
        {name: jax.numpy.zeros((max_num_reqs + 1, *c.shape), c.dtype) for name, c in each.items()} for each in columns
    )


def entered_columns(
    processor: LogitsProcessor,
    params: SamplingParams,
    prompt: Int32[np.ndarray, "p"],
    output: Int32[np.ndarray, "o"],
) -> dict[str, np.ndarray] | None:
    """What ``processor.enter`` gives, of the declared shapes and dtypes.

    Raises:
        ValueError: it raised anything, or gave something else than it declares.
    """
    name = type(processor).__name__
    try:
        values = processor.enter(params, prompt, output)
        if values is None:
            return None
        row = {key: np.asarray(values[key], column.dtype) for key, column in processor.columns.items()}
    except Exception as error:
        raise ValueError(f"{name}.enter failed: {type(error).__name__}: {error}") from error
    for key, value in row.items():
        if value.shape != (shape := processor.columns[key].shape):
            raise ValueError(f"{name}.enter gave {key} as {list(value.shape)}, declared is {list(shape)}")
    return row


class CustomStates:
    """Which requests use which processors, and what has to be uploaded for those that enter."""

    def __init__(self, processors: Sequence[LogitsProcessor], max_num_reqs: int) -> None:
        self._processors = tuple(processors)
        self._used = np.zeros((len(self._processors), max_num_reqs), bool)

    @property
    def extra_args(self) -> frozenset[str]:
        """The keys that some processor reads."""
        return frozenset(key for p in self._processors for key in p.extra_args)

    def enter(self, batch: InputBatch, inputs: StepInputs) -> list[CustomEntry]:
        """What has to be uploaded for the requests that enter with this step; the step's own upload gets the flags of
        the processors that its rows use.
        """
        if not self._processors:
            return []
        entries = list(self._entries(batch, inputs.entered))
        inputs["flags"][0] |= self._flags(batch)
        return entries

    def _entries(self, batch: InputBatch, entered: Sequence[int]) -> Iterator[CustomEntry]:
        for k, processor in enumerate(self._processors):
            for index in entered:
                state = batch.requests[batch.req_ids[batch.row_of_index[index]]]
                tokens, n = batch.token_ids_of(state.req_id), state.num_prompt_tokens
                columns = entered_columns(processor, state.sampling_params, tokens[:n], tokens[n:])
                was, self._used[k, index] = self._used[k, index], columns is not None
                if columns is not None or was:
                    yield (
                        k,
                        index,
                        {"used": np.asarray(columns is not None, np.int32), **(columns or processor.columns)},
                    )

    def _flags(self, batch: InputBatch) -> int:
        """Bits of the processors that some row uses."""
        used = self._used[:, batch.row_indices].any(axis=1)
        return sum(FIRST_CUSTOM << k for k, any_row in enumerate(used) if any_row)
