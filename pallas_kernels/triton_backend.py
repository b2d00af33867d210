"""Pallas's Triton backend: the only module that touches it.

The backend is deprecated since JAX 0.11.0, and a later version will not have it. It is here because it serves every
NVIDIA GPU from compute capability 8.0 on with one source. When it goes, this file goes, with the files whose names
begin with `triton_` and the lines that register them.

What a kernel may do here: shapes are powers of two, indices of a load are all arrays or scalars, and nothing sorts,
slices or reverses values in registers.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Float32

from pallas_kernels.gpus import current_device, dotted

load, store, dot = plt.load, plt.store, plt.dot
program_id, when = pl.program_id, pl.when

# What the kernels are written for: two bytes an element. One byte would pass the 32-bit offsets that the backend uses
# for arrays of up to 2**32 bytes; four would need other tiles.
DTYPES = ("bfloat16", "float16")
OLDEST = (8, 0)  # the first with bfloat16 products and asynchronous copies
CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0))  # that the kernels are compiled for when they are checked


def refuses_device(platform: str | None = None) -> str | None:
    """Why no kernel runs on the device that is compiled for, or on another platform; None if they do."""
    device = current_device()
    if (platform or device.platform) != "gpu":
        return f"it needs an NVIDIA GPU, this is {platform or device.platform}"
    capability = device.capability
    if capability is not None and capability < OLDEST:
        return f"it needs a GPU of compute capability {dotted(OLDEST)} or higher, this one has {dotted(capability)}"
    return None


def refuses_dtype(dtype: DTypeLike) -> str | None:
    """Why the kernels that compute take no arrays of this dtype; None if they do."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"it takes {' and '.join(DTYPES)}, not {jnp.dtype(dtype)}"
    return None


def call(
    kernel: Callable[..., None],
    args: Sequence[Array],
    out_shape: Any,
    *,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> Any:
    """The kernel over `grid`, each program seeing whole arrays; `aliases` maps arguments to results written in place.

    Consecutive programs differ in the first index of the grid. The parameters are always given: which backend Pallas
    takes without them changed twice.
    """
    # Given when the program is lowered, which follows; here is where it can be kept to this one module.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=dict(aliases or {}),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )(*args)


def exp2(x: Float32[Array, "..."], interpret: bool) -> Float32[Array, "..."]:
    """2**x in one instruction, with subnormal results flushed to 0. jnp.exp2 would spend four more on those."""
    if interpret or x.shape == ():  # inline assembly takes no scalars
        return jnp.exp2(x)
    [result] = plt.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def tanh(x: Float32[Array, "..."], interpret: bool) -> Float32[Array, "..."]:
    """By exp2: the tanh instruction is off by 2**-11, which a cap of 50 would turn into 0.02 in a score."""
    return 1 - 2 / (1 + exp2(x * 2.885390081777927, interpret))  # 2 * log2(e)


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
