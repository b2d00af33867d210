"""A model's step under a configuration: the attention that takes it, the shapes that this allows, the functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax

from jaxrunner.config import RunnerConfig
from jaxrunner.logits_processors import LogitsProcessor
from jaxrunner.logprobs_lists import ALL
from jaxrunner.shapes import StepShapes, Support, supported_policy
from jaxrunner.step import CacheGroup, StepFunctions
from models import Decoder, split
from pallas_kernels import GroupSpec, choose_attention


class ModelStep(NamedTuple):
    """``attention_choice`` says why which attention implementation was taken, a line each."""

    functions: StepFunctions
    params: tuple[jax.Array, ...]
    shapes: StepShapes
    attention_choice: list[str]


def model_step(model: Decoder, config: RunnerConfig, logits_processors: Sequence[LogitsProcessor]) -> ModelStep:
    """Raises ValueError if no attention implementation takes the model, or it was made for shorter texts."""
    if config.max_model_len > model.config.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, the model was made for"
            f" {model.config.max_position_embeddings} tokens: lower it"
        )
    graphdef, params = split(model)
    layers, vocab_size = model.config.attention_layers(), model.config.vocab_size
    implementation, refusals = choose_attention(
        layers, config.block_size, model.dtype, jax.default_backend(), requested=config.attention
    )
    choice = [*(f"passed over {r}" for r in refusals), f"took {implementation.name}"]
    shapes = config.shapes()
    policy = supported_policy(shapes.policy, Support[implementation.support.name], shapes.query_len)
    shapes = replace(shapes, policy=policy)
    group = CacheGroup(GroupSpec(config.block_size, layers), implementation)
    num_logprobs = vocab_size if config.max_logprobs == ALL else min(config.max_logprobs, vocab_size)
    functions = StepFunctions(
        graphdef, (group,), config.max_num_reqs, shapes.max_logits, num_logprobs, tuple(logits_processors)
    )
    return ModelStep(functions, params, shapes, choice)
