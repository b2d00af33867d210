"""Products in full float32, scores of queries against keys, and which of them count."""

from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float32, Int32

from pallas_kernels.implementation import AttentionLayer

# GPUs would round float32 factors to 10 bits; the reference must not. On CPUs it makes no difference.
product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def scores(spec: str, queries: Float32[Array, "..."], keys: Float32[Array, "..."], layer: AttentionLayer) -> Array:
    """Products of scaled queries with keys as `spec` (einsum) says, capped if the layer caps them."""
    s = product(spec, queries, keys)
    return s if layer.soft_cap is None else layer.soft_cap * jnp.tanh(s / layer.soft_cap)


def sees(
    query: Int32[Array, "Q"],
    key: Int32[Array, "K"],
    last_key: Int32[Array, ""],
    layer: AttentionLayer,
    causal: bool,
) -> Bool[Array, "Q K"]:
    """Whether the query at a position sees the key at a position; none sees a key after last_key."""
    visible = (key <= last_key)[None, :]
    if causal:
        visible = visible & (key[None, :] <= query[:, None])
    if layer.window is not None:
        visible = visible & (key[None, :] > query[:, None] - layer.window)
    return visible
