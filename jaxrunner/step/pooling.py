"""Hidden states of a step's rows, summed up: what an embedding is made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


def pool_rows(hidden: Float[Array, "T E"], starts: Int32[Array, "R+1"]) -> Float32[Array, "R 2 E"]:
    """Of each row the sum of its tokens' hidden states and the last of them; zeros and anything for an empty row.

    Args:
        starts: row r has tokens starts[r] to starts[r + 1].
    """
    token = jnp.arange(hidden.shape[0], dtype=jnp.int32)[None, :]
    inside = (token >= starts[:-1, None]) & (token < starts[1:, None])
    # Padding tokens may hold anything, and 0 x NaN is NaN.
    real = jnp.where((token < starts[-1])[0, :, None], hidden, 0).astype(jnp.float32)
    total = jnp.matmul(inside.astype(jnp.float32), real, precision=jax.lax.Precision.HIGHEST)
    last = hidden[jnp.maximum(starts[1:] - 1, 0)].astype(jnp.float32)
    return jnp.stack([total, last], axis=1)
