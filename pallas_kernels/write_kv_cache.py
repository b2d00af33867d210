"""Writing a step's keys and values into the paged cache."""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from pallas_kernels import triton_backend, triton_configurations, triton_write
from pallas_kernels.configurations import KernelConfiguration
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

    Args:
        implementation: "auto", or a name: "triton", "reference". The reference alone is differentiable.

    Raises:
        ValueError: shapes that disagree; a cache of 2**31 slots or more, which int32 slots cannot address; an
            implementation that is unknown or refuses.
    """
    check_write(k, v, cache, slot_mapping)
    kernel, _ = choose_kernel("write_kv_cache", kernels_for(cache, IMPLEMENTATIONS), implementation)
    return kernel.function(k, v, cache, slot_mapping)


def check_write(
    k: Float[Array, "T Hkv D"], v: Float[Array, "T Hkv D"], cache: KVCache, slot_mapping: Int32[Array, "T"]
) -> None:
    """Refuses what no write can do.

    Raises:
        ValueError: as `write_kv_cache`.
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


def kernels_for(cache: KVCache, kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels, of which Triton's refuses a cache of bytes: those have 32-bit offsets up to 2**32 elements."""
    if cache.k.dtype.itemsize > 1:
        return list(kernels)
    reason = f"it takes elements of two bytes or more, not {cache.k.dtype}"
    return [each._replace(refuses=lambda: reason) if each.name == "triton" else each for each in kernels]


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


def _configurations() -> Iterable[KernelConfiguration]:
    return triton_configurations.of_write(write_kv_cache)


IMPLEMENTATIONS = (
    Kernel("triton", triton_write.write, triton_backend.refuses_device, _configurations),
    Kernel("reference", _reference),
)
