"""CommonAttentionMetadata: what is derived, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import CommonAttentionMetadata, request_indices


def arrays(**changes):
    given_ = {
        "query_start_loc": [0, 2, 7, 10, 10, 10],
        "seq_lens": [2, 9, 3, 0, 0],
        "positions": [0, 1, 4, 5, 6, 7, 8, 0, 1, 2, 0, 0],
        "block_table": [[1, 0, 0], [2, 3, 4], [5, 0, 0], [0, 0, 0], [0, 0, 0]],
        "slot_mapping": [4, 5, 12, 13, 14, 15, 16, 20, 21, 22, -1, -1],
    } | changes
    return {name: jnp.asarray(x, jnp.int32) for name, x in given_.items()}


def test_derived_facts():
    made = jax.jit(lambda a: CommonAttentionMetadata.make(**a, block_size=4))(arrays())
    assert made.req_indices.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 5, 5]
    assert made.query_lens.tolist() == [2, 5, 3, 0, 0]
    facts = (made.num_reqs, made.num_actual_tokens, made.max_query_len, made.max_seq_len)
    assert [int(x) for x in facts] == [3, 10, 5, 9]
    assert made.is_prefilling.tolist() == [False] * 5
    assert (made.block_size, made.causal) == (4, True)
    for leaf in jax.tree.leaves(made):
        assert leaf.dtype in (jnp.int32, jnp.bool_) and not leaf.weak_type


@given(st.lists(st.integers(0, 4), min_size=5, max_size=5))
def test_request_indices_are_repeats(query_lens):
    """Empty rows among the others too; padding gets R."""
    starts = jnp.asarray(np.cumsum([0, *query_lens]), jnp.int32)
    expected = [*np.repeat(np.arange(5), query_lens), *[5] * (24 - sum(query_lens))]
    assert request_indices(starts, 24).tolist() == expected


def test_wrong_arrays_are_named():
    def refused(match, block_size=4, **changes):
        with pytest.raises(ValueError, match=match):
            CommonAttentionMetadata.make(**(arrays() | changes), block_size=block_size)

    refused("seq_lens must be an int32 array of rank 1, not float32", seq_lens=jnp.zeros(5))
    refused("rank 2, not int32 of shape", block_table=jnp.zeros(5, jnp.int32))
    refused("must have 5 entries and block_table 4 rows, not 6 and 5", seq_lens=jnp.zeros(4, jnp.int32))
    refused("one per token", positions=jnp.zeros(3, jnp.int32))
    refused(r"is_prefilling must have shape \(5,\)", is_prefilling=jnp.zeros(3, jnp.bool_))
    refused("block_size must be at least 1, not 0", block_size=0)
