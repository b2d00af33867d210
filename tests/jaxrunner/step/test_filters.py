"""min_p, top_k and top_p against sorting, whether the most likely tokens settle a row or it is searched."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrunner.step.filters import Filters, Scaled, filter_floor
from tests.cases_by_id import case
from tests.jaxrunner.step.exact import kept_by_sorting

CANDIDATES = [2, 8, 64]  # of 32 tokens: hardly ever enough, sometimes, always


@partial(jax.jit, static_argnames="num_candidates")
def floors(scaled, min_p, top_k, top_p, num_candidates):
    n = len(scaled)
    filters = Filters(min_p, top_k, top_p)
    floor, settled, *_ = filter_floor(
        Scaled(scaled, jnp.zeros(n), jnp.ones(n)), filters, filters.used(scaled.shape[1]), num_candidates
    )
    return floor, settled


def kept(scaled, min_p=0.0, top_k=0, top_p=1.0, num_candidates=64):
    """Which tokens of each row stay, and whether the candidates settled it."""
    full = [jnp.broadcast_to(jnp.asarray(x, t), len(scaled)) for x, t in ((min_p, "f4"), (top_k, "i4"), (top_p, "f4"))]
    floor, settled = floors(jnp.asarray(scaled, jnp.float32), *full, num_candidates)
    return scaled >= np.asarray(floor)[:, None], np.asarray(settled)


@pytest.mark.parametrize(("case_id", "field"), [("min_p", "min_p"), ("top_p", "top_p")])
def test_cases(case_id, field):
    inputs, expected = case("runner_cases", case_id)
    value = np.ravel(inputs[field])[0].item()
    logits = np.log(np.array([inputs["p"]], np.float32))
    stays, _ = kept(logits - logits.max(), **{field: value})
    assert stays[0].astype(int).tolist() == np.ravel(expected["keep"]).tolist()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 10, 31, 32, 10**7]),
    top_p=st.sampled_from([1.0, 0.999, 0.7, 0.2, 1e-6]),
    spread=st.sampled_from([0.2, 2.0, 8.0]),
    ties=st.booleans(),
)
def test_against_sorting(seed, min_p, top_k, top_p, spread, ties):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (3, 32)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    scaled = logits - logits.max(axis=1, keepdims=True)
    for num_candidates in CANDIDATES:
        stays, _ = kept(scaled, min_p, top_k, top_p, num_candidates)
        for row, stay in zip(scaled.astype(np.float64), stays, strict=True):
            expected = kept_by_sorting(row, min_p, top_k, top_p)
            # At the very edge of top_p, float32 sums may go either way: only there may the two differ.
            p = np.where(expected | stay, np.exp(row), 0)
            for token in np.flatnonzero(stay != expected):
                above = p[p > p[token]].sum() / p.sum()
                assert abs(above - top_p) < 1e-5, (token, above)
            assert stay[np.argmax(row)]


def test_when_candidates_settle_a_row():
    """Of 32 tokens 8 are looked at. Ties with the last of them can't be told from those behind it."""
    falling = -np.arange(32, dtype=np.float32)
    flat = np.where(np.arange(32) < 7, falling, -7.0).astype(np.float32)
    rows = {"top_k 7": (falling, 0.0, 7, 1.0), "top_k 8": (falling, 0.0, 8, 1.0), "top_p": (falling, 0.0, 0, 0.9)}
    rows |= {"min_p": (falling, 0.1, 0, 1.0), "ties": (flat, 0.0, 8, 1.0), "wide top_p": (falling / 20, 0.0, 0, 0.9)}
    scaled, *filters = (np.stack(column) for column in zip(*rows.values(), strict=True))
    _, settled = kept(scaled, *filters, num_candidates=8)
    assert dict(zip(rows, settled.tolist(), strict=True)) == {
        "top_k 7": True, "top_k 8": False, "top_p": True, "min_p": True, "ties": False, "wide top_p": False,
    }  # fmt: skip


@pytest.mark.parametrize("num_candidates", [4, 64])
def test_a_rows_floor_is_its_own(num_candidates):
    """Bit by bit, whatever its neighbours have and wherever it stands, searched (4 candidates) or not."""
    rng = np.random.default_rng(0)
    scaled = rng.normal(0, 1, (40, 32)).astype(np.float32)
    scaled -= scaled.max(axis=1, keepdims=True)
    min_p, top_k = rng.choice([0.0, 0.05], 40).astype(np.float32), rng.choice([0, 5, 20], 40).astype(np.int32)
    top_p = rng.choice([1.0, 0.9, 0.5], 40).astype(np.float32)
    whole, _ = floors(scaled, min_p, top_k, top_p, num_candidates)
    order = rng.permutation(40)
    moved, _ = floors(scaled[order], min_p[order], top_k[order], top_p[order], num_candidates)
    np.testing.assert_array_equal(whole[order], moved)
    for row in range(0, 40, 7):
        alone = np.zeros(40, bool)
        alone[row] = True
        quiet = [np.where(alone, x, fill) for x, fill in ((min_p, 0.0), (top_k, 0), (top_p, 1.0))]
        found, _ = floors(
            scaled,
            *(jnp.asarray(x, y.dtype) for x, y in zip(quiet, (min_p, top_k, top_p), strict=True)),
            num_candidates,
        )
        assert found[row] == whole[row]
