"""What a compute warpgroup does: 64 query rows of one piece of work, from its queries to its results."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Int32

from pallas_kernels.paged_attention.mosaic import toolchain
from pallas_kernels.paged_attention.mosaic.pieces import Piece, Rows
from pallas_kernels.paged_attention.mosaic.plan import ROWS, Plan
from pallas_kernels.paged_attention.mosaic.softmax import (
    LOG2_E,
    Softmax,
    hide,
    iota,
    over_tiles,
    quotient_of_row,
    weigh,
    whole_tiles,
)
from pallas_kernels.paged_attention.mosaic_sm90.products import add_product, scores
from pallas_kernels.paged_attention.softmax import MASKED

MATRIX = plgpu.Layout.WGMMA
VECTOR = plgpu.Layout.WGMMA.reduce(1)


class Buffers(NamedTuple):
    """A warpgroup's shared memory and barriers."""

    queries: Any
    staging: Any
    staging_f32: Any
    log_sums: Any
    kept: Any
    keys: Any
    values: Any
    queries_here: Any
    keys_here: Any
    values_here: Any
    keys_free: Any
    values_free: Any
    turn: Any


# Scalars kept in shared memory during the loops over keys, where registers are scarce. HEADS is G, as a number that
# the compiler doesn't know: a loop over G heads that it unrolls has each head's addresses kept in registers.
START, SHIFT, LENGTH, LATER, WHOLE, HEADS = KEPT = range(6)
MANY = 8  # heads, from which on those loops spill registers if they are unrolled; with fewer they may if they aren't


def keep(piece: Piece, rows: Rows, buffers: Buffers, plan: Plan) -> None:
    """Puts away what `store_results` needs of a piece."""
    is_whole = (piece.begin == 0) & (piece.end == piece.kv_tiles)
    values = rows.start, rows.shift, rows.length, piece.begin > 0, is_whole, plan.group + piece.zero
    for place, value in enumerate(values):
        buffers.kept[place] = value.astype(jnp.int32)


def load_queries(q: Any, head: Int32[Array, ""], piece: Piece, rows: Rows, buffers: Buffers, plan: Plan) -> None:
    """Queries by one bulk copy a head to plain rows, and from there, through registers, to the swizzled form of wgmma:
    bulk copies write that only eight rows at a time, which the tokens need not be."""
    for column in range(0, plan.head_dim, plan.staged):
        columns = pl.ds(column, plan.staged)

        @pl.loop(0, plan.group + piece.zero if plan.group >= MANY else plan.group)
        def _(g: Array, columns: Any = columns) -> None:
            plgpu.copy_gmem_to_smem(
                q.at[pl.ds(rows.start, plan.box), head, g, columns],
                buffers.staging.at[pl.ds(g * plan.box, plan.box)],
                buffers.queries_here,
            )

        plgpu.barrier_wait(buffers.queries_here)
        buffers.queries[:, columns] = plgpu.load(buffers.staging, layout=MATRIX, optimized=False)
        plgpu.commit_smem()


def attend(
    piece: Piece,
    rows: Rows,
    warpgroup: Int32[Array, ""],
    initial: tuple[Array, Array],
    first_slot: Array,
    buffers: Buffers,
    plan: Plan,
    scale: float,
    soft_cap: float | None,
    dtype: Any,
    interpreted: bool,
) -> Softmax:
    stages = jnp.int32(plan.stages)
    ahead = first_slot - piece.begin
    factor = (scale if soft_cap is None else soft_cap) * LOG2_E
    token_of_row = iota((ROWS,), 0, VECTOR) - head_of_row(plan) * plan.box
    if plan.causal:
        last_of_row = token_of_row + (rows.position - rows.shift - piece.first_key)
    else:
        last_of_row = token_of_row * 0 + (piece.num_keys - 1 - piece.first_key)
    whole_from, whole_until = whole_tiles(piece, rows.position, rows.position + rows.length - 1, plan)

    two = piece.length > plan.tokens_per_warpgroup

    def give_turn(meanwhile: Callable[[], None] = lambda: None) -> None:
        """Where two warpgroups compute, one has the tensor cores while the other does its softmax: each stops where it
        has issued the scores' product, and where it is ready for the values', until the other is at its next stop."""
        if plan.warpgroups == 1:
            return meanwhile()
        pl.when(two)(lambda: plgpu.barrier_arrive(buffers.turn))
        meanwhile()
        pl.when(two)(lambda: plgpu.barrier_wait(buffers.turn))

    def tile(j: Array, state: Softmax, masked: bool) -> Softmax:
        slot = lax.rem(ahead + j, stages)
        plgpu.barrier_wait(buffers.keys_here.at[slot])
        s = scores(buffers.queries, buffers.keys.at[slot], give_turn)
        plgpu.barrier_arrive(buffers.keys_free.at[slot])
        if soft_cap is not None:
            s = jnp.tanh(s * (scale / soft_cap))
        if masked:
            s = hide(s, last_of_row, j, plan, MATRIX)
        (acc, m, total), p = weigh(s, state, factor)
        acc, m, total, p = lax.optimization_barrier((acc, m, total, p.astype(dtype)))
        give_turn(lambda: plgpu.barrier_wait(buffers.values_here.at[slot]))
        acc = add_product(acc, p, buffers.values.at[slot], interpreted)
        plgpu.barrier_arrive(buffers.values_free.at[slot])
        return Softmax(acc, m, total)

    state = Softmax(
        plgpu.layout_cast(jnp.zeros((ROWS, plan.head_dim), jnp.float32), MATRIX),
        *initial,
    )
    if plan.warpgroups == 2:  # the second starts half a tile later
        pl.when(warpgroup == 1)(give_turn)
    state = over_tiles(tile, state, piece, whole_from, whole_until, plan)
    if plan.warpgroups == 2:
        pl.when(warpgroup == 0)(give_turn)
    return state


def pass_tiles(piece: Piece, first_slot: Array, buffers: Buffers, plan: Plan) -> None:
    """Lets the ring go on for a warpgroup that has no rows in this piece."""

    @pl.loop(piece.begin, piece.end)
    def _tile(j: Array) -> None:
        slot = lax.rem(first_slot + j - piece.begin, jnp.int32(plan.stages))
        plgpu.barrier_wait(buffers.keys_here.at[slot])
        plgpu.barrier_arrive(buffers.keys_free.at[slot])
        plgpu.barrier_wait(buffers.values_here.at[slot])
        plgpu.barrier_arrive(buffers.values_free.at[slot])


def head_of_row(plan: Plan) -> Array:
    return quotient_of_row(plan.box, VECTOR)


def store_results(
    state: Softmax,
    worker: Array,
    head: Array,
    warpgroup: Array,
    out: Any,
    partials: Any,
    buffers: Buffers,
    plan: Plan,
) -> None:
    """A whole tile's results to `out`; those of a piece, with their sums, to `partials`."""
    start, shift, length, later, is_whole, heads = (buffers.kept[place] for place in KEPT)
    seen = state.total > 0
    scale = jnp.where(seen, 1 / jnp.where(seen, state.total, 1.0), 0.0)
    result = state.acc * lax.broadcast_in_dim(scale, state.acc.shape, [0])

    @pl.when(is_whole > 0)
    def _() -> None:
        _store_rows(
            result, shift, length, heads, lambda token, n: out.at[pl.ds(start + token, n), head], buffers.staging, plan
        )

    if partials is None:
        return

    @pl.when(is_whole == 0)
    def _() -> None:
        cut = worker + 1 - later
        first = warpgroup * plan.tokens_per_warpgroup - shift
        part = partials.out.at[later, cut, head]
        buffers.log_sums[...] = jnp.where(seen, state.m + jnp.log2(jnp.where(seen, state.total, 1.0)), MASKED)
        _store_rows(
            result, shift, length, heads, lambda token, n: part.at[pl.ds(first + token, n)], buffers.staging_f32, plan
        )
        plgpu.copy_smem_to_gmem(buffers.log_sums, partials.log_sums.at[later, cut, head, warpgroup])
        plgpu.wait_smem_to_gmem(0)


def _store_rows(result: Array, shift: Array, length: Array, heads: Array, place: Any, staging: Any, plan: Plan) -> None:
    """This warpgroup's own tokens to place(first of the rows' tokens, number of tokens) [tokens, G, D]."""
    width = staging.shape[1]
    for column in range(0, plan.head_dim, width):
        part = lax.slice(result, (0, column), (ROWS, column + width))
        toolchain.store(staging, part.astype(staging.dtype))
        plgpu.commit_smem()

        columns = pl.ds(column, width)

        def copy(token: Any, n: int, columns: Any = columns) -> None:
            @pl.loop(0, heads if plan.group >= MANY else plan.group)
            def _(g: Array) -> None:
                source = staging.at[pl.ds(g * plan.box + token, n)]
                plgpu.copy_smem_to_gmem(source, place(token, n).at[:, g, columns])

        @pl.when(length == plan.box)
        def _(copy: Any = copy) -> None:
            copy(0, plan.box)

        @pl.when(length < plan.box)
        def _(copy: Any = copy) -> None:
            @pl.loop(shift, shift + length)
            def _(token: Array) -> None:
                copy(token, 1)

        plgpu.wait_smem_to_gmem(0)
