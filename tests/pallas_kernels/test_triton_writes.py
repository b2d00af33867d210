"""The Triton kernels beside attention, interpreted, against plain JAX and against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from pallas_kernels import HeadNorms, KVCache, RopeTable, rope_and_write_kv_cache, slot_mapping, write_kv_cache
from pallas_kernels import triton_slot_mapping as slot_kernel
from pallas_kernels import triton_write as write_kernel
from tests.pallas_kernels.implementations import QUICK

BLOCKS, SIZE, TOKENS = 5, 4, 6
# (query heads, kv heads, head size): no power of two; more query heads than a program takes; one kv head.
HEADS = [(6, 3, 24), (34, 2, 16), (5, 1, 80)]


@partial(jax.jit, compiler_options=QUICK)
def write(k, v, cache, slots):
    return write_kernel.write(k, v, cache, slots, interpret=True)


@partial(jax.jit, compiler_options=QUICK)
def rotate_and_write(q, k, v, table, cache, slots, norms=None):
    return write_kernel.rotate_and_write(q, k, v, *table, cache, slots, norms, interpret=True)


@partial(jax.jit, compiler_options=QUICK)
def rotate_and_write_plainly(q, k, v, table, cache, slots, norms=None):
    return rope_and_write_kv_cache(q, k, v, table, cache, slots, norms=norms, implementation="reference")


map_slots = jax.jit(
    partial(slot_kernel.slot_mapping, interpret=True), static_argnums=(3, 4, 5, 6), compiler_options=QUICK
)


def arrays(heads, dtype="bfloat16", cache_dtype=None, seed=0):
    rng = np.random.default_rng(seed)
    num_heads, kv_heads, head_dim = heads
    q, k, v = (jnp.asarray(rng.normal(size=(TOKENS, n, head_dim)), dtype) for n in (num_heads, kv_heads, kv_heads))
    cache = rng.normal(size=(2, BLOCKS, SIZE, kv_heads, head_dim))
    angles = rng.uniform(0, 100, (TOKENS, head_dim // 2)).astype(np.float32)
    table = RopeTable(jnp.cos(angles), jnp.sin(angles))
    return q, k, v, table, KVCache(*(jnp.asarray(x, cache_dtype or dtype) for x in cache))


def some_slots(data):
    """One each, in any order, for some tokens; the others have none: a negative slot, or one past the end."""
    slots = data.draw(st.lists(st.integers(0, BLOCKS * SIZE - 1), unique=True, max_size=TOKENS))
    none = st.sampled_from([-1, -7, -(2**31), BLOCKS * SIZE, 2**31 - 1])
    slots += [data.draw(none) for _ in range(TOKENS - len(slots))]
    return jnp.asarray(data.draw(st.permutations(slots)), jnp.int32)


def same(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x.astype(jnp.float32)), np.asarray(y.astype(jnp.float32)))


@pytest.mark.parametrize("heads", HEADS)
@settings(max_examples=10)
@given(data=st.data())
def test_the_write_equals_the_reference(heads, data):
    _, k, v, _, cache = arrays(heads, seed=data.draw(st.integers(0, 9)))
    slots = some_slots(data)
    same(write(k, v, cache, slots), write_kv_cache(k, v, cache, slots, implementation="reference"))


def head_norms(head_dim, dtype, plus_one, eps=1e-3):
    """Of weights about 1, or about 0 where 1 is added; q's and k's differ."""
    weights = np.random.default_rng(7).normal(0 if plus_one else 1, 0.3, (2, head_dim))
    return HeadNorms(*(jnp.asarray(w, dtype) for w in weights), eps, plus_one)


def in_numpy(*arrays):
    return [np.asarray(x).astype(np.float64) for x in arrays]


def normed_in_numpy(x, weight, norms):
    root = np.sqrt((x**2).mean(axis=-1, keepdims=True) + norms.eps)
    return x / root * (weight + norms.plus_one)


def rotated_in_numpy(x, table):
    x, cos, sin = in_numpy(x, *table)
    pairs = x[..., : x.shape[2] // 2] + 1j * x[..., x.shape[2] // 2 :]
    turned = pairs * (cos + 1j * sin)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("heads", HEADS)
@settings(max_examples=10)
@given(data=st.data())
def test_rotation_and_write_in_one_pass(heads, data):
    """Queries and keys are turned as complex numbers are, values are not, and what has no slot is not written."""
    q, k, v, table, cache = arrays(heads, seed=data.draw(st.integers(0, 9)))
    slots = some_slots(data)
    out, written = rotate_and_write(q, k, v, table, cache, slots)
    assert out.dtype == q.dtype
    roundoff = {"rtol": float(jnp.finfo(q.dtype).eps), "atol": 1e-5}
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), rotated_in_numpy(q, table), **roundoff)
    turned = jnp.asarray(rotated_in_numpy(k, table), k.dtype)
    expected = write_kv_cache(turned, v, cache, slots, implementation="reference")
    np.testing.assert_allclose(
        np.asarray(written.k.astype(jnp.float32)), np.asarray(expected.k.astype(jnp.float32)), **roundoff
    )
    same(written.v, expected.v)


def assert_rotated(found, before, table, dtype):
    """Two roundings to the dtype explain the difference, of the normalised pair and of the turned one: each is by half
    an eps of the pair's length at most. With them go some of float32.
    """
    length = np.tile(np.hypot(*np.split(before, 2, axis=-1)), 2)
    error = np.abs(found - rotated_in_numpy(before, table))
    assert (error <= (float(jnp.finfo(dtype).eps) + 1e-5) * length + 1e-5).all(), np.nanmax(error / length)


@pytest.mark.parametrize("write", [rotate_and_write, rotate_and_write_plainly], ids=["triton", "reference"])
@pytest.mark.parametrize(
    "heads, dtype, plus_one",
    [(HEADS[0], "bfloat16", False), (HEADS[1], "float16", True), (HEADS[2], "float32", False)],
)
@settings(max_examples=5)
@given(data=st.data())
def test_heads_are_normalised_before_their_rotation(write, heads, dtype, plus_one, data):
    """Also beside tokens without a slot that hold nothing but NaN."""
    q, k, v, table, cache = arrays(heads, dtype, seed=data.draw(st.integers(0, 9)))
    slots = some_slots(data)
    written = np.asarray((slots >= 0) & (slots < BLOCKS * SIZE))
    q, k, v = (jnp.asarray(np.where(written[:, None, None], x, np.nan), dtype) for x in in_numpy(q, k, v))
    norms = head_norms(heads[2], dtype, plus_one)
    out, new = write(q, k, v, table, cache, slots, norms)
    assert out.dtype == q.dtype and new.k.dtype == k.dtype
    same(new.v, write_kv_cache(k, v, cache, slots, implementation="reference").v)
    slots, real = np.asarray(slots), RopeTable(*(np.asarray(x)[written] for x in table))
    out, q, k, q_weight, k_weight, before, after = in_numpy(out, q, k, norms.q, norms.k, cache.k, new.k)
    assert_rotated(out[written], normed_in_numpy(q[written], q_weight, norms), real, dtype)
    before, after = (x.reshape(BLOCKS * SIZE, *k.shape[1:]) for x in (before, after))
    assert_rotated(after[slots[written]], normed_in_numpy(k[written], k_weight, norms), real, dtype)
    kept = np.setdiff1d(np.arange(BLOCKS * SIZE), slots)
    np.testing.assert_array_equal(after[kept], before[kept])


def test_norms_have_a_gradient_on_the_reference():
    """Of queries, keys and the norms' weights, against differences."""
    q, k, v, table, cache = arrays((2, 1, 8), "float32")
    slots = jnp.asarray([3, -1, 0, 7, -1, 12], jnp.int32)

    def loss(q, k, q_weight, k_weight):
        norms = HeadNorms(q_weight, k_weight, 1e-3)
        out, written = rope_and_write_kv_cache(q, k, v, table, cache, slots, norms=norms)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(written.k))

    norms = head_norms(8, "float32", False)
    check_grads(loss, (q, k, norms.q, norms.k), order=1, modes="rev", rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("cache_dtype", ["float16", "float32"])
def test_values_are_cast_to_the_cache(cache_dtype):
    q, k, v, table, cache = arrays(HEADS[0], "bfloat16", cache_dtype)
    slots = jnp.arange(TOKENS, dtype=jnp.int32)
    same(write(k, v, cache, slots), write_kv_cache(k, v, cache, slots, implementation="reference"))
    _, written = rotate_and_write(q, k, v, table, cache, slots)
    _, expected = rope_and_write_kv_cache(q, k, v, table, cache, slots, implementation="reference")
    np.testing.assert_allclose(written.k.astype(jnp.float32), expected.k.astype(jnp.float32), rtol=1e-2, atol=1e-5)
    same(written.v, expected.v)


SPLITS = [{}, {"cp_world_size": 2, "cp_rank": 1, "cp_interleave": 2}, {"cp_world_size": 3, "cp_rank": 0}]


@pytest.mark.parametrize("split", SPLITS)
@settings(max_examples=15)
@given(data=st.data())
def test_slots_equal_the_reference(split, data):
    """Any boundaries of up to 40 rows (empty ones too), positions inside and outside the table, padding at the end."""
    rows, width, tokens, size = 40, 3, 150, 4
    ends = sorted(data.draw(st.lists(st.integers(0, tokens), min_size=rows, max_size=rows)))
    longest = size * width * split.get("cp_world_size", 1)
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    positions = jnp.asarray(rng.integers(-2, longest + 5, tokens), jnp.int32)
    table = jnp.asarray(rng.integers(0, 2**20, (rows, width)), jnp.int32)
    starts = jnp.asarray([0, *ends], jnp.int32)
    expected = slot_mapping(starts, positions, table, block_size=size, implementation="reference", **split)
    world, rank, interleave = (split.get(f"cp_{name}", 1) for name in ("world_size", "rank", "interleave"))
    rank = split.get("cp_rank", 0)
    np.testing.assert_array_equal(map_slots(starts, positions, table, size, world, rank, interleave), expected)


def test_on_a_cpu_they_refuse_and_the_reference_is_taken():
    q, k, v, table, cache = arrays(HEADS[0])
    slots = jnp.arange(TOKENS, dtype=jnp.int32)
    for function, args in (
        (write_kv_cache, (k, v, cache, slots)),
        (rope_and_write_kv_cache, (q, k, v, table, cache, slots)),
    ):
        same(function(*args), function(*args, implementation="reference"))
        with pytest.raises(ValueError, match="triton: it needs an NVIDIA GPU, this is cpu"):
            function(*args, implementation="triton")
    bytes_cache = KVCache(*(x.astype(jnp.float8_e4m3fn) for x in cache))
    with pytest.raises(ValueError, match="triton: it takes elements of two bytes or more, not float8_e4m3fn"):
        write_kv_cache(k, v, bytes_cache, slots, implementation="triton")


def test_wrong_arguments_are_named():
    q, k, v, table, cache = arrays(HEADS[0])
    slots = jnp.arange(TOKENS, dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"q must be \[6, heads, 24\] with an even last size, not \(5, 6, 24\)"):
        rope_and_write_kv_cache(q[:5], k, v, table, cache, slots)
    with pytest.raises(ValueError, match="must have one dtype, not float32, bfloat16 and bfloat16"):
        rope_and_write_kv_cache(q.astype(jnp.float32), k, v, table, cache, slots)
    with pytest.raises(ValueError, match=r"cosines and sines of shape \(6, 12\), not \(6, 11\)"):
        rope_and_write_kv_cache(q, k, v, RopeTable(table.cos[:, 1:], table.sin), cache, slots)
    with pytest.raises(ValueError, match=r"norms must have weights of shape \(24,\), not \(24,\), \(23,\)"):
        norms = HeadNorms(jnp.ones(24), jnp.ones(23), 1e-6)
        rope_and_write_kv_cache(q, k, v, table, cache, slots, norms=norms)
    with pytest.raises(ValueError, match=r"k and v must have shape \(6, 3, 24\)"):
        rope_and_write_kv_cache(q, k[:, :1], v, table, cache, slots)
