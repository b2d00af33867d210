"""Plain rows between global and shared memory: queries in, results out, by the registers of one warpgroup."""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic import toolchain
from pallas_kernels.paged_attention.mosaic.plan import Plan

THREADS = 128


def powers_of_two(n: int) -> list[tuple[int, int]]:
    """(first, size) of runs that make up n, the largest first: only such sizes are loads of 16 bytes a thread."""
    runs, first = [], 0
    while first < n:
        size = 1 << ((n - first).bit_length() - 1)
        runs.append((first, size))
        first += size
    return runs


def copy_tokens(source: Any, to: Any, tokens: int) -> None:
    """One of the two is [tokens, G, C] in global memory, the other [tokens * G, C], rows by token, in shared memory."""
    group, columns = source.shape[-2:] if len(source.shape) == 3 else to.shape[-2:]
    elements = tokens * group * columns
    if elements % THREADS == 0:
        wide = next(n for n in (8, 4, 2, 1) if elements % (THREADS * n) == 0 and columns % n == 0)
        x = plgpu.load(source, layout=plgpu.Layout.WG_STRIDED(source.shape, vec_size=wide))
        to[...] = x.reshape(to.shape)
        return
    for g in range(group):  # of one token: an odd number of 64 elements each
        one, other = (ref.at[0, g] if len(ref.shape) == 3 else ref.at[g] for ref in (source, to))
        copy_row(one, other)


def copy_row(source: Any, to: Any) -> None:
    """A number of elements that is a multiple of 64, from shared to global memory."""
    (size,) = source.shape
    if size % THREADS:
        layout = _by_each_warp()
    else:
        wide = next(n for n in (8, 4, 2, 1) if size % (THREADS * n) == 0)
        layout = plgpu.Layout.WG_STRIDED((size,), vec_size=wide)
    toolchain.store(to, plgpu.load(source, layout=layout, optimized=False))


def copy_own_tokens(source: Any, to: Any, shift: Any, length: Any, plan: Plan) -> None:
    """The tokens shift .. shift + length - 1 of the box.

    Args:
        source: [64, C] in shared memory, rows by token.
        to: (first token, number of tokens) -> [tokens, G, C] in global memory.
    """
    group = plan.group

    @pl.when(length == plan.box)
    def _() -> None:
        for first, size in powers_of_two(plan.box):
            copy_tokens(source.at[pl.ds(first * group, size * group)], to(first, size), size)

    @pl.when(length < plan.box)
    def _() -> None:
        def one(token: Any, _: None) -> None:
            copy_tokens(source.at[pl.ds(token * group, group)], to(token, 1), 1)

        lax.fori_loop(shift, shift + length, one, None)


def _by_each_warp() -> Any:
    """64 numbers, two a thread; all four warps have the same."""
    return plgpu.Layout.TILED(plgpu.Tiling(((64,), (2,))), (plgpu.Replicated(4),), (-2,), -1)
