"""What a warpgroup does with a piece of work: 64 or 128 query rows, from its queries to its results."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic import toolchain
from pallas_kernels.paged_attention.mosaic.pieces import Piece, Rows
from pallas_kernels.paged_attention.mosaic.plan import Plan
from pallas_kernels.paged_attention.mosaic.softmax import (
    LOG2_E,
    Softmax,
    hide,
    over_tiles,
    quotient_of_row,
    weigh,
    whole_tiles,
)
from pallas_kernels.paged_attention.mosaic_sm80.products import Device
from pallas_kernels.paged_attention.mosaic_sm80.ring import Pages, Ring
from pallas_kernels.paged_attention.mosaic_sm80.rows import copy_own_tokens, copy_tokens, powers_of_two
from pallas_kernels.paged_attention.softmax import MASKED


class Buffers(NamedTuple):
    """Shared memory; the last two are the same."""

    queries: Any  # None where registers hold them
    staging: Any
    staging_f32: Any


def load_queries(q: Any, head: Array, rows: Rows, buffers: Buffers, device: Device, plan: Plan) -> Any:
    """The rows' queries as the left operand of a product: registers [rows, D], or a reference to shared memory."""
    for column in range(0, plan.head_dim, plan.staged):
        columns = pl.ds(column, plan.staged)
        if column > 0:
            device.meet()
        for first, tokens in powers_of_two(plan.box):
            source = q.at[pl.ds(rows.start + first, tokens), head, :, columns]
            copy_tokens(source, buffers.staging.at[pl.ds(first * plan.group, tokens * plan.group)], tokens)
        device.meet()
        part = plgpu.load(buffers.staging, layout=device.left, optimized=False)
        if buffers.queries is None:
            return part
        toolchain.store(buffers.queries.at[:, columns], part)
    return buffers.queries


def attend(
    piece: Piece,
    rows: Rows,
    queries: Any,
    initial: tuple[Array, Array],
    ring: Ring,
    pages: Pages,
    scale: float,
    soft_cap: float | None,
    plan: Plan,
) -> Softmax:
    device = ring.device
    factor = (scale if soft_cap is None else soft_cap) * LOG2_E
    token_of_row = quotient_of_row(plan.group, device.vector, plan.rows)
    if plan.causal:
        last_of_row = token_of_row + (rows.position - rows.shift - piece.first_key)
    else:
        last_of_row = token_of_row * 0 + (piece.num_keys - 1 - piece.first_key)
    lowest_key = jnp.int32(0) if plan.window is None else jnp.maximum(piece.position - (plan.window - 1), 0)

    def tile(j: Array, state: tuple[Softmax, Pages], masked: bool) -> tuple[Softmax, Pages]:
        softmax, pages = state
        slot, pages = ring.take(piece, j, pages)
        s = device.scores(queries, ring.keys.at[slot])
        if soft_cap is not None:
            s = jnp.tanh(s * (scale / soft_cap))
        kept = None
        if masked:
            s = hide(s, last_of_row, j, plan, device.matrix)
            # Beyond the row's keys, and before a window, pages hold anything: a weight of zero does not hide NaN.
            key = piece.first_key + j * plan.block_keys
            kept = lowest_key - key, piece.num_keys - key
        softmax, p = weigh(s, softmax, factor)
        return softmax._replace(acc=device.add_product(softmax.acc, p, ring.values.at[slot], kept)), pages

    acc = plgpu.layout_cast(jnp.zeros((plan.rows, plan.head_dim), jnp.float32), device.matrix)
    whole = whole_tiles(piece, rows.position, rows.position + rows.length - 1, plan)
    softmax, _ = over_tiles(tile, (Softmax(acc, *initial), pages), piece, *whole, plan)
    return softmax


def head_of_row(device: Device, plan: Plan) -> Array:
    token = quotient_of_row(plan.group, device.vector, plan.rows)
    return plgpu.broadcasted_iota(jnp.int32, (plan.rows,), 0, layout=device.vector) - token * plan.group


def store_results(
    state: Softmax,
    piece: Piece,
    rows: Rows,
    worker: Array,
    head: Array,
    out: Any,
    partials: Any,
    buffers: Buffers,
    device: Device,
    plan: Plan,
) -> None:
    """A whole tile's results to `out`; those of a piece, with their sums, to `partials` (None: there are no such)."""
    seen = state.total > 0
    scale = jnp.where(seen, 1 / jnp.where(seen, state.total, 1.0), 0.0)
    result = state.acc * lax.broadcast_in_dim(scale, state.acc.shape, [0])

    def store(to: Any, staging: Any) -> None:
        """to(first token, number of tokens, columns)."""
        width = staging.shape[1]
        for column in range(0, plan.head_dim, width):
            device.meet()
            part = lax.slice(result, (0, column), (plan.rows, column + width))
            toolchain.store(staging, part.astype(staging.dtype))
            device.meet()
            columns = pl.ds(column, width)
            copy_own_tokens(staging, lambda t, n, c=columns: to(t, n, c), rows.shift, rows.length, plan)

    def store_whole() -> None:
        store(lambda t, n, columns: out.at[pl.ds(rows.start + t, n), head, :, columns], buffers.staging)

    if partials is None:
        return store_whole()
    is_whole = (piece.begin == 0) & (piece.end == piece.kv_tiles)
    pl.when(is_whole)(store_whole)

    @pl.when(~is_whole)
    def _() -> None:
        later = (piece.begin > 0).astype(jnp.int32)
        cut = worker + 1 - later
        part, group = partials.out.at[later, cut, head], pl.ds(0, plan.group)
        store(lambda t, n, columns: part.at[pl.ds(t - rows.shift, n), group, columns], buffers.staging_f32)
        log_sums = jnp.where(seen, state.m + jnp.log2(jnp.where(seen, state.total, 1.0)), MASKED)
        toolchain.store(partials.log_sums.at[later, cut, head, 0, pl.ds(0, plan.rows)], log_sums)
