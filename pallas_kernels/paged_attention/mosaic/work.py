"""Dividing a step's attention among the workers: made once a step, shared by all layers of a kind.

The step's queries are cut into tiles (padding tokens into tiles without keys, which only write zeros). A tile costs
its number of K/V tiles plus a constant; the tiles laid one after another make a line that is cut into equal pieces,
one per worker, wherever that falls, also inside a tile. So 64 requests of any lengths, one request of 100,000 keys
and a long prefill all keep every worker equally busy, and a worker holds at most two pieces of divided tiles: what
those left is merged afterwards. All shapes are static; how much of them means anything follows from the lengths.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from pallas_kernels.metadata import CommonAttentionMetadata, count_at_most
from pallas_kernels.paged_attention.mosaic.plan import Plan

# What a tile costs beside its keys (queries in, results out), in K/V tiles.
TILE_COST = 2
# A tile is not cut closer to its ends than this many K/V tiles: a smaller piece costs more than it balances.
MIN_PIECE = 2

# Columns of Work.tiles.
ROW, TOKEN, LENGTH, POSITION, FIRST_KEY, NUM_KEYS, KV_TILES, ZERO = range(8)
TILE_COLUMNS = 8
# Columns of Work.cuts.
CUT_TILE, CUT_OFFSET, CUT_MERGES = range(3)
CUT_COLUMNS = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Work:
    """The step's tiles and how they fall to the workers.

    tiles: row, first token, number of tokens, position of the first token, key at which the first K/V tile starts
        (aligned to what one copy brings), the row's number of keys, number of K/V tiles. A row and length of zero
        past the last tile.
    cuts: worker w has everything from cut w to cut w + 1. A cut is a tile and how many of its K/V tiles lie before
        it; then, at the first cut inside a tile, the number of pieces that follow it in that tile, else 0.
    """

    tiles: Int32[Array, "tiles 8"]
    cuts: Int32[Array, "workers+1 4"]
    plan: Plan = field(metadata={"static": True})


def max_tiles(plan: Plan, num_rows: int) -> int:
    """Tiles that any division of the tokens among the rows, and one row of padding, can need."""
    return min(plan.num_tokens, plan.num_tokens // plan.tokens_per_tile + num_rows + 1)


def divide(common: CommonAttentionMetadata, plan: Plan) -> Work:
    """The work map of a step for layers with this plan."""
    tiles = _tiles(common, plan)
    return Work(tiles, _cuts(tiles, plan), plan)


def _tiles(common: CommonAttentionMetadata, plan: Plan) -> Int32[Array, "tiles 8"]:
    size = plan.tokens_per_tile
    num_rows = common.seq_lens.shape[0]
    # Padding tokens are one more row, without keys.
    starts = common.query_start_loc
    query_lens = jnp.append(common.query_lens, plan.num_tokens - starts[-1])
    seq_lens = jnp.append(common.seq_lens, 0)
    tiles_of_row = (query_lens + size - 1) // size
    ends = jnp.cumsum(tiles_of_row, dtype=jnp.int32)

    tile = jnp.arange(max_tiles(plan, num_rows), dtype=jnp.int32)
    row = count_at_most(ends, tile)
    exists = row <= num_rows
    row = jnp.minimum(row, num_rows)
    offset = (tile - (ends - tiles_of_row)[row]) * size
    length = jnp.minimum(query_lens[row] - offset, size)
    seq_len = seq_lens[row]
    position = seq_len - query_lens[row] + offset
    end = position + length if plan.causal else seq_len
    first = jnp.zeros_like(position) if plan.window is None else jnp.maximum(position - (plan.window - 1), 0)
    first = first // plan.copied_keys * plan.copied_keys
    is_padding = row == num_rows
    kv_tiles = jnp.where(is_padding, 0, (end - first + plan.block_keys - 1) // plan.block_keys)
    columns = (
        jnp.minimum(row, num_rows - 1),
        starts[row] + offset,
        length,
        position,
        first,
        seq_len,
        kv_tiles,
        jnp.zeros_like(row),
    )
    return jnp.where(exists[:, None], jnp.stack(columns, axis=1), 0)


def _cuts(tiles: Int32[Array, "tiles 8"], plan: Plan) -> Int32[Array, "workers+1 4"]:
    workers = plan.workers
    kv_tiles = tiles[:, KV_TILES]
    cost = jnp.where(tiles[:, LENGTH] > 0, kv_tiles + TILE_COST, 0)
    ends = jnp.cumsum(cost, dtype=jnp.int32)
    total = ends[-1]
    # Steps of at least a small tile, so that no two cuts fall on one place inside a tile.
    step = jnp.maximum((total + workers - 1) // workers, TILE_COST + MIN_PIECE)
    place = jnp.minimum(jnp.arange(workers + 1, dtype=jnp.int32) * step, total)
    num_tiles = jnp.sum(cost > 0, dtype=jnp.int32)
    tile = jnp.minimum(count_at_most(ends, place), num_tiles)
    inside = jnp.minimum(tile, kv_tiles.shape[0] - 1)
    length = kv_tiles[inside]
    offset = place - (ends - cost)[inside] - TILE_COST
    offset = jnp.where((offset < MIN_PIECE) | (tile == num_tiles), 0, offset)
    at_end = offset > length - MIN_PIECE
    tile, offset = jnp.where(at_end & (offset > 0), tile + 1, tile), jnp.where(at_end, 0, offset)

    cut = jnp.arange(workers + 1, dtype=jnp.int32)
    together = (tile[:, None] == tile[None, :]) & (offset > 0)[:, None] & (offset > 0)[None, :]
    is_first = ~jnp.any(together & (cut[None, :] < cut[:, None]), axis=1)
    merges = jnp.where(is_first, jnp.sum(together, axis=1, dtype=jnp.int32), 0)
    return jnp.stack([tile, offset, merges, jnp.zeros_like(tile)], axis=1)
