"""RMS norms: the rule, and those of query and key heads, which a kernel applies before it rotates them."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def rms_norm(
    x: Float[Array, "... size"], weight: Float[Array, "size"], eps: float, plus_one: bool = False
) -> Float[Array, "... size"]:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension; times 1 + weight with `plus_one`, as Gemma's.

    Computed in float32, returned in x's dtype (Zhang & Sennrich 2019, arXiv:1910.07467).
    """
    wide, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * (1 + weight if plus_one else weight)).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadNorms:
    """The `rms_norm` of each query head and of each key head, over its D dimensions.

    Attributes:
        q, k: their weights, each shared by all heads.
        eps, plus_one: see `rms_norm`.
    """

    q: Float[Array, "D"]
    k: Float[Array, "D"]
    eps: float = field(metadata={"static": True})
    plus_one: bool = field(default=False, metadata={"static": True})
