"""The two matrix products of a K/V tile, by wgmma.

The one place where compiled and interpreted kernels differ: JAX's interpreter of Mosaic kernels has no wgmma with
an operand in registers. What runs on a GPU is compiled, and looked at, by `scripts/check_kernels.py`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def scores(queries: Any, keys: Any, when_issued: Callable[[], None]) -> Array:
    """queries [64, D] @ keys [K, D]^T, both in shared memory; float32, in registers.

    Calls when_issued() before it waits for the result.
    """

    def product(acc: Any) -> Array:
        plgpu.wgmma(acc, queries, keys.transpose((1, 0)))
        when_issued()
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((queries.shape[0], keys.shape[0]), jnp.float32))


def add_product(acc: Array, weights: Array, values: Any, interpreted: bool) -> Array:
    """acc [64, D] + weights [64, K] @ values [K, D]: weights in registers, values in shared memory."""
    if interpreted:
        acc = acc + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # plain reads, unlike those of wgmma, come before the next bulk copy only so
        return acc

    def product(ref: Any) -> None:
        plgpu.wgmma(ref, weights, values)

    return pl.run_state(product)(plgpu.ACC.init(acc))
