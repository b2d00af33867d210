"""The largest in two levels is the largest in one."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.step.top import group_size, row_argmax, row_top_k


def test_group_sizes():
    assert group_size(49152) == group_size(128256) == group_size(151936) == 128
    assert group_size(50280) == 120 and group_size(64) == 64  # a divisor needs no padding
    assert group_size(50257) == 128  # 29 x 1733: padded


@pytest.mark.parametrize("vocab_size", [7, 64, 1009, 2048])
def test_argmax_takes_the_first(vocab_size):
    rng = np.random.default_rng(vocab_size)
    x = rng.integers(0, 30, (5, vocab_size)).astype(np.float32)  # many ties
    x[1, -1], x[2, 3] = 99.0, np.nan
    x[3] = -np.inf
    np.testing.assert_array_equal(row_argmax(jnp.asarray(x)), np.argmax(x, axis=1))


@pytest.mark.parametrize(("vocab_size", "k"), [(7, 7), (1009, 3), (2048, 3), (2048, 1)])
def test_top_k_is_sorted_and_exact(vocab_size, k):
    rng = np.random.default_rng(vocab_size)
    x = np.round(rng.normal(0, 2, (6, vocab_size))).astype(np.float32)
    values, ids = row_top_k(jnp.asarray(x), k)
    np.testing.assert_array_equal(values, -np.sort(-x, axis=1)[:, :k])
    np.testing.assert_array_equal(values, np.take_along_axis(x, np.asarray(ids), axis=1))
    assert all(len(set(row)) == k for row in np.asarray(ids).tolist())
