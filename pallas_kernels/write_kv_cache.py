"""Writing a step's keys and values into the paged cache."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from pallas_kernels.implementation import Kernel, choose_kernel
from pallas_kernels.metadata import KVCache


def write_kv_cache(
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    cache: KVCache,
    slot_mapping: Int32[Array, "T"],
    *,
    implementation: str = "auto",
) -> KVCache:
    """The cache with token t's key and value at slot slot_mapping[t] = block * B + offset.

    A negative slot, or one past the end, writes nothing. k and v are cast to the cache's dtype. When the cache is
    donated to the jitted caller the write happens in place. Two tokens with one slot: one of them wins.

    Raises:
        ValueError: shapes that disagree; a cache of 2**31 slots or more, which int32 slots cannot address.
    """
    blocks, block_size, *per_slot = cache.k.shape
    if cache.v.shape != cache.k.shape:
        raise ValueError(f"the k and v caches must have one shape, not {cache.k.shape} and {cache.v.shape}")
    expected = (slot_mapping.shape[0], *per_slot)
    if k.shape != expected or v.shape != expected:
        raise ValueError(f"k and v must have shape {expected} (slots, kv heads, head size), not {k.shape}, {v.shape}")
    if blocks * block_size >= 2**31:
        raise ValueError(
            f"a cache of {blocks} blocks of {block_size} slots has {blocks * block_size} slots; int32 slots address "
            "fewer than 2**31: use fewer blocks"
        )
    kernel, _ = choose_kernel("write_kv_cache", IMPLEMENTATIONS, implementation)
    return kernel.function(k, v, cache, slot_mapping)


def _reference(
    k: Float[Array, "T Hkv D"], v: Float[Array, "T Hkv D"], cache: KVCache, slot_mapping: Int32[Array, "T"]
) -> KVCache:
    blocks, block_size = cache.k.shape[:2]
    # JAX wraps negative indices: -1 would overwrite the last slot of the cache. So a skipped token gets a block past
    # the end, which mode="drop" leaves out. Block and offset stay apart: their product with the size of a slot
    # passes 2**31 in large caches.
    block = jnp.where(slot_mapping >= 0, slot_mapping // block_size, blocks)
    offset = slot_mapping % block_size
    return KVCache(
        cache.k.at[block, offset].set(k.astype(cache.k.dtype), mode="drop"),
        cache.v.at[block, offset].set(v.astype(cache.v.dtype), mode="drop"),
    )


IMPLEMENTATIONS = (Kernel("reference", _reference),)
