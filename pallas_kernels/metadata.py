"""What attention is told about a step: which tokens belong to which request, and where their keys and values lie.

Dimension letters (one glossary for the project): T tokens of the step, R rows (requests), W block table width,
N cache blocks, B block size, H query heads, Hkv kv heads, D head size.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32


class KVCache(NamedTuple):
    """The paged cache of one attention layer. Block 0 is the null block: no request owns it."""

    k: Float[Array, "N B Hkv D"]
    v: Float[Array, "N B Hkv D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CommonAttentionMetadata:
    """Facts of a step that every attention implementation starts from. Make one with `make`.

    Row r holds the tokens query_start_loc[r] .. query_start_loc[r+1]-1 of the flat token array. They are the last
    tokens of a sequence of seq_lens[r] tokens, whose keys and values lie in the blocks named by block_table[r].
    Attention reads its query positions from these two arrays (seq_len - query_len + i), never from `positions`.

    Padding: rows from num_reqs on have an empty interval, seq_len 0 and an all-null table row; tokens from
    num_actual_tokens on have slot -1 and request index R.
    """

    query_start_loc: Int32[Array, "R+1"]
    seq_lens: Int32[Array, "R"]
    block_table: Int32[Array, "R W"]
    slot_mapping: Int32[Array, "T"]
    positions: Int32[Array, "T"]
    req_indices: Int32[Array, "T"]
    num_reqs: Int32[Array, ""]
    num_actual_tokens: Int32[Array, ""]
    max_query_len: Int32[Array, ""]
    max_seq_len: Int32[Array, ""]
    is_prefilling: Bool[Array, "R"]
    block_size: int = field(metadata={"static": True})
    causal: bool = field(default=True, metadata={"static": True})

    @property
    def query_lens(self) -> Int32[Array, "R"]:
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    @staticmethod
    def make(
        query_start_loc: Int32[Array, "R+1"],
        seq_lens: Int32[Array, "R"],
        positions: Int32[Array, "T"],
        block_table: Int32[Array, "R W"],
        slot_mapping: Int32[Array, "T"],
        *,
        block_size: int,
        num_reqs: Int32[Array, ""] | None = None,
        is_prefilling: Bool[Array, "R"] | None = None,
        causal: bool = True,
    ) -> "CommonAttentionMetadata":
        """Checks the shapes and derives the rest; safe under jit.

        num_reqs: counted, as the rows with tokens, when not given.
        is_prefilling: rows whose prompt is not wholly computed yet; all False when not given.

        Raises:
            ValueError: shapes that disagree, a dtype other than int32, a block size below 1.
        """
        arrays = {
            "query_start_loc": (query_start_loc, 1),
            "seq_lens": (seq_lens, 1),
            "positions": (positions, 1),
            "block_table": (block_table, 2),
            "slot_mapping": (slot_mapping, 1),
        }
        for name, (array, rank) in arrays.items():
            if jnp.ndim(array) != rank or jnp.result_type(array) != jnp.int32:
                raise ValueError(
                    f"{name} must be an int32 array of rank {rank}, "
                    f"not {jnp.result_type(array)} of shape {jnp.shape(array)}"
                )
        rows = seq_lens.shape[0]
        if query_start_loc.shape[0] != rows + 1 or block_table.shape[0] != rows:
            raise ValueError(
                f"seq_lens has {rows} rows, so query_start_loc must have {rows + 1} entries and block_table {rows} "
                f"rows, not {query_start_loc.shape[0]} and {block_table.shape[0]}"
            )
        if positions.shape != slot_mapping.shape:
            raise ValueError(f"positions {positions.shape} and slot_mapping {slot_mapping.shape} must be one per token")
        if is_prefilling is not None and jnp.shape(is_prefilling) != (rows,):
            raise ValueError(f"is_prefilling must have shape ({rows},), not {jnp.shape(is_prefilling)}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")

        query_lens = query_start_loc[1:] - query_start_loc[:-1]
        return CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
            positions=positions,
            req_indices=request_indices(query_start_loc, positions.shape[0]),
            num_reqs=jnp.sum(query_lens > 0, dtype=jnp.int32) if num_reqs is None else num_reqs,
            num_actual_tokens=query_start_loc[-1],
            max_query_len=jnp.max(query_lens, initial=0),
            max_seq_len=jnp.max(seq_lens, initial=0),
            is_prefilling=jnp.zeros(rows, jnp.bool_) if is_prefilling is None else is_prefilling,
            block_size=block_size,
            causal=causal,
        )


def request_indices(query_start_loc: Int32[Array, "R+1"], num_tokens: int) -> Int32[Array, "T"]:
    """The row that each of num_tokens tokens belongs to; R for tokens past query_start_loc[-1] (padding)."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    return count_at_most(query_start_loc[1:], tokens)


def count_at_most(sorted_values: Int32[Array, "K"], x: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """How many of sorted_values are <= x, elementwise: searchsorted(..., side="right") by comparing with all.

    One fused pass without a loop or a sort; K is rows or tiles of a step, so the product stays small.
    """
    return jnp.sum(sorted_values <= x[..., None], axis=-1, dtype=jnp.int32)
