"""What a compute warpgroup does: the online softmax of 64 query rows over the K/V tiles of one piece of work.

Scores stay raw: with c = scale * log2(e) folded into one factor, exp(scale * (s - max s)) = exp2(s * c - m), m the
running maximum of s * c; a multiply-add and an exp2 for each score. Tiles that every row sees whole go through a loop
without masks.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Int32

from pallas_kernels.paged_attention.mosaic_sm90.plan import ROWS, Plan
from pallas_kernels.paged_attention.mosaic_sm90.products import add_product, scores
from pallas_kernels.paged_attention.softmax import MASKED

LOG2_E = math.log2(math.e)
MATRIX = plgpu.Layout.WGMMA
VECTOR = plgpu.Layout.WGMMA.reduce(1)


class Piece(NamedTuple):
    """A tile, and the part [begin, end) of its K/V tiles that this worker has; scalars in registers."""

    row: Int32[Array, ""]
    token: Int32[Array, ""]  # the tile's first
    length: Int32[Array, ""]  # tokens
    position: Int32[Array, ""]  # of the first token
    first_key: Int32[Array, ""]  # of K/V tile 0
    num_keys: Int32[Array, ""]  # of the row
    kv_tiles: Int32[Array, ""]  # of the tile
    begin: Int32[Array, ""]
    end: Int32[Array, ""]
    zero: Int32[Array, ""]  # 0, unknown to the compiler: keeps what is indexed by it from being hoisted


class Rows(NamedTuple):
    """This warpgroup's share of a tile: which of its 64 rows are whose.

    Row r holds head r // box of token start + r % box (rows past G * box: nothing). When the token array ends within
    the rows, they are moved down to fit; `shift` tokens at their beginning are then not this warpgroup's own.
    """

    start: Int32[Array, ""]
    shift: Int32[Array, ""]
    length: Int32[Array, ""]  # own tokens
    position: Int32[Array, ""]  # of the first own token


class Softmax(NamedTuple):
    acc: Array  # [64, D]
    m: Array  # [64], in units of log2
    total: Array  # [64]


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


def share(piece: Piece, warpgroup: Int32[Array, ""], plan: Plan) -> Rows:
    tokens = plan.tokens_per_warpgroup
    token = piece.token + warpgroup * tokens
    start = jnp.minimum(token, plan.num_tokens - plan.box)
    return Rows(
        start=start,
        shift=token - start,
        length=jnp.clip(piece.length - warpgroup * tokens, 0, tokens),
        position=piece.position + warpgroup * tokens,
    )


# Scalars kept in shared memory during the loops over keys, where registers are scarce.
START, SHIFT, LENGTH, LATER, WHOLE = range(5)


def keep(piece: Piece, rows: Rows, buffers: Buffers) -> None:
    """Puts away what `store_results` needs of a piece."""
    is_whole = (piece.begin == 0) & (piece.end == piece.kv_tiles)
    values = rows.start, rows.shift, rows.length, piece.begin > 0, is_whole
    for place, value in enumerate(values):
        buffers.kept[place] = value.astype(jnp.int32)


def load_queries(q: Any, head: Int32[Array, ""], rows: Rows, buffers: Buffers, plan: Plan) -> None:
    """Queries by one bulk copy a head to plain rows, and from there, through registers, to the swizzled form of wgmma:
    bulk copies write that only eight rows at a time, which the tokens need not be."""
    for column in range(0, plan.head_dim, plan.staged):
        columns = pl.ds(column, plan.staged)

        @pl.loop(0, plan.group)
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
    block, stages = plan.block_keys, jnp.int32(plan.stages)
    ahead = first_slot - piece.begin
    factor = (scale if soft_cap is None else soft_cap) * LOG2_E
    token_of_row = _iota((ROWS,), 0, VECTOR) - _head_of_row(plan) * plan.box
    last_position = rows.position + rows.length - 1
    if plan.causal:
        last_of_row = token_of_row + (rows.position - rows.shift - piece.first_key)
        whole_until = lax.div(rows.position + 1 - piece.first_key, jnp.int32(block))
    else:
        last_of_row = token_of_row * 0 + (piece.num_keys - 1 - piece.first_key)
        whole_until = lax.div(piece.num_keys - piece.first_key, jnp.int32(block))

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
            column = _iota((ROWS, block), 1, MATRIX)
            last = lax.broadcast_in_dim(last_of_row - j * block, s.shape, [0])
            s = jnp.where(column <= last, s, MASKED)
            if plan.window is not None:
                s = jnp.where(column > last - plan.window, s, MASKED)
        m = jnp.maximum(state.m, jnp.max(s, axis=1) * factor)
        shrink = jnp.exp2(state.m - m)
        p = jnp.exp2(s * factor - lax.broadcast_in_dim(m, s.shape, [0]))
        total = state.total * shrink + jnp.sum(p, axis=1)
        acc = state.acc * lax.broadcast_in_dim(shrink, state.acc.shape, [0])
        acc, m, total, p = lax.optimization_barrier((acc, m, total, p.astype(dtype)))
        give_turn(lambda: plgpu.barrier_wait(buffers.values_here.at[slot]))
        acc = add_product(acc, p, buffers.values.at[slot], interpreted)
        plgpu.barrier_arrive(buffers.values_free.at[slot])
        return Softmax(acc, m, total)

    def loops(state: Softmax, whole_from: Array, whole_until: Array) -> Softmax:
        if plan.window is None:
            state = lax.fori_loop(whole_from, whole_until, lambda j, s: tile(j, s, masked=False), state)
            return lax.fori_loop(whole_until, piece.end, lambda j, s: tile(j, s, masked=True), state)

        def half(i: Array, state: Softmax) -> Softmax:
            """Masked tiles, and then (at first) whole ones: the code of each kind of tile is there once."""
            begin, end = jnp.where(i == 0, piece.begin, whole_until), jnp.where(i == 0, whole_from, piece.end)
            state = lax.fori_loop(begin, end, lambda j, s: tile(j, s, masked=True), state)
            return lax.fori_loop(end, jnp.where(i == 0, whole_until, end), lambda j, s: tile(j, s, masked=False), state)

        return lax.fori_loop(0, 2, half, state)

    state = Softmax(
        plgpu.layout_cast(jnp.zeros((ROWS, plan.head_dim), jnp.float32), MATRIX),
        *initial,
    )
    whole_from = piece.begin
    if plan.window is not None:
        below = last_position - (plan.window - 1) - piece.first_key  # keys before what the last row sees
        whole_from = jnp.clip(lax.div(jnp.maximum(below, 0) + (block - 1), jnp.int32(block)), piece.begin, piece.end)
    whole_until = jnp.clip(whole_until, whole_from, piece.end)
    if plan.warpgroups == 2:  # the second starts half a tile later
        pl.when(warpgroup == 1)(give_turn)
    state = loops(state, whole_from, whole_until)
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


def first_maximum(sinks: Any, head: Int32[Array, ""], piece: Piece, plan: Plan) -> tuple[Array, Array]:
    """(m, sum) that the softmax starts with: nothing, or in the piece with the first keys the sinks, a score of theirs
    for each row."""
    m = plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), VECTOR)
    total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), VECTOR)
    if sinks is None:
        return m, total
    is_first = piece.begin == 0
    head_of_row = _head_of_row(plan)
    for g in range(plan.group):
        sink = jnp.where(is_first, sinks[head + piece.zero, g] * LOG2_E, MASKED)
        m = jnp.where(head_of_row == g, sink, m)
    return m, total + jnp.where(is_first, 1.0, 0.0)


def _head_of_row(plan: Plan) -> Array:
    """row // box without a division: exact for rows below 64."""
    return (_iota((ROWS,), 0, VECTOR) * -(-(1 << 16) // plan.box)) >> 16


def _iota(shape: tuple[int, ...], dimension: int, layout: Any) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)


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
    start, shift, length, later, is_whole = (buffers.kept[place] for place in range(5))
    seen = state.total > 0
    scale = jnp.where(seen, 1 / jnp.where(seen, state.total, 1.0), 0.0)
    result = state.acc * lax.broadcast_in_dim(scale, state.acc.shape, [0])

    @pl.when(is_whole > 0)
    def _() -> None:
        _store_rows(
            result, shift, length, lambda token, n: out.at[pl.ds(start + token, n), head], buffers.staging, plan
        )

    if partials is None:
        return

    @pl.when(is_whole == 0)
    def _() -> None:
        cut = worker + 1 - later
        first = warpgroup * plan.tokens_per_warpgroup - shift
        part = partials.out.at[later, cut, head]
        buffers.log_sums[...] = jnp.where(seen, state.m + jnp.log2(jnp.where(seen, state.total, 1.0)), MASKED)
        _store_rows(result, shift, length, lambda token, n: part.at[pl.ds(first + token, n)], buffers.staging_f32, plan)
        plgpu.copy_smem_to_gmem(buffers.log_sums, partials.log_sums.at[later, cut, head, warpgroup])
        plgpu.wait_smem_to_gmem(0)


def _store_rows(result: Array, shift: Array, length: Array, place: Any, staging: Any, plan: Plan) -> None:
    """This warpgroup's own tokens to place(first of the rows' tokens, number of tokens) [tokens, G, D]."""
    width = staging.shape[1]
    for column in range(0, plan.head_dim, width):
        part = lax.slice(result, (0, column), (ROWS, column + width))
        plgpu.store(staging, part.astype(staging.dtype), optimized=False)
        plgpu.commit_smem()

        columns = pl.ds(column, width)

        def copy(token: Any, n: int, columns: Any = columns) -> None:
            @pl.loop(0, plan.group)
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
