"""The cache write: what it touches, what it leaves alone, and that it happens in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import KVCache, write_kv_cache

BLOCKS, SIZE, HEADS, HEAD_DIM, TOKENS = 6, 4, 2, 3, 8
write = jax.jit(write_kv_cache)


def new_and_cache(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, TOKENS, HEADS, HEAD_DIM)).astype(np.float32)
    cache = rng.standard_normal((2, BLOCKS, SIZE, HEADS, HEAD_DIM)).astype(np.float32)
    return jnp.asarray(k), jnp.asarray(v), KVCache(*(jnp.asarray(x, dtype) for x in cache))


@given(st.lists(st.integers(0, BLOCKS * SIZE - 1), unique=True, max_size=TOKENS), st.randoms())
def test_only_the_named_slots_change(slots, random):
    """Tokens without a slot, wherever they stand among the others, touch nothing: not the last slot either."""
    slots = [*slots, *[-1] * (TOKENS - len(slots))]
    random.shuffle(slots)
    k, v, cache = new_and_cache()
    out = write(k, v, cache, jnp.asarray(slots, jnp.int32))
    for new, before, after in ((k, cache.k, out.k), (v, cache.v, out.v)):
        expected = np.array(before).reshape(-1, HEADS, HEAD_DIM)
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = new[token]
        np.testing.assert_array_equal(np.asarray(after).reshape(expected.shape), expected)


@pytest.mark.parametrize("slot", [-1, -5, -(2**31), BLOCKS * SIZE, 2**31 - 1])
def test_a_slot_outside_the_cache_writes_nothing(slot):
    k, v, cache = new_and_cache()
    out = write(k, v, cache, jnp.full(TOKENS, slot, jnp.int32))
    np.testing.assert_array_equal(out.k, cache.k)
    np.testing.assert_array_equal(out.v, cache.v)


def test_values_are_cast_to_the_cache():
    k, v, cache = new_and_cache(jnp.bfloat16)
    out = write(k, v, cache, jnp.arange(TOKENS, dtype=jnp.int32))
    assert out.k.dtype == out.v.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.k[1, 3], k[7].astype(jnp.bfloat16))


def test_a_donated_cache_is_written_in_place():
    """Also with other work before and after, as in a step: the compiled program holds no copy of the cache."""
    k, v, cache = new_and_cache()
    slots = jnp.arange(TOKENS, dtype=jnp.int32)

    def step(k, v, cache, slots):
        cache = write_kv_cache(k * 2, v, cache, slots)
        return cache, jnp.sum(cache.k[1]) + jnp.sum(cache.v[2])

    compiled = jax.jit(step, donate_argnums=2).lower(k, v, cache, slots).compile()
    shape = f"f32[{BLOCKS},{SIZE},{HEADS},{HEAD_DIM}]"
    assert [line for line in compiled.as_text().splitlines() if shape in line]
    assert not [line for line in compiled.as_text().splitlines() if shape in line and " copy(" in line]
    assert compiled.memory_analysis().alias_size_in_bytes == cache.k.nbytes + cache.v.nbytes
    cache = KVCache(*(x + 0 for x in cache))  # a buffer of JAX's own: NumPy's can't be donated
    pointers = [x.unsafe_buffer_pointer() for x in cache]
    out, _ = compiled(k, v, cache, slots)
    assert [x.unsafe_buffer_pointer() for x in out] == pointers


def test_the_write_is_differentiable():
    """A written slot's cotangent goes to the token, and none of it to what the slot held before."""
    k, v, cache = new_and_cache()
    slots = jnp.asarray([5, -1, 0, -1, -1, -1, -1, 23], jnp.int32)
    loss = lambda k, cache: jnp.sum(write_kv_cache(k, v, cache, slots).k)  # noqa: E731
    d_k, d_cache = jax.grad(loss, argnums=(0, 1))(k, cache)
    np.testing.assert_array_equal(d_k[:, 0, 0], [1, 0, 1, 0, 0, 0, 0, 1])
    held = np.ones(BLOCKS * SIZE)
    held[[5, 0, 23]] = 0
    np.testing.assert_array_equal(d_cache.k[..., 0, 0].reshape(-1), held)


def test_large_caches_are_addressed_without_overflow():
    """A cache of more than 2**31 elements, only traced: block and offset are separate indices, each in range."""
    cache = KVCache(*(jax.ShapeDtypeStruct((2**20, 16, 8, 128), jnp.bfloat16) for _ in "kv"))
    k = jax.ShapeDtypeStruct((TOKENS, 8, 128), jnp.float32)
    slots = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    text = jax.jit(write_kv_cache).lower(k, k, cache, slots).as_text()
    scatters = [line for line in text.splitlines() if "stablehlo.scatter" in line]
    assert len(scatters) == 2
    assert all("scatter_dims_to_operand_dims = [0, 1]" in line for line in scatters)


def test_wrong_arguments_are_named():
    k, v, cache = new_and_cache()
    slots = jnp.arange(TOKENS, dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"k and v must have shape \(8, 2, 3\) .*, not \(7, 2, 3\)"):
        write_kv_cache(k[:7], v, cache, slots)
    with pytest.raises(ValueError, match="must have one shape"):
        write_kv_cache(k, v, KVCache(cache.k, cache.v[:3]), slots)
    with pytest.raises(ValueError, match="no implementation 'mosaic'; there is: auto, triton, reference"):
        write_kv_cache(k, v, cache, slots, implementation="mosaic")
    huge = KVCache(*(jax.ShapeDtypeStruct((2**27, 16, HEADS, HEAD_DIM), jnp.bfloat16) for _ in "kv"))
    with pytest.raises(ValueError, match=r"has 2147483648 slots; .* fewer than 2\*\*31"):
        jax.eval_shape(write_kv_cache, k, v, huge, slots)
