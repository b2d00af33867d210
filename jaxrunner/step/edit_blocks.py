"""Blocks copied or cleared before a step: copy on write, and caches that must not begin with what was there."""

from __future__ import annotations

from collections.abc import Collection

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels import KVCache


def edit_blocks(
    kv_caches: tuple[KVCache, ...],
    caches: Collection[int],
    sources: Int32[Array, "C"],
    targets: Int32[Array, "C"],
    clear: Bool[Array, "C"],
) -> tuple[KVCache, ...]:
    """Block ``targets[i]`` becomes a copy of block ``sources[i]``, or zeros where ``clear``, in K and V.

    All sources are read before any target is written. Donate ``kv_caches``.

    Args:
        caches: the caches to edit, by number: those of one cache group.
        targets: a block past the end is padding.
    """
    edited = list(kv_caches)
    for i in caches:
        k, v = kv_caches[i].k, kv_caches[i].v
        edited[i] = KVCache(_edit(k, sources, targets, clear), _edit(v, sources, targets, clear))
    return tuple(edited)


def _edit(cache: Array, sources: Int32[Array, "C"], targets: Int32[Array, "C"], clear: Bool[Array, "C"]) -> Array:
    values = jnp.where(clear[:, None, None, None], jnp.zeros((), cache.dtype), cache[sources])
    return cache.at[targets].set(values, mode="drop")
