"""Requests that can't be served, and that the LLM lives on behind them."""

import pytest

from jaxrunner import LLM, SamplingParams
from tests.jaxrunner.chain import chain, successor_logits, word_tokenizer, write_chain

V = 64
WORDS = ["<unk>", "<s>", "a", "b", *(f"w{i}" for i in range(4, V))]
OPTIONS = {
    "max_model_len": 24,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "token_buckets": [32],
    "logits_buckets": [8],
    "check_invariants": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=3)
TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ bos_token }} {{ messages[0].content }} b"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_chain(
        tmp_path_factory.mktemp("chain"),
        successor_logits(V, {}),
        word_tokenizer(WORDS),
        tokenizer_config={"bos_token": "<s>", "add_bos_token": True, "chat_template": TEMPLATE},
    )
    return LLM(folder, num_gpu_blocks_override=40, quiet=True, **OPTIONS)


@pytest.fixture(autouse=True)
def alive(llm):
    """After every test a plain request gives its known tokens."""
    yield
    (output,) = llm.generate([[10]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == [11, 12, 13]
    assert not llm.engine.has_unfinished_requests()


def generate(llm, prompts, params=GREEDY, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_at_the_length_limit(llm):
    (output,) = generate(llm, [[10] * 23], SamplingParams(temperature=0, max_tokens=99))
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([11], "length")
    for length in (24, 25):
        with pytest.raises(ValueError, match=f"prompt 0: the prompt has {length} tokens, but max_model_len is 24"):
            generate(llm, [[10] * length])


def test_output_ends_at_the_length_limit(llm):
    for max_tokens in (None, 1000):
        (output,) = generate(llm, [[10] * 4], SamplingParams(temperature=0, max_tokens=max_tokens))
        assert output.outputs[0].token_ids == list(range(11, 31)) and output.outputs[0].finish_reason == "length"


def test_every_bad_prompt_is_named_and_nothing_runs(llm):
    steps = llm.runner.times.steps
    with pytest.raises(ValueError) as error:
        generate(llm, [[10], [], [5, V], [-1], "a", [10] * 30])
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["prompt 1", "prompt 2", "prompt 3", "prompt 5"]
    assert llm.runner.times.steps == steps


def test_bad_prompts_are_answered_beside_good_ones(llm):
    bad = [[], [V], [-1], [10] * 24, None, {"text": "a"}, "\ud800"]
    prompts = [[20], *bad, [30]]
    outputs = generate(llm, prompts, on_error="return")
    assert tokens(outputs) == [[21, 22, 23], *[[]] * len(bad), [31, 32, 33]]
    for output in outputs[1:-1]:
        assert output.error and output.outputs[0].finish_reason == "error" and output.finished
    assert outputs[0].error is None
    assert outputs[4].prompt_token_ids == [10] * 24


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [V]},
        {"thinking_token_budget": 3},
        {"logit_bias": {V: 1.0}},
        {"allowed_token_ids": [V]},
        {"bad_words_token_ids": [[V]]},
    ],
)
def test_parameters_that_are_not_served_hurt_one_request_only(llm, params):
    outputs = generate(llm, [[20], [30]], [GREEDY, SamplingParams(temperature=0, **params)], on_error="return")
    assert outputs[0].outputs[0].token_ids == [21, 22, 23]
    assert next(iter(params)) in outputs[1].error


def test_nonsense_arguments(llm):
    with pytest.raises(ValueError, match="prompts must be a text"):
        generate(llm, 7)
    with pytest.raises(ValueError, match="on_error must be"):
        generate(llm, [[10]], on_error="ignore")
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        generate(llm, [[10]], [GREEDY, GREEDY])
    assert generate(llm, []) == []


def test_chat_has_one_bos_and_quotes_the_templates_refusal(llm):
    user = [{"role": "user", "content": "a"}]
    system = [{"role": "system", "content": "a"}]
    (output,) = llm.chat(user, GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("<s> a b", [1, 2, 3])
    assert output.outputs[0].token_ids == [4, 5, 6]
    assert generate(llm, "a b")[0].prompt_token_ids == [1, 2, 3]
    with pytest.raises(ValueError, match="prompt 1: .*System role not supported"):
        llm.chat([user, system], GREEDY, use_tqdm=False)
    outputs = llm.chat([system, user], GREEDY, use_tqdm=False, on_error="return")
    assert "System role not supported" in outputs[0].error and outputs[1].outputs[0].token_ids == [4, 5, 6]


def test_outputs_come_in_the_order_asked_and_parameters_stay_as_they_are(llm):
    prompts = [[10 + i] for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (7 * i) % 11) for i in range(20)]
    before = list(map(repr, params))
    outputs = generate(llm, prompts, params)
    expected = [[p[0] + 1 + j for j in range(q.max_tokens)] for p, q in zip(prompts, params, strict=True)]
    assert tokens(outputs) == expected
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert list(map(repr, params)) == before


@pytest.mark.parametrize("failure", [RuntimeError("lost"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["submit", "_dispatch", "_finish"])
def test_a_step_that_fails_leaves_a_working_llm(llm, monkeypatch, failure, place):
    real, calls = getattr(llm.runner, place), []

    def fails_at_the_third_step(*args, **kwargs):
        calls.append(place)
        if len(calls) == 3:
            raise failure
        return real(*args, **kwargs)

    monkeypatch.setattr(llm.runner, place, fails_at_the_third_step)
    with pytest.raises(type(failure)):
        generate(llm, [[10 + i] * 6 for i in range(12)], SamplingParams(temperature=0, max_tokens=10))
    assert llm.runner.batch.num_reqs == 0 and not llm.engine.has_unfinished_requests()


def test_options_that_llm_does_not_have_are_named_with_those_it_has(tmp_path):
    with pytest.raises(TypeError, match=r"'max_num_seq' \(did you mean 'max_num_seqs'\?\).*block_size.*warmup"):
        LLM(tmp_path, max_num_seq=3)
    with pytest.raises(TypeError, match=r"'enforce_eager' \(vLLM's: here execution_mode='NONE'\), 'spam'; its options"):
        LLM(tmp_path, enforce_eager=True, spam=1)
    with pytest.raises(ValueError, match="dtype must be"):
        LLM(tmp_path, dtype="float8")


def test_the_plan_of_the_cache_is_printed(tmp_path, capsys):
    folder = write_chain(tmp_path, successor_logits(V, chain(1, 2)), word_tokenizer(WORDS))
    LLM(folder, cpu_cache_bytes=1 << 20, **OPTIONS)
    assert "KV cache: 49 blocks of" in capsys.readouterr().err
