"""The one seam that every projection of a model goes through."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.parameters import Initializer


class LinearWeights(nnx.Module):
    """Weights of one projection, or of several fused into one by concatenating their outputs.

    Stored as checkpoints have them, [out, in]: loading is then a copy of whole rows, a token embedding serves as a
    tied head as it is, and XLA's CPU backend multiplies it faster than [in, out] at 1 and 8 rows.

    Attributes:
        weight: [out, in].
        bias: [out], or None.
    """

    def __init__(self, make: Initializer, in_features: int, out_features: int, bias: bool = False) -> None:
        self.weight = make.normal((out_features, in_features))
        self.bias = make.constant((out_features,), 0.0) if bias else None


def linear(
    name: str, weights: LinearWeights, x: Float[Array, "T in_features"], out_dtype: DTypeLike | None = None
) -> Float[Array, "T out_features"]:
    """``x @ weight.T + bias``, accumulated in float32.

    All projections of all models come through here, so that adapters, quantised weights and sharding each have a
    single place to step in.

    Args:
        name: which projection this is, such as "layers.3.qkv"; unique within a model.
        weights: its weights.
        x: one row a token.
        out_dtype: of the result; x's by default.
    """
    del name  # for those who step in
    weight = weights.weight[...]
    # float32 means float32: the default would let a GPU round the operands to TF32.
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    contract_last = (((1,), (1,)), ((), ()))
    num_rows = x.shape[0]
    if num_rows == 1 and weight.dtype != jnp.float32:
        # XLA's CPU backend has no good product of one bfloat16 row: it took nine times as long as two rows do.
        x = jnp.concatenate([x, x])
    y = jax.lax.dot_general(x, weight, contract_last, precision=precision, preferred_element_type=jnp.float32)
    y = y[:num_rows]
    if weights.bias is not None:
        y = y + weights.bias[...].astype(jnp.float32)
    return y.astype(out_dtype or x.dtype)
