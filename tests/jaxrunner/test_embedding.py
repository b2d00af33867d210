"""Embeddings through the same runner: of whole prompts and of chunks, cached and preempted, beside generation."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, PoolingParams, SamplingParams
from jaxrunner.loading import LoadedModel
from jaxrunner.pooling import PooledRows, Pooling
from jaxrunner.protocol import NewRequestData, SchedulerOutput
from jaxrunner.step import pool_rows
from tests.jaxrunner.small_llm import OPTIONS
from tests.models import fixtures

MEAN, LAST = PoolingParams(pooling="mean", normalize=False), PoolingParams(normalize=False)


@pytest.fixture(scope="module")
def decoder(fixture):
    return fixtures.decoder_from(fixture.config, fixture.tensors)


@pytest.fixture(scope="module")
def llm(decoder):
    return LLM(LoadedModel(decoder), **OPTIONS)


@pytest.fixture(scope="module")
def hidden(fixture):
    """transformers' hidden states [40, E]: what its head, of more rows than columns, made its logits of."""
    head = fixture.tensors["lm_head.weight"].astype(np.float64)
    states, *_ = np.linalg.lstsq(head, fixture.logits.T.astype(np.float64))
    np.testing.assert_allclose(head @ states, fixture.logits.T, atol=1e-4)
    return states.T


def vectors(llm, prompts, params):
    return np.array([o.outputs.embedding for o in llm.embed(prompts, params, use_tqdm=False)])


def test_last_and_mean_over_chunks(llm, fixture, hidden):
    ids, lengths = fixture.ids.tolist(), [40, 3, 17, 1, 33]
    prompts = [ids[:n] for n in lengths]
    last, mean = vectors(llm, prompts, LAST), vectors(llm, prompts, MEAN)
    np.testing.assert_allclose(last, [hidden[n - 1] for n in lengths], atol=1e-4)
    np.testing.assert_allclose(mean, [hidden[:n].mean(axis=0) for n in lengths], atol=1e-4)


def test_normalized_by_default_and_cut_before(llm, fixture, hidden):
    ids = fixture.ids.tolist()[:9]
    (whole,) = vectors(llm, [ids], None)
    np.testing.assert_allclose(whole, hidden[8] / np.linalg.norm(hidden[8]), atol=1e-5)
    (part,) = vectors(llm, [ids], PoolingParams(dimensions=5))
    np.testing.assert_allclose(part, hidden[8, :5] / np.linalg.norm(hidden[8, :5]), atol=1e-5)


def test_a_cached_prefix(llm, fixture, hidden):
    """The last token needs no other; the mean needs all, so it reads nothing of the cache."""
    ids = fixture.ids.tolist()
    llm.reset_prefix_cache()
    llm.embed([ids], LAST, use_tqdm=False)
    hits = llm.stats().prefix_cache.hits
    np.testing.assert_allclose(vectors(llm, [ids], LAST)[0], hidden[39], atol=1e-4)
    assert llm.stats().prefix_cache.hits > hits
    np.testing.assert_allclose(vectors(llm, [ids], MEAN)[0], hidden.mean(axis=0), atol=1e-4)


def test_preempted_in_the_middle(decoder, fixture, hidden):
    """Generation that came before takes the blocks of the prompt that is being embedded."""
    llm = LLM(LoadedModel(decoder), num_gpu_blocks_override=20, **OPTIONS)
    ids = fixture.ids.tolist()
    stream = llm.stream([ids[:8]] * 2, SamplingParams(temperature=0, max_tokens=40, detokenize=False))
    next(stream)
    (embedded,) = llm.embed([ids], MEAN, use_tqdm=False)
    np.testing.assert_allclose(embedded.outputs.embedding, hidden.mean(axis=0), atol=1e-4)
    assert all(output.outputs[0].token_ids for output in stream)


def test_scores(llm, fixture):
    ids = fixture.ids.tolist()
    one, other = llm.score([ids[:5]], [ids[:5], ids[5:12]], use_tqdm=False)
    assert one.outputs.score == pytest.approx(1.0, abs=1e-5) and other.outputs.score < 0.99
    a, b = vectors(llm, [ids[:5], ids[5:12]], None)
    assert other.outputs.score == pytest.approx(float(a @ b), abs=1e-5)
    with pytest.raises(ValueError, match="text_1 has 2 texts and text_2 3"):
        llm.score([[5], [6]], [[5]] * 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling": "cls"}, "pooling must be 'last' or 'mean', got 'cls'"),
        ({"normalize": 1}, "normalize must be True or False"),
        ({"dimensions": 0}, "dimensions must be an integer of at least 1"),
    ],
)
def test_parameters_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        PoolingParams(**fields)


@pytest.mark.parametrize(
    ("params", "message"),
    [(PoolingParams(dimensions=99), "dimensions is 99"), ({"pooling": "mean"}, "must be PoolingParams, got a dict")],
)
def test_what_cannot_be_pooled_is_refused_before_it_is_queued(llm, monkeypatch, params, message):
    """A step that finds out would end the requests of everybody."""
    monkeypatch.setattr(llm.engine, "step", None)
    with pytest.raises(ValueError, match=message):
        llm.embed([[5]], params, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_what_cannot_be_pooled_is_refused():
    def plan(params, computed=0):
        return SchedulerOutput([NewRequestData("x", [5] * 9, ([1],), computed, pooling_params=params)])

    with pytest.raises(ValueError, match="'x': dimensions is 99, hidden states have 40"):
        Pooling().check(plan(PoolingParams(dimensions=99)), 40)
    with pytest.raises(ValueError, match="'x' wants the mean over its tokens and starts with 8 computed"):
        Pooling().check(plan(MEAN, 8), 40)


def test_padding_tokens_may_hold_anything():
    hidden = np.arange(12, dtype=np.float32).reshape(6, 2)
    hidden[4:] = np.nan
    rows = PooledRows(np.array([0, 1, 4, 4], np.int32), [])
    pooled = np.asarray(pool_rows(jnp.asarray(hidden), jnp.asarray(rows.starts)))
    np.testing.assert_array_equal(pooled[0], [[0, 1], [0, 1]])
    np.testing.assert_array_equal(pooled[1], [[12, 15], [6, 7]])
    np.testing.assert_array_equal(pooled[2, 0], [0, 0])
