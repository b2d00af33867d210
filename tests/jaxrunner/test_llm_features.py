"""Penalties, bias, bad words and allowed tokens through the whole engine, and any mix of features in one batch."""

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from tests.jaxrunner.chain import successor_logits, word_tokenizer, write_chain
from tests.jaxrunner.small_llm import OPTIONS

WORDS = ["<unk>", "foo", "bar", "baz", " foobar", "a", "b", "c"]
V = 48


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Noisy successors: a token's likeliest follower leads by a little, so that every feature changes what is said."""
    logits = np.random.default_rng(0).normal(0, 1, (V, V)).astype(np.float32) + successor_logits(V, {}, 2.0)
    words = WORDS + [f"w{i}" for i in range(len(WORDS), V)]
    return LLM(write_chain(tmp_path_factory.mktemp("chain"), logits, word_tokenizer(words)), **OPTIONS)


def tokens(llm, prompts, params):
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def greedy(**fields):
    return SamplingParams(temperature=0, **{"max_tokens": 12, "detokenize": False} | fields)


def test_bias_and_allowed_tokens(llm):
    assert tokens(llm, [[5]], greedy(logit_bias={30: 100})) == [[30] * 12]
    assert set(tokens(llm, [[5]], greedy(allowed_token_ids=[8, 9]))[0]) <= {8, 9}


def test_a_large_presence_penalty_says_nothing_twice(llm):
    (said,) = tokens(llm, [[5]], greedy(presence_penalty=2, frequency_penalty=2, max_tokens=20))
    assert len(set(said)) > len(set(tokens(llm, [[5]], greedy(max_tokens=20))[0])) or len(set(said)) == 20


@pytest.mark.parametrize("prompt", [[5], [30, 30, 5]], ids=["not in the prompt", "in the prompt"])
def test_presence_counts_the_output_alone(llm, prompt):
    params = greedy(logit_bias={30: 100, 31: 99}, presence_penalty=2)
    assert tokens(llm, [prompt], params)[0][:2] == [30, 31]


def test_bad_words_in_both_forms(llm):
    """ " foobar" is one token, "foobar" would be others: neither is said, though bias wants nothing else."""
    params = greedy(logit_bias={4: 100, 1: 50}, bad_words=["foobar", "foo"])
    said = tokens(llm, [[5]], params)[0]
    assert 1 not in said
    assert tokens(llm, [[5]], greedy(logit_bias={1: 50}))[0] == [1] * 12


def test_bad_words_of_several_tokens(llm):
    params = greedy(logit_bias={20: 40, 21: 30}, bad_words_token_ids=[[20, 20]])
    assert tokens(llm, [[5]], params)[0] == [20, 21] * 6
    # The prompt is not part of what the output repeats.
    assert tokens(llm, [[5, 20]], params)[0][0] == 20


def test_what_rules_out_every_token_is_refused(llm):
    everything = [[i] for i in range(V)]
    for fields, message in [
        (
            {"allowed_token_ids": [8, 9], "bad_words_token_ids": [[9], [8]]},
            r"every token of allowed_token_ids \[8, 9\]",
        ),
        ({"bad_words_token_ids": everything}, "every token of the vocabulary"),
    ]:
        with pytest.raises(ValueError, match=f"bad_words rule out {message}"):
            llm.generate([[5]], greedy(**fields))
    left = {"allowed_token_ids": [8, 9], "bad_words_token_ids": [[9], [7, 8]]}
    assert tokens(llm, [[5]], greedy(**left))[0] == [8] * 12


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"top_p": 0.5, "seed": 3}], ids=str
)
def test_a_request_that_rules_out_every_token_later_ends_with_the_reason(llm, fields):
    """After 8 neither 8 nor 9 may come: that shows when it is there. Others in the step go on."""
    bad = {"allowed_token_ids": [8, 9], "bad_words_token_ids": [[9], [8, 8]]}
    params = [SamplingParams(detokenize=False, max_tokens=12, **fields, **bad), greedy()]
    stuck, other = llm.generate([[5], [5]], params, use_tqdm=False)
    assert stuck.outputs[0].finish_reason == "error" and stuck.outputs[0].token_ids == [8]
    assert "no token is left to sample" in stuck.error
    assert other.error is None and other.outputs[0].token_ids == tokens(llm, [[5]], greedy())[0]
    # All but one are bad words, and the one becomes it: without allowed_token_ids.
    bad = {"bad_words_token_ids": [*([i] for i in range(V) if i != 8), [8, 8]]}
    (stuck,) = llm.generate([[5]], SamplingParams(detokenize=False, max_tokens=12, **fields, **bad), use_tqdm=False)
    assert stuck.outputs[0].token_ids == [8] and "no token is left" in stuck.error


@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {V: 1}}, {"allowed_token_ids": [V]}, {"stop_token_ids": [V]}, {"bad_words_token_ids": [[V]]}],
    ids=str,
)
def test_ids_outside_the_vocabulary_are_refused_and_the_engine_lives(llm, fields):
    before = tokens(llm, [[5]], greedy())
    with pytest.raises(ValueError, match=f"{V}.* outside the vocabulary"):
        llm.generate([[5]], greedy(**fields))
    assert tokens(llm, [[5]], greedy()) == before


MIX = [
    {"temperature": 0.0},
    {"seed": 1, "temperature": 1.5},
    {"seed": 2, "top_k": 3},
    {"seed": 3, "top_p": 0.6, "min_p": 0.01},
    {"seed": 4, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 1.0},
    {"seed": 5, "logit_bias": {9: 3.0, 11: -5.0}},
    {"seed": 6, "allowed_token_ids": [3, 9, 11, 20, 21], "bad_words_token_ids": [[9, 9], [20]]},
    {"seed": 7, "min_tokens": 9, "stop_token_ids": [6, 7, 8, 9]},
    {"seed": 8, "top_k": 10, "top_p": 0.9, "repetition_penalty": 1.2, "bad_words_token_ids": [[5]]},
]  # fmt: skip


def test_any_mix_gives_each_request_what_it_gets_alone(llm):
    """More requests than rows, prompts longer than a step: rows move, prompts are cut. Same padded sizes throughout."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, V, rng.integers(1, 40)).tolist() for _ in MIX]
    params = [SamplingParams(detokenize=False, max_tokens=16, **fields) for fields in MIX]
    llm.reset_prefix_cache()
    alone = [tokens(llm, [p], q)[0] for p, q in zip(prompts, params, strict=True)]
    for seed in range(3):
        llm.reset_prefix_cache()
        order = np.random.default_rng(seed).permutation(len(MIX))
        together = tokens(llm, [prompts[i] for i in order], [params[i] for i in order])
        assert together == [alone[i] for i in order]


def test_features_survive_preemption(llm, tmp_path):
    """Five blocks of four tokens too few for all: histories start anew from the tokens that the host kept."""
    logits = np.random.default_rng(0).normal(0, 1, (V, V)).astype(np.float32) + successor_logits(V, {}, 2.0)
    crowded = LLM(write_chain(tmp_path, logits), num_gpu_blocks_override=16, **OPTIONS)
    prompts = [[7, 9, 11, 13 + i] for i in range(4)]
    params = [
        SamplingParams(seed=i, repetition_penalty=1.3, bad_words_token_ids=[[20, 21]], max_tokens=24, detokenize=False)
        for i in range(4)
    ]
    outputs = crowded.generate(prompts, params, use_tqdm=False)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    assert [o.outputs[0].token_ids for o in outputs] == tokens(llm, prompts, params)
