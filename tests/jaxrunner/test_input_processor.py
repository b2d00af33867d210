"""Which prompts are taken, in which forms, and what the others are told."""

import numpy as np
import pytest

from jaxrunner.input_processor import (
    InputProcessor,
    RefusedPrompt,
    pair_params,
    split_conversations,
    split_prompts,
)
from jaxrunner.request_limits import RequestLimits
from jaxrunner.sampling_params import SamplingParams
from models.tokenizer import Tokenizer
from tests.jaxrunner.chain import byte_level_tokenizer, word_tokenizer

WORDS = ["<unk>", "a", "b", "c", "d"]
TOKENIZER = Tokenizer(word_tokenizer(WORDS), {}, templates={"default": "{{ messages[0].content }} d"})
INPUTS = InputProcessor(TOKENIZER, vocab_size=5, limits=RequestLimits(8, 100), eos_token_ids=(4,))
PARAMS = SamplingParams()


@pytest.mark.parametrize(
    "prompts, single",
    [
        ("a b", ["a b"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [(1, 2)]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        (["a", [1], {"prompt_token_ids": [2]}], ["a", [1], {"prompt_token_ids": [2]}]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_forms_of_prompts(prompts, single):
    assert split_prompts(prompts) == single


def test_arrays_are_prompts_too():
    assert [p.tolist() for p in split_prompts(np.array([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]
    assert INPUTS.process(split_prompts(np.array([1, 2], np.int64))[0], PARAMS).token_ids == [1, 2]
    assert INPUTS.process([np.int32(1), np.int64(2)], PARAMS).token_ids == [1, 2]


@pytest.mark.parametrize("wrong", [None, 7, b"a", 1.5])
def test_what_is_no_prompt_at_all_is_an_error(wrong):
    with pytest.raises(ValueError, match="prompts must be a text"):
        split_prompts(wrong)


def test_one_conversation_or_many():
    message = {"role": "user", "content": "a"}
    assert split_conversations([message]) == [[message]]
    assert split_conversations([[message], [message]]) == [[message], [message]]
    assert split_conversations([]) == []
    with pytest.raises(ValueError, match="messages must be"):
        split_conversations("hello")


def test_params_for_all_or_each():
    a, b = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert pair_params(None, 2, a) == [a, a]
    assert pair_params(b, 2, a) == [b, b]
    assert pair_params([a, b], 2, a) == [a, b]
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        pair_params([a], 2, a)
    with pytest.raises(ValueError, match="must be a SamplingParams"):
        pair_params({"max_tokens": 3}, 2, a)


def test_text_and_ids_and_both():
    text = INPUTS.process("a b", PARAMS)
    assert (text.text, text.token_ids) == ("a b", [1, 2])
    ids = INPUTS.process([1, 2], PARAMS)
    assert (ids.text, ids.token_ids) == (None, [1, 2])
    both = INPUTS.process({"prompt": "a", "prompt_token_ids": [2], "cache_salt": "s"}, PARAMS)
    assert (both.text, both.token_ids, both.cache_salt) == ("a", [2], "s")


@pytest.mark.parametrize(
    "prompt, params, words",
    [
        ("", {}, "no tokens"),
        ([], {}, "empty"),
        ([1] * 8, {}, "8 tokens, but max_model_len is 8.*shorten it to 7"),
        ([1] * 9, {}, "9 tokens, but max_model_len is 8"),
        ([1, 5], {}, r"token id 5 \(at position 1 of the prompt\).*from 0 to 4"),
        ([1, -1], {}, "token id -1 "),
        ([1, 2.0], {}, "a prompt must be"),
        ([1, True], {}, "a prompt must be"),
        (["a"], {}, "a prompt must be"),
        (None, {}, "a prompt must be"),
        (np.array([1.0]), {}, "a prompt must be"),
        ({"text": "a"}, {}, r"keys.*got \['text'\]"),
        ({"role": "user", "content": "a"}, {}, r"got \['role', 'content'\]: for messages there is chat\(\)"),
        ({}, {}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"prompt": 3}, {}, "'prompt' must be a text"),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, {}, "'messages' stands alone"),
        ({"messages": "hi"}, {}, "messages must be a non-empty list"),
        ({"prompt": "a", "cache_salt": 3}, {}, "'cache_salt' must be a text"),
        ({"prompt_token_ids": "abc"}, {}, "a prompt must be"),
        ("\ud800", {}, "Unicode"),
        ([1], {"stop_token_ids": [5]}, "stop_token_ids holds 5.*from 0 to 4"),
        ([1], {"stream_interval": 2}, r"\['stream_interval'\] are not served"),
        ([1], {"logit_bias": {5: 1.0}}, "logit_bias holds 5, .*from 0 to 4"),
    ],
)
def test_refusals_say_why(prompt, params, words):
    with pytest.raises(RefusedPrompt, match=words):
        INPUTS.process(prompt, SamplingParams(**params))


def test_the_longest_prompt_leaves_room_for_one_token():
    assert len(INPUTS.process([1] * 7, PARAMS).token_ids) == 7


def test_a_prompt_longer_than_the_cache_is_refused():
    inputs = InputProcessor(TOKENIZER, vocab_size=5, limits=RequestLimits(100, 6))
    assert len(inputs.process([1] * 6, PARAMS).token_ids) == 6
    with pytest.raises(RefusedPrompt, match="KV cache holds 6.*num_gpu_blocks_override"):
        inputs.process([1] * 7, PARAMS)


def test_too_many_stop_tokens_for_min_tokens():
    inputs = InputProcessor(None, vocab_size=100, limits=RequestLimits(8, 100), eos_token_ids=(99,))
    inputs.process([1], SamplingParams(stop_token_ids=range(40), detokenize=False))
    with pytest.raises(RefusedPrompt, match="32 stop token ids at most, not 33"):
        inputs.process([1], SamplingParams(stop_token_ids=range(32), min_tokens=1, detokenize=False))


def test_truncation_keeps_the_end():
    assert INPUTS.process([1, 2, 3], SamplingParams(truncate_prompt_tokens=2)).token_ids == [2, 3]
    assert INPUTS.process([1] + [2] * 20, SamplingParams(truncate_prompt_tokens=-1)).token_ids == [2] * 7


def test_the_refusal_carries_what_is_known_of_the_prompt():
    with pytest.raises(RefusedPrompt) as refusal:
        INPUTS.process("a a a a a a a a", PARAMS)
    assert (refusal.value.text, refusal.value.token_ids) == ("a a a a a a a a", [1] * 8)


def test_without_a_tokenizer_prompts_are_ids():
    inputs = InputProcessor(None, vocab_size=5, limits=RequestLimits(8, 100))
    with pytest.raises(RefusedPrompt, match="no tokenizer: give the prompt as token ids"):
        inputs.process("a", PARAMS)
    with pytest.raises(RefusedPrompt, match="detokenize=False"):
        inputs.process([1], PARAMS)
    with pytest.raises(RefusedPrompt, match="no chat template"):
        inputs.process_chat([{"role": "user", "content": "a"}], PARAMS, {})
    assert inputs.process([1], SamplingParams(detokenize=False)).token_ids == [1]


def test_chat_uses_the_template_and_quotes_its_refusal():
    message = {"role": "user", "content": "b"}
    prompt = INPUTS.process_chat([message], PARAMS, {})
    assert (prompt.text, prompt.token_ids) == ("b d", [2, 4])
    assert INPUTS.process({"messages": [message]}, PARAMS) == prompt
    with pytest.raises(RefusedPrompt, match="no system, please"):
        INPUTS.process_chat([message], PARAMS, {"chat_template": "{{ raise_exception('no system, please') }}"})
    with pytest.raises(RefusedPrompt, match="message 0 must be a dict"):
        INPUTS.process_chat(["hello"], PARAMS, {})


def test_the_template_writes_bos_and_the_tokenizer_adds_none():
    backend = byte_level_tokenizer(["<s>"])
    bos = backend.token_to_id("<s>")
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", bos)])
    tokenizer = Tokenizer(backend, {"bos_token": "<s>"}, templates={"default": "{{ bos_token }}hi"})
    inputs = InputProcessor(tokenizer, vocab_size=257, limits=RequestLimits(8, 100))
    assert inputs.process("hi", PARAMS).token_ids.count(bos) == 1
    chat = inputs.process_chat([{"role": "user", "content": "x"}], PARAMS, {})
    assert chat.token_ids == inputs.process("hi", PARAMS).token_ids
    # "" is a prompt where the tokenizer adds BOS.
    assert inputs.process("", PARAMS).token_ids == [bos]
