"""How many blocks the device has room for, and the arrays themselves."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxrunner.config import RunnerConfig
from jaxrunner.kv_cache.spec import FullAttentionSpec
from jaxrunner.shapes.ladders import cdiv
from pallas_kernels import AttentionLayer, KVCache


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """How many blocks there are, how large one is over all layers, and how the number came about."""

    num_blocks: int
    bytes_per_block: int
    why: str


def bytes_per_block(layers: Sequence[AttentionLayer], block_size: int, dtype: jnp.dtype) -> int:
    """K and V of one block in every layer."""
    name = jnp.dtype(dtype).name
    specs = (FullAttentionSpec(block_size, layer.num_kv_heads, layer.head_dim, name) for layer in layers)
    return sum(spec.page_size_bytes for spec in specs)


def plan_caches(
    config: RunnerConfig,
    layers: Sequence[AttentionLayer],
    dtype: jnp.dtype,
    temporaries: Callable[[], int],
    device: jax.Device | None = None,
) -> KVCachePlan:
    """The number of blocks: the configured one, or what fits.

    Args:
        temporaries: bytes of the largest executable's temporaries; only asked where the device states a limit.

    Raises:
        ValueError: not even one request of one block fits.
    """
    device = device or jax.devices()[0]
    size = bytes_per_block(layers, config.block_size, dtype)
    if config.num_blocks is not None:
        return KVCachePlan(config.num_blocks, size, f"{config.num_blocks} blocks, as configured")
    enough = 1 + config.max_num_reqs * cdiv(config.max_model_len, config.block_size)
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        temp = temporaries()
        limit, used = stats["bytes_limit"], stats["bytes_in_use"]
        room = int(config.gpu_memory_utilization * limit) - used - temp
        blocks = room // size
        why = (
            f"{blocks} blocks of {size} bytes: {config.gpu_memory_utilization:g} x {limit} bytes of"
            f" {device.device_kind} - {used} in use - {temp} of temporaries"
        )
    else:
        blocks = min(enough, config.cpu_cache_bytes // size)
        why = (
            f"{blocks} blocks of {size} bytes: {device.platform} states no limit, so enough for {config.max_num_reqs}"
            f" requests of {config.max_model_len} tokens, and at most {config.cpu_cache_bytes} bytes"
        )
    if blocks < 2:
        raise ValueError(
            f"no room for a KV cache ({why}): lower max_num_batched_tokens, raise gpu_memory_utilization or"
            " cpu_cache_bytes, or state num_blocks"
        )
    return KVCachePlan(int(blocks), size, why)


def allocate_caches(
    layers: Sequence[AttentionLayer], num_blocks: int, block_size: int, dtype: jnp.dtype
) -> tuple[KVCache, ...]:
    """K and V of every layer, [N, B, Hkv, D] each, zeroed.

    Raises:
        ValueError: the device has no memory for them.
    """
    size = bytes_per_block(layers, block_size, dtype)
    if jax.default_backend() == "cpu" and num_blocks * size > (there := _memory_of_this_machine()):
        # The system would promise it, and end the process when it is written.
        raise _too_many(num_blocks, size, f"this machine has {there / 2**30:.1f} GiB")
    try:
        return tuple(
            KVCache(jnp.zeros(k.shape, k.dtype), jnp.zeros(v.shape, v.dtype))
            for k, v in abstract_caches(layers, num_blocks, block_size, dtype)
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _too_many(num_blocks, size, f"{jax.devices()[0].device_kind} has no room for them") from error


def _memory_of_this_machine() -> float:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not everywhere is it told
        return math.inf


def _too_many(num_blocks: int, size: int, why: str) -> ValueError:
    return ValueError(
        f"a KV cache of {num_blocks} blocks takes {num_blocks * size / 2**30:.1f} GiB ({size} bytes each), and {why}:"
        " lower num_blocks (LLM: num_gpu_blocks_override) or block_size"
    )


def abstract_caches(
    layers: Sequence[AttentionLayer], num_blocks: int, block_size: int, dtype: jnp.dtype
) -> tuple[KVCache, ...]:
    """Shapes and dtypes of the caches, without memory."""
    shapes = [(num_blocks, block_size, layer.num_kv_heads, layer.head_dim) for layer in layers]
    arrays = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return tuple(KVCache(array, array) for array in arrays)  # type: ignore[arg-type]
