"""The online softmax of a tile's query rows over the K/V tiles of a piece.

Scores stay raw: with c = scale * log2(e) folded into one factor, exp(scale * (s - max s)) = exp2(s * c - m), m the
running maximum of s * c; a multiply-add and an exp2 for each score. Tiles that every row sees whole go through a loop
without masks.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic.pieces import Piece
from pallas_kernels.paged_attention.mosaic.plan import ROWS, Plan
from pallas_kernels.paged_attention.softmax import MASKED

LOG2_E = math.log2(math.e)


class Softmax(NamedTuple):
    acc: Array  # [rows, D]
    m: Array  # [rows], in units of log2
    total: Array  # [rows]


def hide(s: Array, last_of_row: Array, j: Array, plan: Plan, layout: Any) -> Array:
    """The scores [rows, K] of K/V tile j, MASKED where the row does not see the key.

    Args:
        last_of_row: the last key that each row sees, counted from the piece's first.
    """
    column = iota(s.shape, 1, layout)
    last = lax.broadcast_in_dim(last_of_row - j * plan.block_keys, s.shape, [0])
    s = jnp.where(column <= last, s, MASKED)
    return s if plan.window is None else jnp.where(column > last - plan.window, s, MASKED)


def weigh(s: Array, state: Softmax, factor: float) -> tuple[Softmax, Array]:
    """(the state for one K/V tile more, but for the product of weights and values; the weights)."""
    m = jnp.maximum(state.m, jnp.max(s, axis=1) * factor)
    shrink = jnp.exp2(state.m - m)
    p = jnp.exp2(s * factor - lax.broadcast_in_dim(m, s.shape, [0]))
    total = state.total * shrink + jnp.sum(p, axis=1)
    acc = state.acc * lax.broadcast_in_dim(shrink, state.acc.shape, [0])
    return Softmax(acc, m, total), p


def whole_tiles(piece: Piece, first: Array, last: Array, plan: Plan) -> tuple[Array, Array]:
    """[from, until): the piece's K/V tiles that every row sees whole; the rows' positions are first .. last."""
    block = jnp.int32(plan.block_keys)
    whole_until = lax.div((first + 1 if plan.causal else piece.num_keys) - piece.first_key, block)
    whole_from = piece.begin
    if plan.window is not None:
        below = last - (plan.window - 1) - piece.first_key  # keys before what the last row sees
        whole_from = jnp.clip(lax.div(jnp.maximum(below, 0) + (block - 1), block), piece.begin, piece.end)
    return whole_from, jnp.clip(whole_until, whole_from, piece.end)


def over_tiles[State](
    tile: Callable[[Array, State, bool], State],
    state: State,
    piece: Piece,
    whole_from: Array,
    whole_until: Array,
    plan: Plan,
) -> State:
    """Calls tile(j, state, masked) for the piece's K/V tiles, in order."""
    if plan.window is not None:
        state = lax.fori_loop(piece.begin, whole_from, lambda j, s: tile(j, s, True), state)
    state = lax.fori_loop(whole_from, whole_until, lambda j, s: tile(j, s, False), state)
    return lax.fori_loop(whole_until, piece.end, lambda j, s: tile(j, s, True), state)


def first_maximum(
    sinks: Any, head: Array, head_of_row: Array, piece: Piece, group: int, layout: Any
) -> tuple[Array, Array]:
    """(m, sum) that the softmax starts with: nothing, or in the piece with the first keys the sinks, a score of theirs
    for each row.

    Args:
        sinks: a reference [Hkv, G], or None.
        head_of_row: [rows], the query head of each row.
        layout: of vectors of rows.
    """
    m = plgpu.layout_cast(jnp.full(head_of_row.shape, MASKED, jnp.float32), layout)
    total = plgpu.layout_cast(jnp.zeros(head_of_row.shape, jnp.float32), layout)
    if sinks is None:
        return m, total
    is_first = piece.begin == 0
    for g in range(group):
        sink = jnp.where(is_first, sinks[head + piece.zero, g] * LOG2_E, MASKED)
        m = jnp.where(head_of_row == g, sink, m)
    return m, total + jnp.where(is_first, 1.0, 0.0)


def iota(shape: tuple[int, ...], dimension: int, layout: Any) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)


def quotient_of_row(divisor: int, layout: Any, rows: int = ROWS) -> Array:
    """row // divisor for all rows, without a division: exact for numbers up to 256."""
    return (iota((rows,), 0, layout) * -(-(1 << 16) // divisor)) >> 16
