"""Sampling through the whole engine, on checkpoints whose distribution is known."""

import math

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from tests.jaxrunner.chain import successor_logits, write_chain

V = 64
OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "token_buckets": [32], "logits_buckets": [8], "quiet": True}


def logits():
    """From token 0 on: five likely tokens. 1: two that are equally likely. 2: sharp and large. 3: anything."""
    table = np.random.default_rng(0).standard_normal((V, V)).astype(np.float32)
    table[0] = -40.0
    table[0, 10:15] = [0.0, 0.5, 1.0, 1.5, 2.0]
    table[1] = -5.0
    table[1, [20, 41]] = 3.0
    table[2] = np.float32(50) * successor_logits(V, {2: 33})[2]
    table[33] = np.float32(50) * successor_logits(V, {33: 2})[33]
    return table


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(write_chain(tmp_path_factory.mktemp("logits"), logits()), **OPTIONS)


def params(**values):
    return SamplingParams(detokenize=False, **values)


def run(llm, prompts, sampling):
    return [[s.token_ids for s in o.outputs] for o in llm.generate(prompts, sampling, use_tqdm=False)]


def test_extreme_top_k_beside_a_greedy_request(llm):
    greedy = params(temperature=0, max_tokens=6)
    each = [greedy, *(params(top_k=k, max_tokens=6) for k in (10**7, -1, 5))]
    together = run(llm, [[3]] * 4, each)
    assert all(len(tokens[0]) == 6 for tokens in together)
    assert together[0] == run(llm, [[3]], greedy)[0]


def test_tiny_temperatures_are_greedy(llm):
    temperatures = [1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 0.0]
    outputs = run(llm, [[2]] * 6, [params(temperature=t, max_tokens=4) for t in temperatures])
    assert outputs == [[[33, 2, 33, 2]]] * 6


def test_sequences_of_a_seeded_request_differ_and_repeat(llm):
    sampling = params(n=4, seed=7, temperature=1.5, max_tokens=8)
    first, second = run(llm, [[3]], sampling), run(llm, [[3]], sampling)
    assert first == second
    assert len(set(map(tuple, first[0]))) > 1


def test_unseeded_copies_of_a_prompt_differ(llm):
    outputs = run(llm, [[3]] * 8, params(temperature=1.5, max_tokens=8))
    assert len({tuple(tokens[0]) for tokens in outputs}) > 1


def test_unseeded_runs_of_a_new_engine_repeat(llm, tmp_path):
    again = [LLM(write_chain(tmp_path, logits()), seed=5, **OPTIONS) for _ in range(2)]
    runs = [run(new, [[3]] * 3, params(max_tokens=8)) for new in again]
    assert runs[0] == runs[1]
    assert run(again[0], [[3]] * 3, params(max_tokens=8)) != runs[0]  # later requests draw anew


def test_temperature_alone_draws_from_the_softmax(llm):
    draws = [tokens[0][0] for tokens in run(llm, [[0]] * 500, params(temperature=1.0, max_tokens=1))]
    weights = [math.exp(x) for x in (0.0, 0.5, 1.0, 1.5, 2.0)]
    expected = [500 * w / sum(weights) for w in weights]
    counts = [draws.count(token) for token in range(10, 15)]
    assert sum(counts) == 500
    chi_squared = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    assert chi_squared < 18.5  # 4 degrees of freedom: one draw in a thousand is above


@pytest.mark.parametrize("size", [1, 3, 8])
def test_ties_always_fall_the_same_way(llm, size):
    assert run(llm, [[1]] * size, params(temperature=0, max_tokens=1)) == [[[20]]] * size
