"""Which versions of JAX and CUDA the Mosaic kernels can be compiled with."""

from typing import Any

import jax
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpus import dotted

# Loads of plain rows in the layout of a product's results, references as kernel operands, transposed references, mma.
OLDEST_JAX = (0, 11, 2)
# ptxas of these miscompiles causal attention (as JAX's own attention_mgpu says): from the first, before the second.
MISCOMPILING = (12, 8, 0), (12, 9, 1)


def cuda_version() -> tuple[int, int, int] | None:
    """The CUDA runtime that XLA's GPU plugin uses; None without a plugin.

    Known without a GPU too: it is the library's own answer.
    """
    from jax._src.lib import cuda_versions  # JAX has no public name for it

    return None if cuda_versions is None else as_version(cuda_versions.cuda_runtime_get_version())


def as_version(number: int) -> tuple[int, int, int]:
    """The runtime's way of writing versions: 12090 is 12.9.0."""
    return number // 1000, number % 1000 // 10, number % 10


def refuses_versions(jax_version: tuple[int, ...], cuda: tuple[int, int, int] | None) -> str | None:
    """Why kernels aren't compiled with these; None if they are. An unknown CUDA is taken to be a good one."""
    if jax_version < OLDEST_JAX:
        return f"it needs JAX {dotted(OLDEST_JAX)} or newer, this is {dotted(jax_version)}"
    first, fixed = MISCOMPILING
    if cuda is not None and first <= cuda < fixed:
        return f"CUDA {dotted(cuda)} miscompiles causal attention (from {dotted(first)} on, fixed in {dotted(fixed)})"
    return None


def refuses() -> str | None:
    return refuses_versions(jax.__version_info__, cuda_version())


def store(to: Any, value: Array) -> None:
    """Writes an array to shared or global memory, with whatever stores its layout allows.

    JAX 0.11 has no `plgpu.store`. There an assignment does the same: it reads the old value too, which the compiler
    drops since nothing uses it.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(to, value, optimized=False)
    else:
        to[...] = value
