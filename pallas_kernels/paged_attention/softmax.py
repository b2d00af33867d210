"""The running softmax: a weighted mean of values whose weights are seen a chunk at a time.

For scores s_i and values v_i the state is m = max s_i, l = sum exp(s_i - m), acc = sum exp(s_i - m) v_i.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32

# The score of a key that a query does not see. Finite, so that differences of two of them are no NaN: a chunk that
# a query does not see at all then counts with weight exp(MASKED - m) = 0 as soon as the query sees any key.
MASKED = -1e30


class SoftmaxState(NamedTuple):
    m: Float32[Array, "*queries"]
    l: Float32[Array, "*queries"]  # noqa: E741
    acc: Float32[Array, "*queries D"]

    @classmethod
    def empty(cls, queries: tuple[int, ...], head_dim: int) -> "SoftmaxState":
        zeros = jnp.zeros((*queries, head_dim), jnp.float32)
        return cls(jnp.full(queries, MASKED, jnp.float32), zeros[..., 0], zeros)

    def finish(
        self, sinks: Float32[Array, "*queries"] | None
    ) -> tuple[Float32[Array, "*queries D"], Float32[Array, "*queries"]]:
        """(weighted mean, log of the sum of exp(s_i)); zeros where nothing was seen.

        A sink is one more score with a value of zero.
        """
        m, total, acc = self
        if sinks is not None:
            m_with_sink = jnp.maximum(m, sinks)
            shrink = jnp.exp(m - m_with_sink)
            m, total, acc = m_with_sink, total * shrink + jnp.exp(sinks - m_with_sink), acc * shrink[..., None]
        seen = total != 0  # a NaN was seen too, and stays one
        total = jnp.where(seen, total, 1)
        return jnp.where(seen[..., None], acc / total[..., None], 0), m + jnp.log(total)
