"""Log probabilities of prompts: transformers' within 1e-4, across chunks, preemption and prefix hits."""

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.loading import LoadedModel
from jaxrunner.protocol import NewRequestData, SchedulerOutput
from tests.models import fixtures

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "token_buckets": [16],
    "logits_buckets": [4],
    "block_size": 4,
    "max_logprobs": -1,
    "quiet": True,
}


@pytest.fixture(scope="module")
def model(fixture):
    return LoadedModel(fixtures.decoder_from(fixture.config, fixture.tensors))


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, **OPTIONS)


@pytest.fixture(scope="module")
def expected(fixture):
    """log softmax [40, V] of transformers' logits."""
    x = fixture.logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def params(top=3, **fields):
    return SamplingParams(prompt_logprobs=top, detokenize=False, **{"max_tokens": 1, "temperature": 0} | fields)


def check(output, ids, expected, top=3):
    found = output.prompt_logprobs
    assert len(found) == len(ids) and found[0] is None
    for i in range(1, len(ids)):
        likeliest = np.argsort(-expected[i - 1])
        assert list(found[i])[0] == ids[i]
        assert set(found[i]) == {ids[i], *likeliest[:top].tolist()}
        for token, logprob in found[i].items():
            assert logprob.logprob == pytest.approx(expected[i - 1, token], abs=1e-4)
            assert logprob.rank == 1 + likeliest.tolist().index(token)


def test_against_transformers_in_chunks(llm, fixture, expected):
    """Steps of 16 tokens over prompts of 1 to 40 of them, five prompts in four rows, one of which asks for nothing."""
    ids = fixture.ids.tolist()
    lengths = [40, 1, 17, 2, 33]
    each = [params() if n != 17 else params(None) for n in lengths]
    outputs = llm.generate([ids[:n] for n in lengths], each, use_tqdm=False)
    for n, output in zip(lengths, outputs, strict=True):
        if n == 17:
            assert output.prompt_logprobs is None
        else:
            check(output, ids[:n], expected)


def test_the_whole_vocabulary_and_the_token_alone(llm, fixture):
    ids = fixture.ids.tolist()[:7]
    whole, alone = llm.generate([ids, ids], [params(-1), params(0)], use_tqdm=False)
    for i in range(1, 7):
        assert sum(np.exp(p.logprob) for p in whole.prompt_logprobs[i].values()) == pytest.approx(1, abs=1e-5)
        assert list(alone.prompt_logprobs[i]) == [ids[i]]
        assert alone.prompt_logprobs[i][ids[i]] == whole.prompt_logprobs[i][ids[i]]


def test_a_prompt_whose_prefix_is_cached_has_them_all(llm, fixture, expected):
    """It reads nothing of the cache, as in vLLM; a later one that asks for nothing does."""
    ids = fixture.ids.tolist()[:33]
    llm.reset_prefix_cache()
    for _ in range(2):
        (output,) = llm.generate([ids], params(), use_tqdm=False)
        check(output, ids, expected)
        assert output.num_cached_tokens == 0
    (plain,) = llm.generate([ids], params(None), use_tqdm=False)
    assert plain.num_cached_tokens == 32


def test_preemption_changes_nothing(model, fixture, expected):
    """Room for two and a half of four sequences: some are computed again."""
    llm = LLM(model, num_gpu_blocks_override=24, **OPTIONS)
    ids = fixture.ids.tolist()
    prompts = [ids[: 10 + i] for i in range(4)]
    outputs = llm.generate(prompts, params(max_tokens=30), use_tqdm=False)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output, prompt, expected)


def test_several_sequences_report_on_their_prompt_once(llm, fixture, expected):
    ids = fixture.ids.tolist()[:9]
    (output,) = llm.generate([ids], params(n=3, temperature=1.0, seed=1, max_tokens=3), use_tqdm=False)
    check(output, ids, expected)


def test_rows_go_through_the_head_in_chunks_not_one_by_one(llm, fixture, monkeypatch):
    calls = []
    score = llm.runner.executables.prompt_logprobs()
    monkeypatch.setattr(
        llm.runner.executables, "prompt_logprobs", lambda: lambda *a: calls.append(a[2].shape) or score(*a)
    )
    llm.generate([fixture.ids.tolist()[:16]] * 4, params(), use_tqdm=False)
    assert calls == [(16,)] * 4  # four prompts of a step each


def test_a_start_from_computed_tokens_is_refused(llm):
    data = NewRequestData("x", [5] * 9, ([1, 2, 3],), num_computed_tokens=8, sampling_params=params())
    plan = SchedulerOutput([data], num_scheduled_tokens={"x": 1}, total_num_scheduled_tokens=1)
    with pytest.raises(ValueError, match="'x' wants prompt_logprobs and starts with 8 tokens computed"):
        llm.runner.execute_model(plan)
    assert "x" not in llm.runner.batch.requests
