"""Reading pages of the cache, a chunk of keys at a time.

The forms here are chosen for XLA's CPU backend, which turns a gather into loops over its elements. Measured on one
core (jax 0.12, float32, 3 kv heads of 64, blocks of 16; 8 x 64 keys, hot cache): gathers whose innermost dimension
is at most 64 become vector code and take 27 us, while 128 or more in the innermost dimension take 100 to 225 us, as
does any transposition fused into the gather (120 us) unless the heads are indexed by the gather itself (50 us).
A dynamic slice per page costs 170 us. So pages are read as rows of at most 64 elements.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32, Int32

CHUNK_KEYS = 128  # keys that one work item reads


def pages_per_chunk(block_size: int) -> int:
    return max(1, CHUNK_KEYS // block_size)


def page_ids(
    block_table: Int32[Array, "R W"],
    row: Int32[Array, "..."],
    first_page: Int32[Array, "..."],
    last_key: Int32[Array, "..."],
    block_size: int,
) -> Int32[Array, "... P"]:
    """Blocks of a row's pages first_page, first_page+1, ... (P of them); the null block past that of last_key."""
    page = first_page[..., None] + jnp.arange(pages_per_chunk(block_size), dtype=jnp.int32)
    block = block_table.at[row[..., None], page].get(mode="clip")
    ids = jnp.where(page <= last_key[..., None] // block_size, block, 0)
    # Left to itself XLA computes the ids anew for every element that it reads.
    return lax.optimization_barrier(ids)


def read_pages(cache: Float[Array, "N B Hkv D"], pages: Int32[Array, "I P"]) -> Float32[Array, "I K Hkv*D"]:
    """The pages' keys (or values) in the cache's own order; K = P * B."""
    blocks, block_size, num_kv_heads, head_dim = cache.shape
    inner = _inner(head_dim)
    rows = cache.reshape(blocks, -1, inner).at[pages].get(mode="clip")
    return rows.reshape(pages.shape[0], -1, num_kv_heads * head_dim).astype(jnp.float32)


def read_pages_by_head(cache: Float[Array, "N B Hkv D"], pages: Int32[Array, "P"]) -> Float32[Array, "Hkv K D"]:
    """The pages' keys (or values), one head after the other; K = P * B."""
    blocks, block_size, num_kv_heads, head_dim = cache.shape
    inner = _inner(head_dim)
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    starts = lax.optimization_barrier(jnp.stack(jnp.broadcast_arrays(pages, heads), axis=-1))
    rows = lax.gather(
        cache.reshape(blocks, block_size, num_kv_heads, head_dim // inner, inner),
        starts,
        lax.GatherDimensionNumbers(offset_dims=(2, 3, 4), collapsed_slice_dims=(0, 2), start_index_map=(0, 2)),
        slice_sizes=(1, block_size, 1, head_dim // inner, inner),
        mode=lax.GatherScatterMode.CLIP,
    )
    return rows.reshape(num_kv_heads, -1, head_dim).astype(jnp.float32)


def _inner(head_dim: int) -> int:
    while head_dim > 64 and head_dim % 2 == 0:
        head_dim //= 2
    return head_dim


def vary_like(x: Array, *others: Array) -> Array:
    """x, but varying over every mesh axis that one of `others` varies over, as a loop's carry must be.

    Inside jax.shard_map a fresh constant varies over no axis, and a loop refuses a carry whose marking changes. The
    way is to add a zero that depends on the others; XLA folds it away.
    """
    zero = jnp.int32(0)
    for other in others:
        zero = zero * (other.reshape(-1)[0] != 0)
    return x + zero.astype(x.dtype)
