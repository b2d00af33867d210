"""Attention of queries that stand alone, as in decoding: bound by reading the cache.

The work items are pairs (query, chunk of its keys). A loop whose trip count follows from the step's real lengths
takes a few items at a time, whichever queries they belong to, so ragged lengths and padding rows cost nothing;
partial results of one query are merged by their maxima.

Per item all kv heads share one product, [H, Hkv*D] x [Hkv*D, K], in which a query head is zero outside its own kv
head. That spends Hkv times the arithmetic but reads pages in the order of the cache. Measured with jax 0.12 for 8
queries x 640 keys, 9 heads on 3 of 64, float32, a layer; on one core of a busy machine: 1.5 ms; 2.7 ms with pages
transposed to one head after the other; 2.3 ms with a product per kv head, for which XLA transposes the keys within
the gather; 1.4 ms with all rows in lockstep up to the longest, but then each pays the longest row's price. The two
gathers take 0.4 to 0.5 ms each, the two products 0.5 together. On two cores: 1.58 ms with 4 items of 64 keys at a
time, 1.26 with 8 of 64, 1.06 with 4 of 128, 0.99 with 8 of 128, 1.03 with 8 of 256: a second thread needs enough to
do. Reading the keys and values once would take 0.4. A single query of 640 keys takes 0.2 ms.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32

from pallas_kernels.implementation import AttentionLayer
from pallas_kernels.metadata import CommonAttentionMetadata, KVCache, count_at_most
from pallas_kernels.paged_attention.pages import page_ids, pages_per_chunk, read_pages, vary_like
from pallas_kernels.paged_attention.scores import product, scores
from pallas_kernels.paged_attention.softmax import MASKED, SoftmaxState
from pallas_kernels.paged_attention.tiles import Tiles, first_key

ITEMS = 8  # work items at a time


def attend_singles(
    q: Float[Array, "T H D"],
    cache: KVCache,
    sinks: Float[Array, "H"] | None,
    common: CommonAttentionMetadata,
    tiles: Tiles,
    layer: AttentionLayer,
) -> tuple[Float32[Array, "tiles H D"], Float32[Array, "tiles H"]]:
    """(output, log-sum-exp) of the single query of every tile."""
    num_tiles = tiles.row.shape[0]
    num_heads, head_dim = q.shape[1:]
    block_size, chunk = common.block_size, pages_per_chunk(common.block_size)
    lower = first_key(tiles.position, layer.window)
    first_page = lower // block_size
    items_of_tile = (tiles.last_key // block_size - first_page + chunk) // chunk
    items_of_tile = jnp.where(jnp.arange(num_tiles, dtype=jnp.int32) < tiles.count, items_of_tile, 0)
    ends = jnp.cumsum(items_of_tile, dtype=jnp.int32)
    # All that an item needs to know of its tile, read together: each read by itself is a kernel to compile and call.
    facts = jnp.stack([tiles.row, tiles.token, lower, tiles.last_key, first_page, ends - items_of_tile], axis=-1)

    at_a_time = min(ITEMS, num_tiles)
    lane = jnp.arange(at_a_time, dtype=jnp.int32)
    key_offset = jnp.arange(chunk * block_size, dtype=jnp.int32)

    def some_items(i: Int32[Array, ""], state: SoftmaxState) -> SoftmaxState:
        item = i * at_a_time + lane
        tile = count_at_most(ends, item)
        last_item_passed = tile == num_tiles
        tile = jnp.minimum(tile, num_tiles - 1)
        row, token, lowest_key, last_key, page, first_item = jnp.unstack(facts[tile], axis=-1)
        page = page + (item - first_item) * chunk
        last_key = jnp.where(last_item_passed, -1, last_key)
        pages = page_ids(common.block_table, row, page, last_key, block_size)
        key = page[:, None] * block_size + key_offset
        seen = (key >= lowest_key[:, None]) & (key <= last_key[:, None])

        queries = _spread_heads(q.at[token].get(mode="clip"), layer)
        part = _attend_chunk(queries, cache, pages, seen, layer)
        # The items at hand belong to consecutive tiles, of which only the first can have been met before.
        first = tile[0]
        # Items past the last one see no key, so they weigh nothing in the tile that they are counted to.
        belongs = tile - first == lane[:, None]
        block = SoftmaxState(*(lax.dynamic_slice_in_dim(x, first, at_a_time) for x in state))
        merged = _merge(block, part, belongs)
        return SoftmaxState(
            *(lax.dynamic_update_slice_in_dim(x, y, first, 0) for x, y in zip(state, merged, strict=True))
        )

    empty = SoftmaxState.empty((num_tiles + at_a_time, num_heads), head_dim)
    empty = SoftmaxState(*(vary_like(x, q, *cache, common.seq_lens) for x in empty))
    rounds = (ends[-1] + at_a_time - 1) // at_a_time
    state = lax.fori_loop(jnp.int32(0), rounds, some_items, empty)
    out, lse = state.finish(None if sinks is None else sinks.astype(jnp.float32))
    return out[:num_tiles], lse[:num_tiles]


def _spread_heads(q: Float[Array, "items H D"], layer: AttentionLayer) -> Float32[Array, "items H Hkv*D"]:
    """Scaled queries, each in the columns of its own kv head and zero in the others'."""
    items, num_heads, head_dim = q.shape
    num_kv_heads = layer.num_kv_heads
    q = lax.optimization_barrier(q.astype(jnp.float32) * layer.scale)
    by_head = q.reshape(items, num_kv_heads, num_heads // num_kv_heads, head_dim)
    # Padding each head by itself is three times as fast as a product with, or a choice by, the identity matrix.
    columns = [(h * head_dim, (num_kv_heads - 1 - h) * head_dim) for h in range(num_kv_heads)]
    spread = [jnp.pad(by_head[:, h], ((0, 0), (0, 0), around)) for h, around in enumerate(columns)]
    return jnp.stack(spread, axis=1).reshape(items, num_heads, -1)


def _attend_chunk(
    queries: Float32[Array, "items H Hkv*D"],
    cache: KVCache,
    pages: Int32[Array, "items P"],
    seen: Bool[Array, "items K"],
    layer: AttentionLayer,
) -> SoftmaxState:
    """Softmax state of each item: [items, H] and [items, H, D]."""
    items, num_heads, _ = queries.shape
    num_kv_heads, head_dim = layer.num_kv_heads, layer.head_dim
    s = scores("ihe,ike->ihk", queries, read_pages(cache.k, pages), layer)
    s = jnp.where(seen[:, None, :], s, MASKED)
    # Values are read after the scores are made: keys and values together do not fit the L2 cache (10 % faster so).
    s, pages = lax.optimization_barrier((s, pages))
    m = jnp.max(s, axis=-1)
    weights = jnp.exp(s - m[..., None])
    # Values too are masked: 0 * NaN is NaN.
    values = jnp.where(seen[:, :, None], read_pages(cache.v, pages), 0)
    acc = product("ihk,ike->ihe", weights, values)
    acc = acc.reshape(items, num_kv_heads, num_heads // num_kv_heads, num_kv_heads, head_dim)
    own = jnp.stack([acc[:, h, :, h] for h in range(num_kv_heads)], axis=1)
    return SoftmaxState(m, jnp.sum(weights, axis=-1), own.reshape(items, num_heads, head_dim))


def _merge(state: SoftmaxState, items: SoftmaxState, belongs: Bool[Array, "states items"]) -> SoftmaxState:
    """State j with all items i for which belongs[j, i]."""
    belongs = belongs[:, :, None]
    m = jnp.maximum(state.m, jnp.max(jnp.where(belongs, items.m, MASKED), axis=1))
    shrink = jnp.exp(state.m - m)
    weights = jnp.where(belongs, jnp.exp(items.m - m[:, None]), 0)
    # One product serves all states, and 0 * NaN is NaN: what is not finite is left out, and put where it belongs.
    finite = jnp.isfinite(items.acc).all(axis=-1)
    acc = product("jih,ihd->jhd", weights, jnp.where(finite[..., None], items.acc, 0))
    broken = (belongs & ~finite).any(axis=1)
    return SoftmaxState(
        m,
        state.l * shrink + jnp.sum(jnp.where(belongs, weights * items.l, 0), axis=1),
        state.acc * shrink[..., None] + jnp.where(broken[..., None], jnp.nan, acc),
    )
