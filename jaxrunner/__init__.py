"""The execution layer of an LLM serving engine, for JAX.

The public names, and nothing else. Each is imported when it is first asked for, so that the host half
(``InputBatch``, ``update_states``, ``prepare_inputs``, the protocol) works without importing JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrunner.async_llm import AsyncLLM
    from jaxrunner.batch import (
        CachedRequestState,
        InputBatch,
        SchedulerOutputError,
        StepInputs,
        prepare_inputs,
        record_sampled,
        update_states,
    )
    from jaxrunner.config import RunnerConfig
    from jaxrunner.embedding import EmbeddingRequestOutput, ScoringRequestOutput
    from jaxrunner.engine import Engine, EngineDeadError, EngineStats, StepResult
    from jaxrunner.invariants import check_invariants
    from jaxrunner.llm import LLM
    from jaxrunner.llm_config import LLMConfig
    from jaxrunner.loading import LoadedModel, load_model
    from jaxrunner.logits_processors import LogitsProcessor
    from jaxrunner.logprobs import FlatLogprobs, Logprob
    from jaxrunner.outputs import CompletionOutput, RequestMetrics, RequestOutput, SequenceDelta
    from jaxrunner.pooling import PoolingParams
    from jaxrunner.protocol import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
    from jaxrunner.repetition import RepetitionDetectionParams
    from jaxrunner.runner import ModelRunner, Pending
    from jaxrunner.sampling_params import RequestOutputKind, SamplingParams
    from jaxrunner.structured_outputs import StructuredOutputsParams

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "LLMConfig": "llm_config",
    "LoadedModel": "loading",
    "load_model": "loading",
    "SamplingParams": "sampling_params",
    "RequestOutputKind": "sampling_params",
    "RepetitionDetectionParams": "repetition",
    "StructuredOutputsParams": "structured_outputs",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "RequestMetrics": "outputs",
    "SequenceDelta": "outputs",
    "FlatLogprobs": "logprobs",
    "Logprob": "logprobs",
    "LogitsProcessor": "logits_processors",
    "PoolingParams": "pooling",
    "EmbeddingRequestOutput": "embedding",
    "ScoringRequestOutput": "embedding",
    "Engine": "engine",
    "EngineDeadError": "engine",
    "StepResult": "engine",
    "EngineStats": "engine",
    "ModelRunner": "runner",
    "Pending": "runner",
    "RunnerConfig": "config",
    "SchedulerOutput": "protocol",
    "NewRequestData": "protocol",
    "CachedRequestData": "protocol",
    "ModelRunnerOutput": "protocol",
    "InputBatch": "batch",
    "CachedRequestState": "batch",
    "StepInputs": "batch",
    "SchedulerOutputError": "batch",
    "update_states": "batch",
    "prepare_inputs": "batch",
    "record_sampled": "batch",
    "check_invariants": "invariants",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CachedRequestData",
    "CachedRequestState",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineDeadError",
    "EngineStats",
    "FlatLogprobs",
    "InputBatch",
    "LLMConfig",
    "LoadedModel",
    "LogitsProcessor",
    "Logprob",
    "ModelRunner",
    "ModelRunnerOutput",
    "NewRequestData",
    "Pending",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RunnerConfig",
    "SamplingParams",
    "SchedulerOutput",
    "ScoringRequestOutput",
    "SchedulerOutputError",
    "SequenceDelta",
    "StepInputs",
    "StepResult",
    "StructuredOutputsParams",
    "check_invariants",
    "load_model",
    "prepare_inputs",
    "record_sampled",
    "update_states",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
