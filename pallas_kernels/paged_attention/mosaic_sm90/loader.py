"""What the loading warpgroup does: pages to the ring of K and V tiles, ahead of what is computed."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Int32

from pallas_kernels.paged_attention.mosaic.pieces import Piece
from pallas_kernels.paged_attention.mosaic.plan import ROWS, Plan
from pallas_kernels.paged_attention.mosaic_sm90.compute import MATRIX, Buffers


def load_piece(
    k: Any,
    v: Any,
    table: Any,
    head: Int32[Array, ""],
    piece: Piece,
    first_slot: Array,
    buffers: Buffers,
    values_raw: Any,
    plan: Plan,
) -> None:
    """The piece's K/V tiles, one bulk copy for each page and kv head.

    Beyond the row's keys, and before a window, pages hold anything, NaN too. Scores are masked there, but a weight of
    zero does not hide a value of NaN: tiles at such an edge have those values replaced by zeros before they are
    handed on.
    """
    block, copied = plan.block_keys, plan.copied_keys
    last_page = lax.div(piece.num_keys - 1, jnp.int32(plan.block_size))
    lowest_key = jnp.int32(0) if plan.window is None else jnp.maximum(piece.position - (plan.window - 1), 0)

    @pl.loop(piece.begin, piece.end)
    def _tile(j: Array) -> None:
        count = first_slot + j - piece.begin
        slot = lax.rem(count, jnp.int32(plan.stages))
        key = piece.first_key + j * block
        places = []
        for i in range(plan.copies):
            first = key + i * copied
            page = jnp.minimum(lax.div(first, jnp.int32(plan.block_size)), last_page)
            places.append(
                (table[piece.row, page], lax.rem(first, jnp.int32(plan.block_size)) if plan.copies == 1 else 0)
            )

        def copy(cache: Any, ring: Any, here: Any) -> None:
            for i, (page, offset) in enumerate(places):
                plgpu.copy_gmem_to_smem(
                    cache.at[page, pl.ds(offset, copied), head], ring.at[slot, pl.ds(i * copied, copied)], here
                )

        @pl.when(count >= plan.stages)
        def _() -> None:
            plgpu.barrier_wait(buffers.keys_free.at[slot])

        copy(k, buffers.keys, buffers.keys_here.at[slot])

        @pl.when(count >= plan.stages)
        def _() -> None:
            plgpu.barrier_wait(buffers.values_free.at[slot])

        at_edge = (key + block > piece.num_keys) | (key < lowest_key)

        @pl.when(~at_edge)
        def _() -> None:
            copy(v, buffers.values, buffers.values_here.at[slot])

        @pl.when(at_edge)
        def _() -> None:
            copy(v, buffers.values, values_raw)
            plgpu.barrier_wait(values_raw)
            _keep(buffers.values.at[slot], lowest_key - key, piece.num_keys - key, plan)
            plgpu.commit_smem()
            for _ in range(plan.copies):
                plgpu.barrier_arrive(buffers.values_here.at[slot])


def _keep(values: Any, begin: Array, end: Array, plan: Plan) -> None:
    """Zeros in all rows of [K, D] but begin .. end - 1. In parts: the loading warpgroup has few registers."""
    for first in range(0, plan.block_keys, ROWS):
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS, 64), 0, layout=MATRIX) + first
        kept = (row >= begin) & (row < end)
        for column in range(0, plan.head_dim, 64):
            part = values.at[pl.ds(first, ROWS), pl.ds(column, 64)]
            part[...] = jnp.where(kept, part[...], jnp.zeros((), values.dtype))


def drain(count: Array, buffers: Buffers, plan: Plan) -> None:
    """Waits until every tile has been used: a barrier's completion must be seen before the kernel ends."""

    @pl.loop(jnp.maximum(count - plan.stages, 0), count)
    def _(tile: Array) -> None:
        slot = lax.rem(tile, jnp.int32(plan.stages))
        plgpu.barrier_wait(buffers.keys_free.at[slot])
        plgpu.barrier_wait(buffers.values_free.at[slot])
