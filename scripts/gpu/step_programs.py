"""The programs of a step, as functions and shapes: what a runner of this model would compile, without its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.kv_cache.allocate import abstract_caches
from jaxrunner.request_tables import TableSizes
from jaxrunner.shapes import StepShapes
from jaxrunner.step import CacheGroup, StepFunctions, init_state, unpack
from models import Decoder, ModelConfig, split
from pallas_kernels import AttentionImplementation, GroupSpec

NUM_LOGPROBS = 20  # as a runner has it by default


@dataclass(frozen=True)
class Program:
    """A function to be jitted, with the shapes of its arguments and which of them are donated."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]


@dataclass(frozen=True)
class StepSize:
    """How large a step is.

    Attributes:
        tokens, reqs: its padded tokens and rows; every row has logits.
        blocks, block_size: of the KV cache.
        max_model_len: tokens a request may have; sets the width of the block table.
    """

    tokens: int
    reqs: int
    blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 8192

    @property
    def table_width(self) -> int:
        """Blocks that a row of the block table names."""
        return -(-self.max_model_len // self.block_size)


def with_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The model, with its first layers only."""
    return replace(config, num_layers=layers, layer_windows=config.layer_windows[:layers])


def step_programs(
    config: ModelConfig, implementation: AttentionImplementation, size: StepSize, dtype: str = "bfloat16"
) -> tuple[Program, Program]:
    """(forward over the tokens, head and sampler over the rows), as `ModelRunner` compiles them."""
    model = Decoder(config, dtype=dtype)
    definition, params = split(model)
    layers = config.attention_layers()
    shapes = StepShapes(size.tokens, size.reqs, min_block_size=size.block_size, token_buckets=(size.tokens,))
    group = CacheGroup(GroupSpec(size.block_size, layers), implementation)
    functions = StepFunctions(definition, (group,), size.reqs, shapes.max_logits, NUM_LOGPROBS)
    caches = abstract_caches(layers, size.blocks, size.block_size, jnp.dtype(dtype))
    tables = TableSizes(size.reqs, size.max_model_len, config.vocab_size)
    state = jax.eval_shape(lambda: init_state(size.reqs, [size.table_width], tables))
    layout = shapes.layouts[size.tokens]

    def forward(params: Any, kv_caches: Any, state: Any, buffer: jax.Array) -> Any:
        return functions.forward(params, kv_caches, state, unpack(buffer, layout), return_all_hidden=True)

    def head(params: Any, state: Any, hidden: jax.Array, head_inputs: Any) -> Any:
        return functions.head_and_sample(params, state, hidden, head_inputs, return_logprobs=True)

    args = (params, caches, state, jax.ShapeDtypeStruct((layout.size,), jnp.int32))
    hidden, head_inputs, *_ = jax.eval_shape(forward, *args)
    return Program(forward, args, (1, 2)), Program(head, (params, state, hidden, head_inputs), (1,))
