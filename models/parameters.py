"""How parameters come to be: as shapes to be filled by a checkpoint, or random."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Initializer:
    """Makes the parameters of a model.

    Attributes:
        dtype: of every parameter.
        rngs: source of random values; None: parameters are shapes without memory (``jax.ShapeDtypeStruct``).
    """

    dtype: jnp.dtype
    rngs: nnx.Rngs | None

    def normal(self, shape: tuple[int, int]) -> nnx.Param:
        """Normal values with standard deviation fan_in^-0.5, fan_in being the last dimension."""
        if self.rngs is None:
            return nnx.Param(jax.ShapeDtypeStruct(shape, self.dtype))
        values = jax.random.normal(self.rngs.params(), shape, jnp.float32) * shape[-1] ** -0.5
        return nnx.Param(values.astype(self.dtype))

    def constant(self, shape: tuple[int, ...], value: float) -> nnx.Param:
        """The same value everywhere."""
        if self.rngs is None:
            return nnx.Param(jax.ShapeDtypeStruct(shape, self.dtype))
        return nnx.Param(jnp.full(shape, value, self.dtype))
