"""The division of a step's attention into units of work, made once a step for all layers of a kind.

A *tile* is a run of query tokens of one request, whose heads of one kv head fill the rows of a matrix product. A
*unit* is a tile over a range of its keys: what one program computes, for one kv head. Long prefills have large tiles,
of one unit each. The queries of a decode make a small tile, and its keys are divided into units of nearly equal length
(split-KV), so that a few long requests fill the GPU too; a second kernel merges them.

Everything has a static capacity and a length that follows from the step. Padding tokens are tiles without keys: their
unit writes zeros and reads nothing.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from pallas_kernels.metadata import CommonAttentionMetadata, count_at_most
from pallas_kernels.paged_attention.tiles import first_key

# A request with at most this many tokens is attended as in decoding: a draft or two are not worth a large tile.
FEW_QUERIES = 8
# Units are not made shorter than this many blocks of keys while that leaves enough of them for every processor.
SHORTEST_UNIT = 4
PROGRAMS_TO_FILL = 512  # four programs on each of 132 processors
# Units that the keys of a step are divided into at most, times kv heads: several for each program that runs at a time,
# so that what the last ones leave idle is little.
MOST_PROGRAMS = 2048

# Columns of the table of units.
ROW, TOKEN, LENGTH, POSITION, START, END, KEYS, SLOT = range(8)
# Columns of the table of merges.
MERGE_TOKEN, MERGE_LENGTH, MERGE_SLOT, MERGE_COUNT = range(4)


@dataclass(frozen=True)
class Tiling:
    """Rows and keys of the matrix products. `rows` hold `rows // group_size` tokens."""

    rows: int
    keys: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Work:
    """Units 0 .. num_large-1 are large tiles, the others small ones.

    units: [units, 8]: the tile's row of the block table, first token, number of tokens, position of its first token;
        first block of keys and the one past the last, counted in the tiling's `keys`; number of keys that its queries
        see, from the sequence's start; where its result goes: -1 to the output, else the slot of a partial result.
    merges: [merges, 4]: of a tile in several units: first token, number of tokens, first slot, number of slots.
    """

    units: Int32[Array, "units 8"]
    merges: Int32[Array, "merges 4"]
    num_large: int = field(metadata={"static": True})
    num_slots: int = field(metadata={"static": True})


@dataclass(frozen=True)
class _Tiles:
    row: Int32[Array, "tiles"]
    token: Int32[Array, "tiles"]
    length: Int32[Array, "tiles"]  # 0 past the last tile
    position: Int32[Array, "tiles"]
    first_block: Int32[Array, "tiles"]
    num_blocks: Int32[Array, "tiles"]
    num_keys: Int32[Array, "tiles"]


def divide(
    common: CommonAttentionMetadata,
    group_size: int,
    num_kv_heads: int,
    window: int | None,
    small: Tiling,
    large: Tiling,
    most_programs: int = MOST_PROGRAMS,
) -> Work:
    """The work of one kind of layer in this step.

    A step with no more tokens than rows is one of decodes, or a short prefill, and has small tiles alone.
    """
    num_tokens, num_rows = common.req_indices.shape[0], common.seq_lens.shape[0]
    padding = num_tokens - common.query_start_loc[-1]
    # Padding is one more request, without keys.
    query_lens = jnp.append(common.query_lens, padding)
    tokens_small, tokens_large = small.rows // group_size, large.rows // group_size
    is_small = jnp.append(common.query_lens <= FEW_QUERIES, False)

    large_units = jnp.zeros((0, 8), jnp.int32)
    if num_tokens <= num_rows:
        is_small = jnp.ones_like(is_small)
        max_small = min(num_tokens, num_tokens // tokens_small + num_rows + 1)
    else:
        max_small = min(num_tokens, num_tokens // tokens_small + num_rows, num_rows * -(-FEW_QUERIES // tokens_small))
        most_long_rows = min(num_rows, num_tokens // (FEW_QUERIES + 1)) + 1
        max_large = min(num_tokens, num_tokens // tokens_large + most_long_rows)
        tiles = _cut(common, query_lens, ~is_small, tokens_large, max_large, large.keys, window)
        large_units = _whole(tiles)[::-1]  # the last tokens of a prompt see the most keys: they begin first
    tiles = _cut(common, query_lens, is_small, tokens_small, max_small, small.keys, window)

    longest = -(-common.block_table.shape[1] * common.block_size // small.keys)
    most_parts = min(max(most_programs // num_kv_heads, 1), max_small * longest)
    if longest == 1:
        units, merges, num_slots = _whole(tiles), jnp.zeros((0, 4), jnp.int32), 0
    else:
        units, merges, num_slots = _split(tiles, most_parts, max(PROGRAMS_TO_FILL // num_kv_heads, 1))
    return Work(jnp.concatenate([large_units, units]), merges, large_units.shape[0], num_slots)


def _cut(
    common: CommonAttentionMetadata,
    query_lens: Int32[Array, "R+1"],
    chosen: Bool[Array, "R+1"],
    tokens_per_tile: int,
    max_tiles: int,
    block: int,
    window: int | None,
) -> _Tiles:
    """The chosen rows' queries in tiles, in order; there must be at most max_tiles."""
    num_rows = common.seq_lens.shape[0]
    ends = _running_sum(jnp.where(chosen, (query_lens + tokens_per_tile - 1) // tokens_per_tile, 0))
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    row = jnp.minimum(count_at_most(ends, tile), num_rows)
    is_padding = row == num_rows
    first_tile = jnp.where(row > 0, ends[row - 1], 0)
    offset = (tile - first_tile) * tokens_per_tile
    length = jnp.where(tile < ends[-1], jnp.minimum(query_lens[row] - offset, tokens_per_tile), 0)
    table_row = jnp.minimum(row, num_rows - 1)
    seq_len = common.seq_lens[table_row]
    position = seq_len - query_lens[row] + offset
    num_keys = position + length if common.causal else seq_len
    num_keys = jnp.where(is_padding | (length == 0), 0, num_keys)
    first_block = first_key(position, window) // block
    num_blocks = jnp.maximum((num_keys + block - 1) // block - first_block, 0)
    token = common.query_start_loc[row] + offset
    return _Tiles(table_row, token, length, position, first_block, num_blocks, num_keys)


def _units(
    tiles: _Tiles, start: Int32[Array, "tiles"], end: Int32[Array, "tiles"], slot: Int32[Array, "tiles"]
) -> Int32[Array, "tiles 8"]:
    columns = [tiles.row, tiles.token, tiles.length, tiles.position, start, end, tiles.num_keys, slot]
    return jnp.stack(columns, axis=-1)


def _whole(tiles: _Tiles) -> Int32[Array, "tiles 8"]:
    """One unit a tile."""
    return _units(tiles, tiles.first_block, tiles.first_block + tiles.num_blocks, jnp.full_like(tiles.row, -1))


def _split(
    tiles: _Tiles, most_parts: int, parts_to_fill: int
) -> tuple[Int32[Array, "units 8"], Int32[Array, "merges 4"], int]:
    """(units, merges, number of slots): each tile in as many parts as its share of the step's keys.

    With n_t blocks of keys in tile t and parts of at most `longest` >= sum(n) / most_parts blocks, there are
    ceil(n_t / longest) parts, so at most tiles + most_parts units; and where there are two or more, fewer than
    2 * n_t / longest, so fewer than 2 * most_parts slots for partial results.
    """
    max_tiles = tiles.row.shape[0]
    n = tiles.num_blocks
    total = jnp.sum(n, dtype=jnp.int32)
    few = jnp.minimum((total + parts_to_fill - 1) // parts_to_fill, SHORTEST_UNIT)
    longest = jnp.maximum((total + most_parts - 1) // most_parts, jnp.maximum(few, 1))
    parts = jnp.where(tiles.length > 0, jnp.maximum((n + longest - 1) // longest, 1), 0)
    is_split = parts > 1

    part_ends = _running_sum(parts)
    slot_ends = _running_sum(jnp.where(is_split, parts, 0))
    merge_ends = _running_sum(is_split.astype(jnp.int32))

    unit = jnp.arange(max_tiles + most_parts, dtype=jnp.int32)
    tile = count_at_most(part_ends, unit)
    past_the_last = tile == max_tiles
    tile = jnp.minimum(tile, max_tiles - 1)
    columns = [tiles.row, tiles.token, tiles.length, tiles.position, tiles.first_block, n, tiles.num_keys]
    facts = jnp.stack([*columns, parts, part_ends - parts, slot_ends - parts, is_split], axis=-1)[tile]
    row, token, length, position, first_block, blocks, keys, count, first_unit, first_slot, split = jnp.unstack(
        facts, axis=-1
    )
    part = unit - first_unit
    count = jnp.maximum(count, 1)
    start = first_block + blocks * part // count
    end = first_block + blocks * (part + 1) // count
    slot = jnp.where(split > 0, first_slot + part, -1)
    length = jnp.where(past_the_last, 0, length)
    units = jnp.stack([row, token, length, position, start, end, keys, slot], axis=-1)

    merge = jnp.arange(min(max_tiles, most_parts), dtype=jnp.int32)
    tile = count_at_most(merge_ends, merge)
    merges = jnp.stack([tiles.token, tiles.length, slot_ends - parts, parts], axis=-1)
    merges = jnp.where((tile < max_tiles)[:, None], merges[jnp.minimum(tile, max_tiles - 1)], 0)
    return units, merges, 2 * most_parts


def _running_sum(x: Int32[Array, "N"]) -> Int32[Array, "N"]:
    """jnp.cumsum by comparing all with all: one kernel, where XLA's has several. N is rows or tiles of a step."""
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(index[None, :] <= index[:, None], x[None, :], 0), axis=1, dtype=jnp.int32)
