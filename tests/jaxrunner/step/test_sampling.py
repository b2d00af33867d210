"""From logits to tokens: known answers, exact distributions, independence of everything else."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.sampling_columns import (
    FILTERED,
    HELD_BACK,
    MAX_STOP_TOKEN_IDS,
    RANDOM,
    RECORD_WORDS,
    derived_seed,
    sampling_flags,
    sampling_record,
)
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.step import SamplingState, gumbel_noise, murmur3, sample
from tests.cases_by_id import case
from tests.jaxrunner.step.exact import adjusted, chi_square_fits, device_state, flags_of, probabilities

ALL = RANDOM | FILTERED | HELD_BACK


def state_of(*params: SamplingParams, stop: tuple[int, ...] = ()) -> SamplingState:
    """Rows of sampling state, through the record and its unpacking."""
    return device_state(params, 64, stop=stop).sampling.rows(jnp.arange(len(params)))


sample_jit = jax.jit(sample)


def draw(logits: np.ndarray, positions: np.ndarray, params: SamplingState, flags: int = ALL) -> np.ndarray:
    return np.asarray(sample_jit(jnp.asarray(logits, jnp.float32), jnp.asarray(positions), params, jnp.int32(flags)))


def test_murmur3_known_answers() -> None:
    inputs, expected = case("runner_cases", "murmur3")
    seeds = [-(2**63) if s == "-2^63" else 2**63 - 1 if s == "2^63-1" else int(s, 0) for s in inputs["seed"]]
    words = np.array([[s % 2**64 & 0xFFFFFFFF, s % 2**64 >> 32] for s in seeds], np.uint32)
    pos, off = np.array(inputs["pos"], np.uint32), np.array(inputs["off"], np.uint32)
    for name, domain in (("hash", 0), ("hash_domain_9E3779B9", 0x9E3779B9)):
        hashes = murmur3((words[:, 0], words[:, 1], pos, off), domain)
        assert [f"{int(h):08X}" for h in hashes] == expected[name]


OUTPUT = [2, 2, 5]
DISTRIBUTIONS = [
    {},  # only a temperature: every token may come
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.5, "min_p": 0.05, "top_k": 6, "top_p": 0.9},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.4},
    {"presence_penalty": -0.7},
    {"logit_bias": {3: 1.5, 6: -2}},
    {"allowed_token_ids": [1, 3, 5]},
    {"bad_words_token_ids": [[5, 0], [7]]},
    {"min_tokens": 9, "stop_token_ids": [0]},
    {
        **{"temperature": 0.9, "min_p": 0.02, "top_k": 6, "top_p": 0.95, "repetition_penalty": 1.2},
        **{"frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {3: 1.5}, "min_tokens": 9},
        **{"allowed_token_ids": [0, 1, 2, 3, 5, 6, 7], "bad_words_token_ids": [[2, 5, 1]], "stop_token_ids": [4]},
    },
]


@pytest.mark.parametrize("fields", DISTRIBUTIONS, ids=str)
def test_distribution(fields: dict) -> None:
    """Draws over seeds follow the exact distribution: of each feature, and of all together."""
    logits = np.array([1.5, 1.0, 0.3, 0.0, -0.5, -1.0, -2.0, 0.9], np.float32)
    params, n, prompt = SamplingParams(seed=7, **fields), 20_000, [1, 6]
    state = device_state([params], 8, [prompt], [OUTPUT])
    position = np.full(n, len(prompt) + len(OUTPUT), np.int32)
    rows = jax.tree.map(lambda a: jnp.repeat(a[:1], n, axis=0), state.sampling)
    rows = replace(rows, seed=jnp.stack([jnp.arange(n, dtype=jnp.int32), rows.seed[:, 1]], axis=1))
    index = np.zeros(n, np.int32)
    flags = np.int32(flags_of(params, len(OUTPUT)))
    drawn = np.asarray(sample_jit(jnp.tile(logits, (n, 1)), position, rows, flags, state.tables, index))
    expected = probabilities(adjusted(logits, params, prompt, OUTPUT), params)
    assert chi_square_fits(np.bincount(drawn, minlength=8), expected)


def test_draws_over_positions_follow_the_distribution() -> None:
    logits, n = np.array([1.5, 1.0, 0.3, 0.0], np.float32), 20_000
    rows = jax.tree.map(lambda a: jnp.repeat(a, n, axis=0), state_of(SamplingParams(seed=7)))
    drawn = draw(np.tile(logits, (n, 1)), np.arange(n, dtype=np.int32), rows)
    assert chi_square_fits(np.bincount(drawn, minlength=4), probabilities(logits, SamplingParams()))


def test_a_wrong_distribution_is_noticed() -> None:
    probability = np.array([0.5, 0.3, 0.2])
    assert not chi_square_fits(np.array([11_000, 5_800, 3_200]), probability)


def test_noise_depends_on_seed_position_and_token_only() -> None:
    seeds = jnp.array([[1, 0], [1, 0], [2, 0], [1, 1]], jnp.int32)
    noise = np.asarray(gumbel_noise(seeds, jnp.array([5, 6, 5, 5]), 64))
    alone = np.asarray(gumbel_noise(seeds[2:3], jnp.array([5]), 64))
    np.testing.assert_array_equal(noise[2], alone[0])  # batch mates don't matter
    np.testing.assert_array_equal(noise[:, :16], np.asarray(gumbel_noise(seeds, jnp.array([5, 6, 5, 5]), 16)))
    for a in range(4):
        for b in range(a):
            assert not np.array_equal(noise[a], noise[b])
    assert np.isfinite(noise).all()


def test_greedy_rows_beside_random_ones() -> None:
    """Whatever the flags and the neighbours: the lowest of the most likely tokens."""
    logits = np.tile(np.array([0.0, 3.0, 1.0, 3.0], np.float32), (4, 1))
    params = [SamplingParams(temperature=t, top_k=k) for t, k in [(0, 0), (1, 10**7), (1, 0), (0, 2)]]
    positions = np.arange(4, dtype=np.int32)
    tokens = draw(logits, positions, state_of(*params))
    assert tokens[0] == tokens[3] == 1
    greedy = state_of(*[SamplingParams(temperature=0)] * 4)
    assert draw(logits, positions, greedy, flags=0).tolist() == [1, 1, 1, 1]
    assert draw(logits, positions, greedy, flags=ALL).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-7])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 50, (4, 100)).astype(np.float32)
    params = state_of(*[SamplingParams(temperature=temperature, seed=i) for i in range(4)])
    assert draw(logits, np.arange(4, dtype=np.int32), params).tolist() == logits.argmax(axis=1).tolist()


def test_top_k_of_one_is_greedy() -> None:
    logits = np.random.default_rng(0).normal(0, 1, (8, 50)).astype(np.float32)
    params = state_of(*[SamplingParams(top_k=1)] * 8)
    assert draw(logits, np.arange(8, dtype=np.int32), params).tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("top_p", [1e-5, 1e-30, 1e-39, 1e-100])
def test_a_vanishing_top_p_keeps_the_likeliest(top_p: float) -> None:
    """Below float32's range a product with it would be 0, which every set reaches."""
    logits = np.array([[0.0, 1.0, 5.0, 2.0]] * 4, np.float32)
    params = state_of(*[SamplingParams(top_p=top_p, seed=i) for i in range(4)])
    assert draw(logits, np.arange(4, dtype=np.int32), params).tolist() == [2, 2, 2, 2]


def test_min_tokens_holds_stop_tokens_back() -> None:
    """Position 3 + 4 is the first at which a request with 3 prompt tokens and min_tokens 4 may stop."""
    logits = np.array([[0.0, 5.0, 4.0, 1.0]] * 3, np.float32)
    params = state_of(*[SamplingParams(temperature=0, min_tokens=4)] * 3, stop=(1, 2))
    assert draw(logits, np.array([3, 6, 7], np.int32), params, HELD_BACK).tolist() == [3, 3, 1]


def test_record_limits_and_flags() -> None:
    many = tuple(range(MAX_STOP_TOKEN_IDS + 1))
    assert len(sampling_record(SamplingParams(), "r", 1, many, 0)) == 4 * RECORD_WORDS  # nothing to hold back
    with pytest.raises(ValueError, match="min_tokens holds back at most 32 stop token ids, got 33"):
        sampling_record(SamplingParams(min_tokens=1), "r", 1, many, 0)
    assert sampling_flags(SamplingParams(temperature=0, top_k=5)) == 0
    assert sampling_flags(SamplingParams()) == RANDOM
    assert sampling_flags(SamplingParams(min_p=0.1)) == RANDOM | FILTERED


def test_unseeded_requests_differ_and_repeat() -> None:
    assert derived_seed(0, "a") == derived_seed(0, "a")
    assert len({derived_seed(0, "a"), derived_seed(0, "b"), derived_seed(1, "a")}) == 3
