"""The forward pass of the reference: short queries one at a time, longer ones in tiles."""

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels.implementation import AttentionLayer
from pallas_kernels.metadata import CommonAttentionMetadata, KVCache
from pallas_kernels.paged_attention.pages import vary_like
from pallas_kernels.paged_attention.singles import attend_singles
from pallas_kernels.paged_attention.softmax import MASKED
from pallas_kernels.paged_attention.tiled import attend_tiles
from pallas_kernels.paged_attention.tiles import Tiles, cut_into_tiles

TILE = 64  # queries
# A request with at most this many query tokens (a decode, with drafts) takes less time query by query than as a tile.
FEW_QUERIES = 4
# A step of at most this many tokens goes query by query as a whole, and compiles in half the time.
FEW_TOKENS = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReferenceMetadata:
    """The work map of a step: which tokens are attended one at a time, and the tiles that cover the rest."""

    common: CommonAttentionMetadata
    singles: Tiles
    single_of_token: Int32[Array, "T"]  # the token's entry in singles; past the end for tokens that have none
    tiles: Tiles | None
    tile_size: int = field(metadata={"static": True})

    def replace_tables(self, block_table: Int32[Array, "R W"], slot_mapping: Int32[Array, "T"]) -> "ReferenceMetadata":
        common = dataclasses.replace(self.common, block_table=block_table, slot_mapping=slot_mapping)
        return dataclasses.replace(self, common=common)


def build(common: CommonAttentionMetadata) -> ReferenceMetadata:
    """The same for every layer, whatever its window: how many keys a query sees is worked out in `forward`, where
    XLA merges what layers have in common."""
    num_tokens, num_rows = common.req_indices.shape[0], common.seq_lens.shape[0]
    query_lens = common.query_lens
    if num_tokens <= FEW_TOKENS:
        alone, max_singles = query_lens > 0, num_tokens
    else:
        alone, max_singles = query_lens <= FEW_QUERIES, min(num_tokens, FEW_QUERIES * num_rows)
    singles = cut_into_tiles(common, alone, 1, max_singles)

    row = jnp.minimum(common.req_indices, num_rows - 1)
    offset = jnp.arange(num_tokens, dtype=jnp.int32) - common.query_start_loc[row]
    has_single = alone[row] & (common.req_indices < num_rows)
    single_of_token = jnp.where(has_single, singles.first_of_row[row] + offset, max_singles)

    size = min(TILE, num_tokens)
    tiles = None
    if num_tokens > FEW_TOKENS:
        longest_rows = min(num_rows, num_tokens // (FEW_QUERIES + 1))
        tiles = cut_into_tiles(common, ~alone, size, num_tokens // size + longest_rows)
    return ReferenceMetadata(common, singles, single_of_token, tiles, size)


def forward(
    layer: AttentionLayer,
    q: Float[Array, "T H D"],
    cache: KVCache,
    sinks: Float[Array, "H"] | None,
    metadata: ReferenceMetadata,
) -> tuple[Float[Array, "T H D"], Float32[Array, "T H"]]:
    """(output in q's dtype, log-sum-exp of each query's scores); zeros and a very low number for padding tokens."""
    common, single = metadata.common, metadata.single_of_token
    out, lse = attend_singles(q, cache, sinks, common, metadata.singles, layer)
    has_single = single < out.shape[0]
    out = jnp.where(has_single[:, None, None], out.at[single].get(mode="clip"), 0).astype(q.dtype)
    lse = jnp.where(has_single[:, None], lse.at[single].get(mode="clip"), MASKED)
    if metadata.tiles is None:
        return out, lse
    out, lse = (vary_like(x, q, *cache, common.seq_lens) for x in (out, lse))
    return attend_tiles(q, cache, sinks, common, metadata.tiles, metadata.tile_size, layer, out, lse)
