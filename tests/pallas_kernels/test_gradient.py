"""Gradients of the reference against those that JAX finds for attention written densely."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, write_kv_cache
from pallas_kernels.metadata import KVCache
from tests.pallas_kernels.ragged import Shape, make_batch

SINKS = jnp.asarray([-1.0, 0.5, 2.0, -30.0])
CASES = {
    "few tokens": (Shape(tokens=8, rows=3, width=50), [(5, 0), (1, 170)], {"scale": 0.35}),
    "tiles": (
        Shape(tokens=80, rows=4, width=60),
        [(1, 40), (70, 150), (2, 0)],
        {"scale": 0.35, "window": 140, "soft_cap": 1.5},
    ),
}


def dense(batch, q, cache, sinks, *, scale, window=None, soft_cap=None):
    """All keys of a request at once, one request after the other; zeros for padding."""
    shape, out, start = batch.shape, jnp.zeros(q.shape), 0
    for new, seq_len, blocks in zip(batch.query_lens, batch.seq_lens, batch.tables, strict=True):
        k, v = (x[jnp.asarray(blocks)].reshape(-1, shape.kv_heads, shape.head_dim)[:seq_len] for x in cache)
        k, v = (jnp.repeat(x, shape.heads // shape.kv_heads, axis=1) for x in (k, v))
        s = scale * jnp.einsum("qhd,khd->hqk", q[start : start + new], k)
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        distance = jnp.arange(seq_len - new, seq_len)[:, None] - jnp.arange(seq_len)
        s = jnp.where((distance >= 0) & (distance < (window or seq_len)), s, -jnp.inf)
        s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:2], 1))], axis=-1)
        weights = jax.nn.softmax(s)[..., :-1]
        out = out.at[start : start + new].set(jnp.einsum("hqk,khd->qhd", weights, v))
        start += new
    return out


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_dense_attention(case):
    """For queries, both caches and sinks; poison in padding, in its cotangents too, reaches none of them."""
    shape, requests, options = CASES[case]
    batch, clean = (make_batch(shape, requests, poison=poison) for poison in (np.nan, 0))
    cotangent = np.full(batch.q.shape, np.nan, np.float32)
    cotangent[: batch.num_tokens] = np.random.default_rng(1).standard_normal(cotangent[: batch.num_tokens].shape)
    metadata = batch.metadata()

    def paged(q, cache, sinks):
        return paged_attention(q, cache, metadata, sinks=sinks, **options)

    def grads(function, batch, cotangent):
        pull = jax.jit(lambda primals, cotangent: jax.vjp(function, *primals)[1](cotangent))
        return pull((batch.queries, batch.cache, SINKS), jnp.asarray(cotangent))

    got = grads(paged, batch, cotangent)
    expected = grads(lambda *args: dense(clean, *args, **options), clean, np.nan_to_num(cotangent))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    assert jnp.abs(got[2]).max() > 0.1  # the sinks' gradient is no trifle here


def test_blocks_shared_by_requests_sum_their_gradients():
    """Two requests over one cached prefix: its keys receive from both."""
    shape = Shape(tokens=8, rows=2, width=4)
    batch = make_batch(shape, [(2, 8), (3, 8)])
    batch.tables[1][:2] = batch.tables[0][:2]

    def loss(attend):
        return jax.jit(jax.grad(lambda cache: jnp.sum(attend(cache)[: batch.num_tokens] ** 2)))(batch.cache)

    got = loss(lambda cache: paged_attention(batch.queries, cache, batch.metadata(), scale=0.5))
    sinks = jnp.full(shape.heads, -jnp.inf)
    expected = loss(lambda cache: dense(batch, batch.queries, cache, sinks, scale=0.5))
    blocks = sorted({block for table in batch.tables for block in table})
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours[np.array(blocks)], np.nan_to_num(theirs[np.array(blocks)]), atol=1e-5)


def test_a_step_is_differentiable_through_the_cache():
    """Writing and attending as one function: new keys and values receive gradients through the cache."""
    shape = Shape(tokens=8, rows=2, width=4)
    batch = make_batch(shape, [(3, 5), (2, 0)])
    metadata = batch.metadata()
    k, v = np.random.default_rng(1).standard_normal((2, shape.tokens, shape.kv_heads, shape.head_dim), np.float32)

    def loss(k, v, attend):
        cache = write_kv_cache(k, v, batch.cache, metadata.slot_mapping)
        return jnp.sum(attend(cache)[: batch.num_tokens] ** 2)

    def paged(cache):
        return paged_attention(batch.queries, cache, metadata, scale=0.5)

    def densely(cache: KVCache):
        return dense(batch, batch.queries, cache, jnp.full(shape.heads, -jnp.inf), scale=0.5)

    got, expected = (
        jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)(k, v, attend) for attend in (paged, densely)
    )
    for ours, theirs in zip(got, expected, strict=True):
        assert jnp.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
