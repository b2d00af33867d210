"""What a step left on the device, read into what a scheduler gets back."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32

from jaxrunner.batch import InputBatch, StepInputs
from jaxrunner.batch.record_sampled import SampledTokens
from jaxrunner.logprobs_lists import LogprobsLists
from jaxrunner.pending import DeviceOutputs
from jaxrunner.pooling import Pooling
from jaxrunner.prompt_logprobs import PromptLogprobs
from jaxrunner.protocol import ModelRunnerOutput


def runner_output(
    batch: InputBatch,
    inputs: StepInputs,
    outputs: DeviceOutputs,
    sampled: Int32[np.ndarray, "R"],
    committed: SampledTokens,
    tokens: list[list[int]],
    prompt_logprobs: PromptLogprobs,
    pooling: Pooling,
) -> ModelRunnerOutput:
    """The step's output; fields that nobody asked for stay empty.

    Args:
        sampled: a token a row, also where none is committed.
        committed, tokens: those that became part of their requests, as arrays and as lists.
        prompt_logprobs, pooling: the requests that wait for these; those that are complete wait no more.
    """
    result = ModelRunnerOutput(
        req_ids=inputs.req_ids.copy(),
        req_id_to_index=inputs.names.req_id_to_index.copy(),
        sampled_token_ids=tokens,
        flat_token_ids=committed.token_ids,
        token_offsets=committed.offsets,
    )
    if outputs.logprobs is not None:
        given = None if outputs.given_logprobs is None else np.asarray(outputs.given_logprobs)[: inputs.num_reqs]
        result.logprobs = LogprobsLists(np.asarray(outputs.logprobs)[: inputs.num_reqs], given)
    if outputs.logits is not None:
        result.logits = np.asarray(outputs.logits)[: inputs.num_logits]
    if outputs.prompt_logprobs:
        answers = [(chunk, np.asarray(words)) for chunk, words in outputs.prompt_logprobs]
        result.prompt_logprobs_dict = prompt_logprobs.take(batch, answers)
    if outputs.pooled is not None:
        pooled, values = outputs.pooled
        result.pooler_output = pooling.take(batch, pooled, np.asarray(values))
    return result
