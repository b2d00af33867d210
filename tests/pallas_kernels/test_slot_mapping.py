"""Slot mapping: the formula, its guards, context parallelism."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import local_key_lens, slot_mapping
from tests.cases_by_id import case

reference_case = partial(case, "runner_cases")


def slots(starts, positions, table, block_size, **options):
    arrays = [jnp.asarray(x, jnp.int32) for x in (starts, positions, table)]
    out = jax.jit(partial(slot_mapping, block_size=block_size, **options))(*arrays)
    assert out.dtype == jnp.int32 and not out.weak_type
    return np.asarray(out).tolist()


def test_block_times_size_plus_offset():
    table = [[5, 9, 0], [2, 0, 0]]
    assert slots([0, 3, 5], [3, 4, 5, 0, 3], table, 4) == [23, 36, 37, 8, 11]


def test_padding_starts_at_the_actual_count():
    """After a step of 8 tokens, one of 3 padded to 8: the stale positions of the tail get no slot."""
    table = [[5, 9], [0, 0]]
    assert slots([0, 8, 8], range(8), table, 4) == [20, 21, 22, 23, 36, 37, 38, 39]
    assert slots([0, 3, 3], range(8), table, 4) == [20, 21, 22, -1, -1, -1, -1, -1]
    assert slots([0, 0, 0], range(8), table, 4) == [-1] * 8


def test_a_position_outside_the_table_gets_no_slot():
    """Not the neighbouring row's block: 144 here."""
    _, expected = reference_case("slot_out_of_range")
    assert slots([0, 2, 2], [0, 16], [[5], [9]], 16) == expected["slots"]
    assert slots([0, 2], [-1, 3], [[5]], 16) == [-1, 83]


def test_a_dummy_row_writes_nothing():
    """A row that stands for no request has a position before the first; the rows after it are unharmed."""
    given_, expected = reference_case("slot_dummy_row")
    table = [[0, 0], given_["table"]]
    assert slots([0, 1, 4], [-1, *given_["pos"][1]], table, given_["block"]) == expected["slots"]


def test_context_parallel_ranks_share_a_request():
    given_, _ = reference_case("dcp_slots")
    size, world, table = given_["block"], given_["cp"], [given_["table"]]
    for rank in range(world):
        out = slots(
            [0, 1024], range(1024), table, size, cp_world_size=world, cp_rank=rank, cp_interleave=given_["interleave"]
        )
        expected = np.full(1024, -1)
        expected[rank * 128 : rank * 128 + 128] = range(640, 768)
        expected[512 + rank * 128 : 512 + rank * 128 + 128] = range(1152, 1280)
        assert out == expected.tolist()


def test_context_parallel_token_by_token():
    given_, expected = reference_case("dcp_slots_i1")
    for rank in range(2):
        out = slots([0, 8], given_["positions"], [given_["table"]], given_["block"], cp_world_size=2, cp_rank=rank)
        assert out == expected[f"rank{rank}"]


def test_local_key_lens():
    given_, expected = reference_case("dcp_local_lens")
    for interleave in given_["I"]:
        lens = [
            local_key_lens(
                jnp.asarray(given_["L"], jnp.int32), cp_world_size=2, cp_rank=rank, cp_interleave=interleave
            ).tolist()
            for rank in range(2)
        ]
        assert [list(pair) for pair in zip(*lens, strict=True)] == expected[f"I{interleave}"]


@given(
    interleave=st.sampled_from([1, 2, 4]),
    world=st.integers(1, 3),
    length=st.integers(1, 24),
)
def test_ranks_cover_every_position_once(interleave, world, length):
    """Each position has a slot on exactly one rank, no rank uses a slot twice, and it holds local_key_lens keys."""
    size = 4
    table = [[7, 3, 9, 1, 4, 2]]
    arrays = [jnp.asarray(x, jnp.int32) for x in ([0, length], np.resize(np.arange(length), 24), table)]
    owners = np.zeros(length, int)
    for rank in range(world):
        share = {"cp_world_size": world, "cp_rank": rank, "cp_interleave": interleave}
        out = np.asarray(slot_mapping(*arrays, block_size=size, **share))[:length]
        mine = out[out >= 0]
        assert len(set(mine.tolist())) == len(mine)
        assert set((mine // size).tolist()) <= set(table[0])
        assert len(mine) == local_key_lens(jnp.asarray([length], jnp.int32), **share)[0]
        owners += out >= 0
    assert (owners == 1).all()


def test_wrong_arguments_are_named():
    arrays = [jnp.asarray(x, jnp.int32) for x in ([0, 2], [0, 1], [[5]])]
    with pytest.raises(ValueError, match=r"cp_rank must be in 0\.\.1 .*, not 2"):
        slot_mapping(*arrays, block_size=4, cp_world_size=2, cp_rank=2)
    with pytest.raises(ValueError, match="block_size 4 must be a multiple of cp_interleave 3"):
        slot_mapping(*arrays, block_size=4, cp_world_size=2, cp_interleave=3)
    with pytest.raises(ValueError, match="at least 1, not 0, 1 and 1"):
        slot_mapping(*arrays, block_size=0)
    with pytest.raises(ValueError, match=r"block_table has rows \(1\), not 3"):
        slot_mapping(jnp.zeros(3, jnp.int32), *arrays[1:], block_size=4)
    with pytest.raises(
        ValueError, match="slot_mapping has no implementation 'other'; there is: auto, reference, triton"
    ):
        slot_mapping(*arrays, block_size=4, implementation="other")
