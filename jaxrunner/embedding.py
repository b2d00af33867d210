"""Embeddings and scores: prompts through the engine for their hidden states instead of their continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrunner.input_processor import RefusedPrompt
from jaxrunner.outputs import Prompt, RequestOutput
from jaxrunner.pooling import PoolingParams, check_pooling_params
from jaxrunner.sampling_params import SamplingParams

# A request ends with a token, so the one that nobody looks at is the cheapest there is.
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One prompt's vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding; fields are vLLM's."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How near two texts are to each other, from -1 to 1."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts and its score; ``prompt_token_ids`` are those of both."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool


def with_pooling(
    checked: Sequence[Prompt | RefusedPrompt], params: PoolingParams | None, hidden_size: int
) -> list[Prompt]:
    """The prompts that can be served, as requests for their embedding.

    Raises:
        ValueError: parameters that hidden states of this size can't be pooled with.
    """
    params = PoolingParams() if params is None else params
    check_pooling_params(params, hidden_size)
    return [replace(prompt, pooling_params=params) for prompt in checked if isinstance(prompt, Prompt)]


def embedding_output(output: RequestOutput) -> EmbeddingRequestOutput:
    """What a caller of ``embed`` gets.

    Raises:
        RuntimeError: the request was aborted before its prompt was complete.
    """
    if output.embedding is None:
        raise RuntimeError(f"request {output.request_id!r} was aborted before its embedding was there")
    vector = EmbeddingOutput(output.embedding.tolist())
    return EmbeddingRequestOutput(output.request_id, vector, output.prompt_token_ids, output.finished)


def scores(outputs: Sequence[EmbeddingRequestOutput], num_first: int) -> list[ScoringRequestOutput]:
    """Cosine similarities of the first ``num_first`` outputs (one, or as many as the others) with the others."""
    first, second = outputs[:num_first], outputs[num_first:]
    pairs = [(first[0 if num_first == 1 else i], other) for i, other in enumerate(second)]
    return [
        ScoringRequestOutput(
            b.request_id,
            ScoringOutput(_cosine(a.outputs.embedding, b.outputs.embedding)),
            a.prompt_token_ids + b.prompt_token_ids,
            a.finished and b.finished,
        )
        for a, b in pairs
    ]


def _cosine(a: list[float], b: list[float]) -> float:
    x, y = np.array(a), np.array(b)
    return float(x @ y / max(float(np.linalg.norm(x) * np.linalg.norm(y)), 1e-12))
