"""Penalties, bias, bad words, allowed and held-back tokens against their formulas, one token at a time in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrunner.request_tables import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, check_tables
from jaxrunner.sampling_columns import NEEDS_TABLES
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.step.sampling import adjust_logits
from tests.cases_by_id import case
from tests.jaxrunner.step.exact import HISTORY, adjusted, device_state, flags_of

V, ROWS = 40, 4
STOP = (1, 2)


@jax.jit
def adjust(state, logits, position, flags):
    index = jnp.arange(logits.shape[0], dtype=jnp.int32)
    return adjust_logits(logits, position, state.sampling.rows(index), flags, state.tables, index)


def on_device(logits, params, prompts, outputs, stop=STOP):
    state = device_state(params, logits.shape[1], prompts, outputs, stop)
    position = np.array([len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)], np.int32)
    flags = 0
    for p, o in zip(params, outputs, strict=True):
        flags |= flags_of(p, len(o))
    return np.asarray(adjust(state, jnp.asarray(logits, jnp.float32), position, np.int32(flags)))


def test_case():
    inputs, expected = case("runner_cases", "penalties")
    params = SamplingParams(
        repetition_penalty=inputs["rep"], frequency_penalty=inputs["freq"], presence_penalty=inputs["pres"]
    )
    logits = np.array([inputs["logits"]], np.float32)
    assert on_device(logits, [params], [inputs["prompt"]], [inputs["output"]])[0].tolist() == expected["out"]


def test_a_penalty_never_rewards():
    """Token 0 stands in the prompt; its negative logit is multiplied, so token 1 wins."""
    out = on_device(np.array([[-1.0, -1.2]]), [SamplingParams(repetition_penalty=2)], [[0]], [[]])
    assert out[0].argmax() == 1


def test_presence_and_frequency_leave_the_prompt_alone():
    params = [SamplingParams(presence_penalty=2), SamplingParams(frequency_penalty=2)]
    logits = np.array([[0.0, 1.0, 0.5]] * 2)
    assert on_device(logits, params, [[1]] * 2, [[]] * 2).argmax(axis=1).tolist() == [1, 1]
    assert on_device(logits, params, [[1]] * 2, [[1]] * 2).argmax(axis=1).tolist() == [2, 2]


tokens = st.integers(0, V - 1)
some = st.lists(tokens, max_size=6)
REQUEST = st.fixed_dictionaries(
    {
        "prompt": st.lists(tokens, min_size=1, max_size=12),
        "output": st.lists(tokens, max_size=HISTORY - 14),
        "fields": st.fixed_dictionaries(
            {},
            optional={
                "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
                "frequency_penalty": st.sampled_from([-1.0, 0.5]),
                "presence_penalty": st.sampled_from([-2.0, 0.25]),
                "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, 2.5, 100.0]), max_size=5),
                "allowed_token_ids": st.lists(tokens, min_size=1, max_size=6),
                "bad_words_token_ids": st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4),
                "min_tokens": st.integers(0, 16),
                "stop_token_ids": some,
            },
        ),
    }
)


@settings(max_examples=60)
@given(requests=st.lists(REQUEST, min_size=ROWS, max_size=ROWS), seed=st.integers(0, 1000))
def test_any_mix_against_the_formulas(requests, seed):
    logits = np.random.default_rng(seed).normal(0, 3, (ROWS, V)).astype(np.float32)
    # Outputs that end like their bad words do, more often than chance would have it.
    for r in requests:
        for word in r["fields"].get("bad_words_token_ids", [])[:1]:
            r["output"] = (r["output"] + word[:-1])[-(HISTORY - 14) :]
    params = [SamplingParams(**r["fields"]) for r in requests]
    prompts, outputs = [r["prompt"] for r in requests], [r["output"] for r in requests]
    got = on_device(logits, params, prompts, outputs)
    for i, r in enumerate(requests):
        expected = adjusted(logits[i], params[i], r["prompt"], r["output"], STOP)
        held = np.isneginf(expected) & (got[i] < -1e29)  # held-back tokens are out of reach, not impossible
        np.testing.assert_allclose(np.where(held, -np.inf, got[i]), expected, rtol=1e-5, atol=1e-5)
        alone = on_device(np.roll(logits, -i, axis=0), [params[i], *[SamplingParams()] * 3],
                          [r["prompt"], *[[0]] * 3], [r["output"], *[[]] * 3])  # fmt: skip
        np.testing.assert_array_equal(alone[0], got[i])  # bit by bit what it gets without neighbours


def test_a_held_back_token_is_taken_where_nothing_else_is_left():
    params = SamplingParams(min_tokens=4, allowed_token_ids=[1])
    assert on_device(np.zeros((1, V)), [params], [[5]], [[]])[0].argmax() == 1


def test_padding_is_not_penalised():
    """A row's output is the same beside a longer one, and a row without penalties isn't touched."""
    params = [SamplingParams(frequency_penalty=1.05), SamplingParams(frequency_penalty=2.0), SamplingParams()]
    logits = np.random.default_rng(0).normal(0, 1, (3, V))
    got = on_device(logits, params, [[3]] * 3, [[4], [0] * 20, [7] * 20])
    np.testing.assert_allclose(got[0], adjusted(logits[0], params[0], [3], [4]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[2], logits[2].astype(np.float32))


def test_stale_tables_are_not_read():
    """A request without features sits where one with all of them sat."""
    loud = SamplingParams(logit_bias={3: 50}, bad_words_token_ids=[[4]], allowed_token_ids=[3], repetition_penalty=2)
    state, quiet = device_state([loud], V), device_state([SamplingParams()], V)
    mixed = type(state)(state.block_tables, state.last_sampled, quiet.sampling, state.tables)
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 1, (1, V)), jnp.float32)
    flags = np.int32(NEEDS_TABLES)
    np.testing.assert_array_equal(adjust(mixed, logits, np.array([3], np.int32), flags), logits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {i: 1.0 for i in range(MAX_LOGIT_BIAS + 1)}}, "logit_bias has 1025 entries, 1024 at most fit"),
        ({"bad_words_token_ids": [[i] for i in range(MAX_BAD_WORDS + 1)]}, "129 sequences of tokens"),
        ({"bad_words_token_ids": [[5] * (MAX_BAD_WORD_TOKENS + 1)]}, "has 17 tokens, 16 at most fit"),
        ({"logit_bias": {V: 1.0}}, "logit_bias holds 40, which is outside the vocabulary"),
        ({"allowed_token_ids": [V]}, "allowed_token_ids holds 40"),
        ({"bad_words_token_ids": [[1, V]]}, "bad_words_token_ids holds 40"),
        ({"bad_words": ["x"]}, "bad_words are texts"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_fit_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        check_tables(SamplingParams(**fields), V if "1025" not in message else 2000)
