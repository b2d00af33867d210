"""A worker's way through its share of the step: the tiles between two cuts, whole or in part."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32

from pallas_kernels.paged_attention.mosaic import work as w
from pallas_kernels.paged_attention.mosaic.plan import Plan


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
    """This warpgroup's share of a tile: which of its rows (64 or 128) are whose.

    They hold the group's heads of the tokens start .. start + box - 1, in the order of `Plan.row_of`; rows past G * box
    hold nothing. When the token array ends within the rows, they are moved down to fit; `shift` tokens at their
    beginning are then not this warpgroup's own.
    """

    start: Int32[Array, ""]
    shift: Int32[Array, ""]
    length: Int32[Array, ""]  # own tokens
    position: Int32[Array, ""]  # of the first own token


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


def each_piece(tiles: Any, cuts: Any, worker: Array, do: Callable[[Piece, Array], None]) -> Array:
    """Calls do(piece, K/V tiles before it) for a worker's pieces; returns the number of K/V tiles.

    Args:
        tiles, cuts: references to the arrays of `Work`.
    """

    def one(t: Array, count: Array) -> Array:
        piece = piece_of(t)
        following = count + piece.end - piece.begin
        do(piece, count)
        return following

    def piece_of(t: Array) -> Piece:
        # Read anew whenever needed: only few registers are left in the loops over keys.
        first_tile, first_offset = cuts[worker, w.CUT_TILE], cuts[worker, w.CUT_OFFSET]
        last_tile, last_offset = cuts[worker + 1, w.CUT_TILE], cuts[worker + 1, w.CUT_OFFSET]
        row, token, length, position, first_key, num_keys, kv_tiles, zero = (
            tiles[t, column]
            for column in (w.ROW, w.TOKEN, w.LENGTH, w.POSITION, w.FIRST_KEY, w.NUM_KEYS, w.KV_TILES, w.ZERO)
        )
        begin = jnp.where(t == first_tile, first_offset, 0)
        end = jnp.where(t == last_tile, last_offset, kv_tiles)
        return Piece(row, token, length, position, first_key, num_keys, kv_tiles, begin, end, zero)

    stop = cuts[worker + 1, w.CUT_TILE] + (cuts[worker + 1, w.CUT_OFFSET] > 0).astype(jnp.int32)
    return lax.fori_loop(cuts[worker, w.CUT_TILE], stop, one, jnp.int32(0))
