"""Norms and rotary embedding of queries and keys, together with the write of keys and values into the cache."""

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels import triton_backend, triton_configurations, triton_write
from pallas_kernels.configurations import KernelConfiguration
from pallas_kernels.head_norms import HeadNorms, rms_norm
from pallas_kernels.implementation import Kernel, choose_kernel
from pallas_kernels.metadata import KVCache
from pallas_kernels.write_kv_cache import check_write, kernels_for, write_kv_cache


class RopeTable(NamedTuple):
    """Cosines and sines of a step's positions. Made once a step and used by every layer of its kind."""

    cos: Float32[Array, "T half_D"]
    sin: Float32[Array, "T half_D"]


def apply_rope(x: Float[Array, "T H D"], table: RopeTable) -> Float[Array, "T H D"]:
    """Rotates each head; dimension i pairs with i + D/2. Computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = table.cos[:, None, :], table.sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def norm_and_rope(
    q: Float[Array, "T H D"], k: Float[Array, "T Hkv D"], table: RopeTable, norms: HeadNorms | None = None
) -> tuple[Float[Array, "T H D"], Float[Array, "T Hkv D"]]:
    """q and k as attention takes them: each head normalised, if there are norms, and rounded to its dtype; then
    rotated and rounded again.
    """
    if norms is not None:
        q, k = (rms_norm(x, weight, norms.eps, norms.plus_one) for x, weight in ((q, norms.q), (k, norms.k)))
    return apply_rope(q, table), apply_rope(k, table)


def rope_and_write_kv_cache(
    q: Float[Array, "T H D"],
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    table: RopeTable,
    cache: KVCache,
    slot_mapping: Int32[Array, "T"],
    *,
    norms: HeadNorms | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "T H D"], KVCache]:
    """(rotated queries, the cache with rotated keys and values written): `norm_and_rope`, then `write_kv_cache`.

    One pass over q, k and v where the implementation is a kernel; q, k and v are best given as slices of one array
    [T, H + 2 * Hkv, D], in this order, which it then reads as it is.

    Args:
        norms: of query and key heads, before their rotation; None: the model has none.
        implementation: "auto", or a name: "triton", "reference". The reference alone is differentiable.

    Raises:
        ValueError: shapes or dtypes that disagree; an odd head size; a cache that slots cannot address; an
            implementation that is unknown or refuses.
    """
    check_write(k, v, cache, slot_mapping)
    num_tokens, _, head_dim = k.shape
    if q.ndim != 3 or (q.shape[0], q.shape[2]) != (num_tokens, head_dim) or head_dim % 2:
        raise ValueError(f"q must be [{num_tokens}, heads, {head_dim}] with an even last size, not {q.shape}")
    if {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    if table.cos.shape != (num_tokens, head_dim // 2) or table.sin.shape != table.cos.shape:
        raise ValueError(
            f"the table must have cosines and sines of shape {(num_tokens, head_dim // 2)}, "
            f"not {table.cos.shape} and {table.sin.shape}"
        )
    if norms is not None and not norms.q.shape == norms.k.shape == (head_dim,):
        raise ValueError(
            f"the heads' norms must have weights of shape ({head_dim},), not {norms.q.shape}, {norms.k.shape}"
        )
    kernels = kernels_for(cache, IMPLEMENTATIONS)
    kernel, _ = choose_kernel("rope_and_write_kv_cache", kernels, implementation)
    return kernel.function(q, k, v, table, cache, slot_mapping, norms)


def _triton(
    q: Float[Array, "T H D"],
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    table: RopeTable,
    cache: KVCache,
    slot_mapping: Int32[Array, "T"],
    norms: HeadNorms | None,
) -> tuple[Float[Array, "T H D"], KVCache]:
    return triton_write.rotate_and_write(q, k, v, *table, cache, slot_mapping, norms)


def _reference(
    q: Float[Array, "T H D"],
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    table: RopeTable,
    cache: KVCache,
    slot_mapping: Int32[Array, "T"],
    norms: HeadNorms | None,
) -> tuple[Float[Array, "T H D"], KVCache]:
    q, k = norm_and_rope(q, k, table, norms)
    return q, write_kv_cache(k, v, cache, slot_mapping, implementation="reference")


def _configurations() -> Iterable[KernelConfiguration]:
    return triton_configurations.of_rope_and_write(rope_and_write_kv_cache, RopeTable)


IMPLEMENTATIONS = (
    Kernel("triton", _triton, triton_backend.refuses_device, _configurations),
    Kernel("reference", _reference),
)
