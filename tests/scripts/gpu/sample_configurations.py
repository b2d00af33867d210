"""Kernels to try check_kernels.py on: one that is as it should be, and two that aren't."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.configurations import TENSOR_CORES, TMA_LOADS, KernelConfiguration

X = jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)


def copied(x: jax.Array) -> jax.Array:
    """x, through shared memory, 64 rows a block."""

    def body(x_gmem, out_gmem, smem, barrier):  # type: ignore[no-untyped-def]
        rows = pl.ds(lax.axis_index("i") * 64, 64)
        plgpu.copy_gmem_to_smem(x_gmem.at[rows], smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, out_gmem.at[rows])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=X,
        scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16), plgpu.Barrier()],
        grid=(4,),
        grid_names=("i",),
    )(x)


def failing(x: jax.Array) -> jax.Array:
    raise ValueError("this one can't be lowered")


def configurations() -> Iterator[KernelConfiguration]:
    hopper = ((9, 0),)
    yield KernelConfiguration(
        "copy", "sample", "good", copied, (X,), capabilities=hopper, needs=frozenset({TMA_LOADS}), in_ci=True
    )
    yield KernelConfiguration("copy", "sample", "no products", copied, (X,), needs=frozenset({TENSOR_CORES}))
    yield KernelConfiguration("copy", "sample", "failing", failing, (X,), capabilities=((9, 0), (8, 0)))
    yield KernelConfiguration("copy", "sample", "xla", lambda x: x + 1, (X,))
