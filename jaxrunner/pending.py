"""A step between the device and the host: what it will bring, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax

from jaxrunner.batch import StepInputs
from jaxrunner.pooling import PooledRows
from jaxrunner.prompt_logprobs import PromptRows
from jaxrunner.protocol import ModelRunnerOutput
from jaxrunner.trace.encode import StepRecord

if TYPE_CHECKING:
    from jaxrunner.runner import ModelRunner


@dataclass(slots=True)
class SegmentTimes:
    """Where the time of the steps so far went, in seconds; and how many there were, with how many tokens."""

    steps: int = 0
    tokens: int = 0
    padded_tokens: int = 0  # tokens of their buckets
    update: float = 0.0  # merging differences, checks
    prepare: float = 0.0  # packing the upload
    dispatch: float = 0.0  # uploads and calls of the executables
    wait: float = 0.0  # until the sampled tokens are on the host
    record: float = 0.0  # bookkeeping

    def add(self, seconds: dict[str, float]) -> None:
        """What the segments of one step took."""
        for name, value in seconds.items():
            setattr(self, name, getattr(self, name) + value)

    def seconds(self) -> dict[str, float]:
        """The segments alone."""
        return {name: value for name, value in self.as_dict().items() if isinstance(value, float)}

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class DeviceOutputs:
    """What a step leaves on the device for the host. All but the tokens only where somebody asked for it.

    Attributes:
        sampled: a token a row.
        logits, logprobs: of the rows.
        given_logprobs: of the rows, for the tokens that their requests named.
        prompt_logprobs: chunk by chunk.
        pooled: rows, and their hidden states' sums and last ones.
    """

    sampled: jax.Array
    logits: jax.Array | None = None
    logprobs: jax.Array | None = None
    given_logprobs: jax.Array | None = None
    prompt_logprobs: list[tuple[PromptRows, jax.Array]] = field(default_factory=list)
    pooled: tuple[PooledRows, jax.Array] | None = None


@dataclass(slots=True)
class Pending:
    """A step that has been handed to the device. ``result`` waits for it and must be called before the next step."""

    _runner: ModelRunner
    _inputs: StepInputs | None
    _outputs: DeviceOutputs | None
    _record: StepRecord | None = None
    _result: ModelRunnerOutput | None = field(default=None)

    def result(self) -> ModelRunnerOutput:
        """The step's tokens, on the host. A second call returns the same."""
        if self._result is None:
            self._result = self._runner._finish(self)
        return self._result
