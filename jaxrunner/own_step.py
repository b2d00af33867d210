"""What a script of one's own needs around the pure step: a model's functions, caches and state, a step's inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrunner.kv_cache.allocate import allocate_caches
from jaxrunner.step import CacheGroup, DeviceState, StepArrays, StepFunctions, init_state
from models import Decoder, split
from pallas_kernels import GroupSpec, KVCache, choose_attention


class OwnStep(NamedTuple):
    """``functions`` are static; the others go into a jitted function. Donate ``kv_caches`` and ``state``."""

    functions: StepFunctions
    params: tuple[Array, ...]
    kv_caches: tuple[KVCache, ...]
    state: DeviceState


def own_step(
    decoder: Decoder,
    num_reqs: int,
    max_tokens: int,
    *,
    block_size: int = 16,
    attention: str = "auto",
    platform: str | None = None,
) -> OwnStep:
    """A model's step for requests 0 .. ``num_reqs`` - 1, each with cache blocks of its own for ``max_tokens`` tokens.

    Args:
        attention: name of an attention implementation, or "auto".
        platform: where it will run, "cpu" or "gpu"; None: here.

    Raises:
        ValueError: no attention implementation takes the model.
    """
    definition, params = split(decoder)
    layers = decoder.config.attention_layers()
    implementation, _ = choose_attention(
        layers, block_size, decoder.dtype, platform or jax.default_backend(), requested=attention
    )
    group = CacheGroup(GroupSpec(block_size, layers), implementation)
    width = -(-max_tokens // block_size)
    state = init_state(num_reqs, [width])
    blocks = jnp.arange(num_reqs * width, dtype=jnp.int32).reshape(num_reqs, width) + 1  # block 0 is nobody's
    state = replace(state, block_tables=(state.block_tables[0].at[:num_reqs].set(blocks),))
    caches = allocate_caches(layers, 1 + num_reqs * width, block_size, decoder.dtype)
    return OwnStep(StepFunctions(definition, (group,), num_reqs, num_reqs), params, caches, state)


def own_inputs(
    token_ids: Int32[Array, "T"], query_lens: Int32[Array, "R"], num_computed: Int32[Array, "R"]
) -> StepArrays:
    """A step in which row r is request r, and the last token of each row gets logits.

    Args:
        token_ids: of all rows, one after another; what is behind them is padding, of any id in the vocabulary.
        query_lens: tokens of each row, at least 1.
        num_computed: tokens of each request that are in the cache already.
    """
    rows = query_lens.shape[0]
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(query_lens, dtype=jnp.int32)])
    none = jnp.zeros(rows, jnp.int32)
    return StepArrays(
        num_reqs=jnp.int32(rows),
        num_tokens=starts[-1],
        num_logits=jnp.int32(rows),
        flags=jnp.int32(0),
        query_start_loc=starts,
        idx_mapping=jnp.arange(rows, dtype=jnp.int32),
        num_computed=num_computed,
        num_known=num_computed + query_lens,
        num_prompt=none,
        num_draft=none,
        use_device=none,
        logits_indices=starts[1:] - 1,
        update_group=none[:0],
        update_cell=none[:0],
        update_value=none[:0],
        token_ids=token_ids,
    )
