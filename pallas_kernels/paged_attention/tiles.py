"""Cutting a ragged batch of queries into tiles: the work map of attention, made once a step for all layers."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int32, Shaped

from pallas_kernels.metadata import CommonAttentionMetadata, count_at_most


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Runs of at most `size` consecutive query tokens of one request. Entries past `count` mean nothing.

    Tiles stand in the order of their tokens. Keys first_key..last_key are all that any of its queries may see
    without a window.
    """

    count: Int32[Array, ""]
    row: Int32[Array, "tiles"]
    token: Int32[Array, "tiles"]  # its first token
    length: Int32[Array, "tiles"]  # its number of tokens
    position: Int32[Array, "tiles"]  # of its first token
    last_key: Int32[Array, "tiles"]
    first_of_row: Int32[Array, "R"]  # each row's first tile


def cut_into_tiles(common: CommonAttentionMetadata, rows: Bool[Array, "R"], size: int, max_tiles: int) -> Tiles:
    """Tiles of at most `size` tokens covering the queries of the marked rows; there must be at most max_tiles."""
    query_lens = common.query_lens
    tiles_of_row = jnp.where(rows, (query_lens + size - 1) // size, 0)
    ends = jnp.cumsum(tiles_of_row, dtype=jnp.int32)
    first_of_row = ends - tiles_of_row

    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    row = jnp.minimum(count_at_most(ends, tile), rows.shape[0] - 1)
    offset = (tile - first_of_row[row]) * size
    length = jnp.minimum(query_lens[row] - offset, size)
    position = common.seq_lens[row] - query_lens[row] + offset
    last_key = position + length - 1 if common.causal else common.seq_lens[row] - 1
    return Tiles(
        count=ends[-1],
        row=row,
        token=common.query_start_loc[row] + offset,
        length=length,
        position=position,
        last_key=last_key,
        first_of_row=first_of_row,
    )


def first_key(position: Int32[Array, "..."], window: int | None) -> Int32[Array, "..."]:
    """The first key that the query at `position` sees: position - window + 1, or 0 without a window."""
    return jnp.zeros_like(position) if window is None else jnp.maximum(position - (window - 1), 0)


class PlacedTile(NamedTuple):
    """One tile as a window of `size` consecutive tokens, of which those outside the tile are to be left alone.

    The window is moved down where it would pass the end of the token array.
    """

    row: Int32[Array, ""]
    start: Int32[Array, ""]  # first token of the window
    own: Bool[Array, "size"]  # the window's tokens that belong to the tile
    query_position: Int32[Array, "size"]  # meaningless for the others
    first_position: Int32[Array, ""]  # of the tile's own tokens
    last_key: Int32[Array, ""]

    def read(self, array: Array) -> Array:
        """The window's part of an array with one entry per token."""
        return lax.dynamic_slice_in_dim(array, self.start, self.own.shape[0])

    def write(self, array: Array, values: Array) -> Array:
        """The array with the tile's own tokens replaced."""
        own = self.own.reshape(-1, *[1] * (array.ndim - 1))
        values = jnp.where(own, values.astype(array.dtype), self.read(array))
        return lax.dynamic_update_slice_in_dim(array, values, self.start, 0)


def place_tile(tiles: Tiles, t: Int32[Array, ""], size: int, num_tokens: int) -> PlacedTile:
    """Tile t as a window of `size` tokens; size <= num_tokens."""
    start = jnp.minimum(tiles.token[t], num_tokens - size)
    index = start + jnp.arange(size, dtype=jnp.int32) - tiles.token[t]
    return PlacedTile(
        row=tiles.row[t],
        start=start,
        own=(index >= 0) & (index < tiles.length[t]),
        query_position=tiles.position[t] + index,
        first_position=tiles.position[t],
        last_key=tiles.last_key[t],
    )


def rows_by_head(x: Shaped[Array, "size H *rest"], num_kv_heads: int) -> Shaped[Array, "Hkv size*H/Hkv *rest"]:
    """The query heads of each kv head packed beside the tokens: the rows of one product per kv head."""
    size, num_heads, *rest = x.shape
    grouped = x.reshape(size, num_kv_heads, num_heads // num_kv_heads, *rest)
    return jnp.moveaxis(grouped, 1, 0).reshape(num_kv_heads, -1, *rest)


def heads_by_token(x: Shaped[Array, "Hkv size*H/Hkv *rest"], size: int) -> Shaped[Array, "size H *rest"]:
    """The inverse of rows_by_head."""
    num_kv_heads, _, *rest = x.shape
    return jnp.moveaxis(x.reshape(num_kv_heads, size, -1, *rest), 0, 1).reshape(size, -1, *rest)
