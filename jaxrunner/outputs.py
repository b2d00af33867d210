"""What a user gets back. Fields are vLLM's; ``error`` is this project's own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrunner.logprobs import PositionLogprobs
from jaxrunner.pooling import PoolingParams
from jaxrunner.sampling_params import SamplingParams


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of ``time.monotonic``.

    Attributes:
        arrival_time: when it was handed to the engine.
        first_token_time: when its first token (of any of its sequences) was on the host; None before.
        finished_time: when its last sequence ended; None before.
        num_preemptions: how often its sequences lost their blocks and were computed again.
    """

    arrival_time: float = field(default_factory=time.monotonic)
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: which of the request's ``n`` sequences it is.
        text: the generated text; "" with ``detokenize=False``.
        token_ids: every generated token, the stopping one included.
        logprobs: with ``SamplingParams.logprobs`` or ``logprob_token_ids`` a dictionary for each token, by token id,
            made when it is read (``FlatLogprobs``); else None.
        cumulative_logprob: sum of the log probabilities of the tokens; None likewise.
        finish_reason: "stop" (an end-of-sequence token, a stop token or a stop string), "length" (``max_tokens`` or
            the model's length), "repetition" (``repetition_detection``), "abort", "error" (see
            ``RequestOutput.error``); None while it runs.
        stop_reason: the stop string or the id out of ``stop_token_ids`` that ended it, or "repetition_detected"; None
            for an end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its generated sequences.

    Attributes:
        request_id: given by the LLM, in the order in which requests came.
        prompt: the prompt's text; None for a prompt of token ids.
        prompt_token_ids: the prompt as the model saw it.
        prompt_logprobs: with ``SamplingParams.prompt_logprobs`` a dictionary for each token of the prompt, by token
            id, and None for the first; else None. Only [None] while the prompt isn't complete.
        outputs: ``SamplingParams.n`` sequences, by their index.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
        error: why the request was refused (only with ``on_error="return"``), or why its structured output could not go
            on; else None.
        embedding: float32 [D], of a prompt with pooling parameters.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
    embedding: np.ndarray | None = None

    def with_outputs(self, outputs: list[CompletionOutput]) -> RequestOutput:
        """A copy that tells of these sequences instead; a quarter of the time that ``dataclasses.replace`` takes."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            outputs,
            self.finished,
            self.prompt_logprobs,
            self.metrics,
            self.num_cached_tokens,
            self.error,
            self.embedding,
        )

    @classmethod
    def refused(cls, request_id: str, prompt: str | None, prompt_token_ids: list[int], error: str) -> RequestOutput:
        """The answer to a request that never ran."""
        nothing = CompletionOutput(0, "", [], finish_reason="error")
        return cls(request_id, prompt, prompt_token_ids, [nothing], True, error=error)


@dataclass(slots=True)  # not frozen: there is one a row and step, and that would take twice the time to make
class SequenceDelta:
    """What one step added to one sequence, for streaming.

    Attributes:
        index: of the sequence in its request.
        text: new text that nothing later takes back: whole characters, and no part of a stop string. All deltas of a
            sequence joined are its final text.
        token_ids: new tokens. Their text may come with a later delta.
        finish_reason, stop_reason: as in CompletionOutput.
        logprobs: of the new tokens; None if they aren't wanted.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[PositionLogprobs] | None = None


@dataclass(slots=True)
class Prompt:
    """A prompt that has passed the checks of ``InputProcessor`` and can be served.

    Attributes:
        text: as the user gave it, or as the chat template made it; None if it came as ids.
        cache_salt: prefix-cache blocks are shared only between prompts of the same salt.
        pooling_params: how its embedding is made; None: none is wanted.
    """

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    pooling_params: PoolingParams | None = None
