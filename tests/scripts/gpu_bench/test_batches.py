"""The benchmark's own float64 attention, against the tests' loops; its poison; what work it counts."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVCache
from scripts.gpu_bench.attention_speed import Workload, rates
from scripts.gpu_bench.batches import Heads, expected_attention, make_batch, random_requests, values
from tests.pallas_kernels import oracle


@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"soft_cap": 0.7}, {"sinks": np.array([0.5, -1, 2, 0], np.float32), "window": 3}]
)
def test_float64_attention(options):
    heads = Heads(4, 2, 8, "float32")
    batch = make_batch([(1, 9), (7, 3), (4, 0)], heads, 4, padded_tokens=14, padded_rows=5)
    q, k, v = values(batch)
    got = expected_attention(batch, q, KVCache(jnp.asarray(k), jnp.asarray(v)), scale=0.3, **options)
    tables = [table.tolist() for table in batch.tables]
    expected = oracle.attention(q, k, v, batch.query_lens, batch.seq_lens, tables, scale=0.3, **options)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs[: batch.num_tokens], rtol=1e-10, atol=1e-12)


def test_poison_lies_wherever_no_request_has_written():
    heads = Heads(2, 1, 8, "float32")
    batch = make_batch([(2, 3), (1, 8)], heads, 4, padded_tokens=5, seed=3)
    q, k, _ = values(batch)
    owned = np.zeros((batch.num_blocks, 4), bool)
    for table, length in zip(batch.tables, batch.seq_lens, strict=True):
        owned.reshape(-1)[(table[:, None] * 4 + np.arange(4)).reshape(-1)[:length]] = True
    assert owned.sum() == 14 and (np.isnan(k).all(axis=(2, 3)) == ~owned).all() and not owned[0].any()
    assert np.isnan(q[3:]).all() and not np.isnan(q[:3]).any()
    positions, slots = batch.positions_and_slots()
    assert positions.tolist() == [3, 4, 8, 0, 0] and (slots[3:] == -1).all()
    assert slots[2] == batch.tables[1][2] * 4


def test_random_requests_fit():
    rng = np.random.default_rng(0)
    for _ in range(50):
        requests = random_requests(rng, 20, 5, 30)
        assert 1 <= len(requests) <= 5 and sum(new for new, _ in requests) <= 20
        assert all(new >= 1 and new + before <= 30 for new, before in requests)


def test_work_is_counted_by_hand():
    heads = Heads(query=4, kv=2, dim=8)
    work = Workload("two", ((1, 3), (2, 0)), "memory")
    # 6 keys in all: 4 + 2; visible pairs: 4, and 1 + 2.
    assert work.least_bytes(heads) == 2 * (2 * 6 * 2 + 2 * 3 * 4) * 8
    assert work.flops(heads) == 4 * 7 * 4 * 8
    found = rates(work, heads, 2.0, {"memory read": 384.0})
    assert found["bytes_per_s"] == 384 and found["of_memory_read"] == 1 and "of_products" not in found
