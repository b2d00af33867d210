"""What every attention implementation must pass: any ragged batch, against float64 loops, poison all around it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import GroupSpec, StepAttention
from tests.pallas_kernels.implementations import CASES, QUICK, TESTED, attend, pairs, refusal, time_limit
from tests.pallas_kernels.ragged import make_batch, requests_of

each_of_them = pytest.mark.parametrize("tested", TESTED, ids=[each.name for each in TESTED])


def check(tested, case, batch, sinks=None, causal=True):
    """The result is right within what rounding to the dtype explains, and 0 for padding tokens.

    With unit roundoff u of the dtype: weights are rounded before they multiply values (u * sum of weight * |value|),
    the result is rounded (u * |result|), and float32 sums add far less; twice that is allowed.
    """
    out = attend(tested, case, batch, sinks=None if sinks is None else jnp.asarray(sinks), causal=causal)
    assert out.dtype == case.shape.dtype
    out = np.asarray(out.astype(jnp.float32), np.float64)
    expected, magnitude = batch.expected_with_magnitude(sinks=sinks, causal=causal, **case.options)
    roundoff = float(jnp.finfo(case.shape.dtype).eps) / 2
    allowed = 2 * roundoff * (magnitude + np.abs(expected)) + 1e-5
    error = np.abs(out - expected)
    assert (error <= allowed).all(), f"error up to {np.max(error / allowed):.2f} times what is allowed"
    assert (out[batch.num_tokens :] == 0).all()


@pytest.mark.parametrize(("tested", "name"), pairs())
def test_any_ragged_batch(tested, name):
    case = CASES[name]

    @settings(max_examples=tested.examples)
    @given(data=st.data())
    def any_batch(data):
        seed = data.draw(st.integers(0, 2**32 - 1))
        requests = data.draw(requests_of(case.shape))
        poison = data.draw(st.sampled_from([np.nan, np.inf]))
        batch = make_batch(case.shape, requests, seed=seed, poison=poison, window=case.window)
        sinks = np.random.default_rng(seed).normal(0, 3, case.shape.heads).astype(np.float32) if case.sinks else None
        check(tested, case, batch, sinks)

    with time_limit(tested.seconds):
        any_batch()


@each_of_them
def test_a_step_without_tokens_gives_zeros(tested):
    with time_limit(tested.seconds):
        for name in ("decode", "mixed"):
            check(tested, CASES[name], make_batch(CASES[name].shape, []))


@each_of_them
def test_rows_without_tokens_between_others(tested):
    """A request that isn't scheduled in this step has an empty interval, and costs its neighbours nothing."""
    with time_limit(tested.seconds):
        for name in ("decode", "mixed"):
            check(tested, CASES[name], make_batch(CASES[name].shape, [(1, 60), (0, 33), (3, 90), (0, 0)]))


@each_of_them
def test_long_and_short_requests_share_a_step(tested):
    """More tokens than any tile holds, between few: tiles that are full, and others at the token array's end."""
    case = CASES["mixed"]
    with time_limit(tested.seconds):
        check(tested, case, make_batch(case.shape, [(3, 60), (33, 40), (2, 0)]))


# An interpreter that multiplies with NumPy warns of what the test is about.
@pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning")
@each_of_them
def test_a_request_of_nan_leaves_the_others_as_they_are(tested):
    """Queries, keys and values of one request are NaN, or infinite: to the last bit the others don't notice."""
    requests = {"decode": [(1, 20), (1, 150), (1, 3), (1, 64)], "mixed": [(2, 40), (9, 100), (1, 7), (12, 0)]}
    with time_limit(tested.seconds):
        for name, broken, value in [("decode", 1, np.nan), ("mixed", 1, np.nan), ("mixed", 2, np.inf)]:
            case = CASES[name]
            batch = make_batch(case.shape, requests[name])
            before = np.asarray(attend(tested, case, batch).astype(jnp.float32))
            starts = np.cumsum([0, *batch.query_lens])
            own = np.zeros(case.shape.tokens, bool)
            own[starts[broken] : starts[broken + 1]] = True
            batch.q[own] = value
            batch.k[batch.tables[broken]] = batch.v[batch.tables[broken]] = value
            after = np.asarray(attend(tested, case, batch).astype(jnp.float32))
            np.testing.assert_array_equal(after[~own], before[~own])


@each_of_them
def test_update_block_table(tested):
    """Metadata of one group serves another that differs in table and slots."""
    case = CASES["mixed"]
    one, other = (make_batch(case.shape, [(1, 40), (5, 9)], seed=seed) for seed in (1, 2))
    implementation, layer = tested.implementation, case.layer

    @partial(jax.jit, compiler_options=QUICK)
    def step(q, cache, metadata, table, slots):
        built = implementation.build(metadata, GroupSpec(case.shape.block_size, (layer,)))
        built = implementation.update_block_table(built, table, slots)
        return implementation.attend(q, cache, built, layer)

    metadata = other.metadata()
    with time_limit(tested.seconds):
        out = step(other.queries, other.cache, one.metadata(), metadata.block_table, metadata.slot_mapping)
    out = np.asarray(out.astype(jnp.float32))
    np.testing.assert_allclose(out, other.expected(**case.options), rtol=2e-2, atol=2e-2)


@each_of_them
def test_step_attention_writes_then_attends(tested):
    """The way a model calls it: what the step itself writes is seen."""
    case = CASES["decode"]
    shape, layer, implementation = case.shape, case.layer, tested.implementation
    batch = make_batch(shape, [(1, 40), (5, 2)])
    metadata = batch.metadata()
    expected = batch.expected(**case.options)
    # What this step writes is not in the cache yet.
    slots = np.asarray(metadata.slot_mapping)[: batch.num_tokens]
    k, v = (np.full((shape.tokens, shape.kv_heads, shape.head_dim), np.nan, np.float32) for _ in "kv")
    for new, cached in ((k, batch.k), (v, batch.v)):
        flat = cached.reshape(-1, shape.kv_heads, shape.head_dim)
        new[: batch.num_tokens] = flat[slots]
        flat[slots] = np.nan

    @partial(jax.jit, compiler_options=QUICK)
    def step(q, k, v, cache, metadata):
        built = implementation.build(metadata, GroupSpec(shape.block_size, (layer,)))
        return StepAttention(implementation, built, metadata.slot_mapping)(q, k, v, cache, layer)

    k, v = (jnp.asarray(x, shape.dtype) for x in (k, v))
    with time_limit(tested.seconds):
        out, _ = step(batch.queries, k, v, batch.cache, metadata)
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), expected, rtol=2e-2, atol=2e-2)


def test_every_case_is_taken_and_each_implementation_takes_most():
    for tested in TESTED:
        left_out = {name: reason for name, case in CASES.items() if (reason := refusal(tested, case)) is not None}
        assert len(left_out) < len(CASES) / 2, left_out
    assert {name for param in pairs() for name in [param.values[1]]} == set(CASES)
