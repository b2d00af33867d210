"""Differentiation of the reference: the forward pass keeps only output and log-sum-exp, the backward pass recomputes
the rest block by block, so that it too needs memory linear in the tokens.

With weights p = exp(s - lse), output o = sum p v, and do its cotangent:
    dv += p do,   dp = do . v,   ds = p (dp - do . o),   dq += ds k scale,   dk += ds q scale
and a sink, a score with a value of zero, receives -sum exp(sink - lse) (do . o). (FlashAttention-2, algorithm 2.)
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32, Int32

from pallas_kernels.implementation import AttentionLayer
from pallas_kernels.metadata import CommonAttentionMetadata, KVCache
from pallas_kernels.paged_attention.blockwise import ReferenceMetadata, forward
from pallas_kernels.paged_attention.pages import page_ids, pages_per_chunk, read_pages_by_head, vary_like
from pallas_kernels.paged_attention.scores import product, scores, sees
from pallas_kernels.paged_attention.tiles import (
    Tiles,
    cut_into_tiles,
    first_key,
    heads_by_token,
    place_tile,
    rows_by_head,
)

# What the backward pass needs: the arguments after the layer, the output and the log-sum-exp [T, H].
Residuals = tuple[Array, KVCache, Array | None, ReferenceMetadata, Array, Array]


def attention(
    layer: AttentionLayer,
    q: Float[Array, "T H D"],
    cache: KVCache,
    sinks: Float[Array, "H"] | None,
    metadata: ReferenceMetadata,
) -> Float[Array, "T H D"]:
    """Paged attention, with gradients for q, both caches and the sinks."""
    # Under jit, layers that agree in all but these two are traced once: it halves the time to lower a model.
    return _traced_once(replace(layer, name="", group=0), q, cache, sinks, metadata)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    layer: AttentionLayer,
    q: Float[Array, "T H D"],
    cache: KVCache,
    sinks: Float[Array, "H"] | None,
    metadata: ReferenceMetadata,
) -> Float[Array, "T H D"]:
    return forward(layer, q, cache, sinks, metadata)[0]


def _attention_fwd(
    layer: AttentionLayer,
    q: Float[Array, "T H D"],
    cache: KVCache,
    sinks: Float[Array, "H"] | None,
    metadata: ReferenceMetadata,
) -> tuple[Float[Array, "T H D"], Residuals]:
    out, lse = forward(layer, q, cache, sinks, metadata)
    return out, (q, cache, sinks, metadata, out, lse)


def _attention_bwd(
    layer: AttentionLayer, residuals: Residuals, d_out: Float[Array, "T H D"]
) -> tuple[Float[Array, "T H D"], KVCache, Float[Array, "H"] | None, None]:
    q, cache, sinks, metadata, out, lse = residuals
    common = metadata.common
    num_tokens, num_rows = q.shape[0], common.seq_lens.shape[0]
    size = min(metadata.tile_size, num_tokens)
    all_rows = common.query_lens > 0
    tiles = cut_into_tiles(common, all_rows, size, num_tokens // size + min(num_rows, num_tokens))

    # Nothing of a padding token may count, not even a NaN in its cotangent.
    real = (common.req_indices < num_rows)[:, None, None]
    d_out = jnp.where(real, d_out.astype(jnp.float32), 0)
    out_dot = jnp.sum(d_out * out.astype(jnp.float32), axis=-1)
    d_sinks = None
    if sinks is not None:
        weight = jnp.where(real[:, :, 0], jnp.exp(sinks.astype(jnp.float32) - lse), 0)
        d_sinks = -jnp.sum(weight * out_dot, axis=0).astype(sinks.dtype)

    zeros = (vary_like(jnp.zeros(x.shape, jnp.float32), q, *cache, d_out, common.seq_lens) for x in (q, *cache))
    grads = lax.fori_loop(
        jnp.int32(0),
        tiles.count,
        partial(_one_tile, layer, q, cache, common, tiles, size, d_out, out_dot, lse),
        tuple(zeros),
    )
    d_q, d_k, d_v = (grad.astype(x.dtype) for grad, x in zip(grads, (q, *cache), strict=True))
    return d_q, KVCache(d_k, d_v), d_sinks, None


def _one_tile(
    layer: AttentionLayer,
    q: Float[Array, "T H D"],
    cache: KVCache,
    common: CommonAttentionMetadata,
    tiles: Tiles,
    size: int,
    d_out: Float32[Array, "T H D"],
    out_dot: Float32[Array, "T H"],
    lse: Float32[Array, "T H"],
    t: Int32[Array, ""],
    grads: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """The gradients with what tile t adds to them."""
    num_kv_heads = layer.num_kv_heads
    block_size, chunk = common.block_size, pages_per_chunk(common.block_size)
    key_offset = jnp.arange(chunk * block_size, dtype=jnp.int32)
    tile = place_tile(tiles, t, size, q.shape[0])

    def rows(x: Array) -> Float32[Array, "Hkv Q *rest"]:
        own = tile.own.reshape(-1, *[1] * (x.ndim - 1))
        return rows_by_head(jnp.where(own, tile.read(x).astype(jnp.float32), 0), num_kv_heads)

    queries, d_rows, dot_rows, lse_rows = rows(q) * layer.scale, rows(d_out), rows(out_dot), rows(lse)
    lower = first_key(tile.first_position, layer.window)
    pages_before = lower // block_size

    def one_chunk(c: Int32[Array, ""], partial_grads: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        d_queries, d_k, d_v = partial_grads
        page = pages_before + c * chunk
        pages = page_ids(common.block_table, tile.row, page, tile.last_key, block_size)
        key = page * block_size + key_offset
        owned = ((key >= lower) & (key <= tile.last_key))[None, :, None]
        keys = jnp.where(owned, read_pages_by_head(cache.k, pages), 0)
        values = jnp.where(owned, read_pages_by_head(cache.v, pages), 0)

        s = scores("hqd,hkd->hqk", queries, keys, layer)
        visible = sees(tile.query_position, key, tile.last_key, layer, common.causal) & tile.own[:, None]
        visible = jnp.repeat(visible, layer.num_heads // num_kv_heads, axis=0)[None]
        p = jnp.where(visible, jnp.exp(s - lse_rows[..., None]), 0)
        d_values = product("hqk,hqd->hkd", p, d_rows)
        d_s = p * (product("hqd,hkd->hqk", d_rows, values) - dot_rows[..., None])
        if layer.soft_cap is not None:
            d_s = d_s * (1 - (s / layer.soft_cap) ** 2)
        d_keys = product("hqk,hqd->hkd", d_s, queries)
        d_queries = d_queries + product("hqk,hkd->hqd", d_s, keys)

        # Pages past the last key stand for no block. Keys outside the window have a gradient of zero.
        target = jnp.where(page + jnp.arange(chunk, dtype=jnp.int32) <= tile.last_key // block_size, pages, len(d_k))
        return d_queries, _add_pages(d_k, target, d_keys), _add_pages(d_v, target, d_values)

    d_q, d_k, d_v = grads
    chunks = (tile.last_key // block_size - pages_before + chunk) // chunk
    empty = vary_like(jnp.zeros_like(queries), d_q, d_k)
    d_queries, d_k, d_v = lax.fori_loop(jnp.int32(0), chunks, one_chunk, (empty, d_k, d_v))
    return tile.write(d_q, heads_by_token(d_queries * layer.scale, size)), d_k, d_v


def _add_pages(cache: Array, pages: Int32[Array, "P"], x: Float32[Array, "Hkv K D"]) -> Array:
    _, block_size, num_kv_heads, head_dim = cache.shape
    by_page = jnp.moveaxis(x, 0, 1).reshape(-1, block_size, num_kv_heads, head_dim)
    return cache.at[pages].add(by_page, mode="drop")


_attention.defvjp(_attention_fwd, _attention_bwd)
_traced_once = jax.jit(_attention, static_argnums=0)
