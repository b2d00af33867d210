"""Structured output: what is said fits the schema, regex, choice or grammar, whatever the model wants to say."""

import asyncio
import json
import re
import threading

import numpy as np
import pytest

from jaxrunner import LLM, AsyncLLM, SamplingParams
from jaxrunner.protocol import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from jaxrunner.structured_outputs import StructuredOutputsParams
from tests.jaxrunner.chain import (
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    successor_logits,
    word_tokenizer,
    write_chain,
)

EOS = "<|end|>"
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 128,
    "token_buckets": [16],
    "logits_buckets": [4],
    "block_size": 4,
    "quiet": True,
}
PROMPT = [40, 41]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A token for each byte, and no will of its own: what follows a token is noise."""
    tokenizer = byte_level_tokenizer(extra=[EOS])
    size = tokenizer.get_vocab_size()
    logits = np.random.default_rng(0).normal(0, 1, (size, size)).astype(np.float32)
    folder = write_chain(
        tmp_path_factory.mktemp("noise"), logits, tokenizer, tokenizer_config={"eos_token": EOS},
        config={"eos_token_id": size - 1},
    )  # fmt: skip
    return LLM(folder, **OPTIONS)


def say(llm, structured, prompts=(PROMPT,), **fields):
    params = SamplingParams(structured_outputs=structured, **{"max_tokens": 100, "temperature": 0} | fields)
    return [o.outputs[0] for o in llm.generate(list(prompts), params, use_tqdm=False)]


def byte(llm, text):
    return [llm.get_tokenizer().encode(c)[0] for c in text]


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema(llm, temperature):
    outputs = say(llm, {"json": SCHEMA}, [[i] for i in range(40, 48)], temperature=temperature, seed=1)
    for output in outputs:
        found = json.loads(output.text)
        assert output.finish_reason == "stop" and set(found) == {"a", "b"}
        assert 0 <= found["a"] <= 99 and found["b"] in ("x", "yy")


def test_choice_regex_and_grammar(llm):
    assert say(llm, {"choice": ["yes", "no", "maybe"]})[0].text in ("yes", "no", "maybe")
    for pattern in (r"[0-9]{3}-[a-f]+x", r"^(ab|cd)$", r"(ab|cd)"):
        output = say(llm, {"regex": pattern}, seed=3, temperature=1.0)[0]
        assert re.fullmatch(pattern, output.text), (pattern, output.text)
    output = say(llm, {"grammar": 'start: word ("," word){2}\nword: "ab" | "c"'})[0]
    assert re.fullmatch("(ab|c),(ab|c),(ab|c)", output.text)


def test_an_object_is_one(llm):
    """Pushed towards its end: noise alone would go on for ever."""
    bias = {byte(llm, "}")[0]: 50, byte(llm, '"')[0]: 20}
    assert isinstance(json.loads(say(llm, {"json_object": True}, logit_bias=bias)[0].text), dict)


def test_a_model_that_likes_whitespace_finishes(llm):
    """A space or a line break wherever one is allowed, and they are not allowed for ever."""
    space, newline = llm.get_tokenizer().encode(" ")[0], llm.get_tokenizer().encode("\n")[0]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    bias = {space: 100, newline: 100}
    outputs = say(llm, {"json": schema | {"additionalProperties": False}}, logit_bias=bias, max_tokens=64)
    assert "a" in json.loads(outputs[0].text)
    compact = say(llm, {"json": SCHEMA, "disable_any_whitespace": True}, logit_bias=bias)[0].text
    assert not set(compact) & {" ", "\n"}


def test_a_constant_with_an_escape(llm):
    constant = "\n" + 30 * " "
    assert json.loads(say(llm, {"json": {"const": constant}})[0].text) == constant


def test_rows_without_a_grammar_are_not_touched(llm):
    """Beside rows with a grammar each row says what it says alone."""
    prompts = [[i] for i in range(50, 56)]
    plain = SamplingParams(temperature=1.0, seed=5, max_tokens=12)
    shaped = SamplingParams(temperature=1.0, seed=5, max_tokens=100, structured_outputs={"json": SCHEMA})
    each = [plain, shaped] * 3
    alone = [llm.generate([p], q, use_tqdm=False)[0].outputs[0].token_ids for p, q in zip(prompts, each, strict=True)]
    together = llm.generate(prompts, each, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in together] == alone


def test_with_other_features(llm):
    """Allowed tokens narrow the grammar; min_tokens can't keep a finished text from ending; n sequences each fit."""
    allowed = byte(llm, "012abc") + [llm.model.eos_token_ids[0]]
    assert say(llm, {"regex": "[0-9a-z]{4}"}, allowed_token_ids=allowed)[0].text.strip("012abc") == ""
    output = say(llm, {"choice": ["ab"]}, min_tokens=10)[0]
    assert output.text == "ab" and output.finish_reason == "stop"
    params = SamplingParams(n=3, seed=1, max_tokens=100, structured_outputs={"json": SCHEMA})
    (request,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert all(json.loads(o.text)["b"] in ("x", "yy") for o in request.outputs)


def test_a_request_of_which_nothing_may_follow_ends_alone(llm):
    a, b = byte(llm, "ab")
    shaped = {"structured_outputs": {"choice": ["ab"]}, "temperature": 0}
    each = [
        SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True),
        SamplingParams(**shaped, bad_words_token_ids=[[b]]),
        SamplingParams(**shaped, allowed_token_ids=[a]),
        SamplingParams(**shaped, allowed_token_ids=[a, b]),  # not the end: and yet that is all that may follow
    ]
    plain, no_b, only_a, ends = llm.generate([PROMPT] * 4, each, use_tqdm=False)
    assert len(plain.outputs[0].token_ids) == 12 and plain.error is None
    for output in (no_b, only_a):
        assert output.finished and output.outputs[0].finish_reason == "error" and output.outputs[0].text == "a"
        assert "its structured output can't go on: " in output.error and "\n" not in output.error
    assert ends.outputs[0].text == "ab" and ends.outputs[0].finish_reason == "stop" and ends.error is None


def test_an_event_loop_goes_on_while_a_grammar_is_compiled(llm, monkeypatch):
    check, compiled_by = llm.inputs.grammars.check, []

    def noted(params):
        compiled_by.append(threading.current_thread())
        check(params)

    async def main():
        params = SamplingParams(temperature=0, max_tokens=10, structured_outputs={"choice": ["later"]})
        return [o async for o in AsyncLLM(llm).generate(PROMPT, params)][-1].outputs[0].text

    monkeypatch.setattr(llm.inputs.grammars, "check", noted)
    assert asyncio.run(main()) == "later"
    assert compiled_by and threading.main_thread() not in compiled_by


def test_preemption(llm, tmp_path):
    tokenizer = byte_level_tokenizer(extra=[EOS])
    size = tokenizer.get_vocab_size()
    folder = write_chain(tmp_path, successor_logits(size, {}), tokenizer, tokenizer_config={"eos_token": EOS})
    crowded = LLM(folder, num_gpu_blocks_override=20, **OPTIONS)
    params = SamplingParams(seed=2, temperature=1.0, max_tokens=60, structured_outputs={"regex": "[a-z]{40}!"})
    outputs = crowded.generate([[i] for i in range(4)], params, use_tqdm=False)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    assert all(re.fullmatch("[a-z]{40}!", o.outputs[0].text) for o in outputs)


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"json": ""}, "not valid JSON"),
        ({"json": "3"}, "must be a JSON schema"),
        ({"json": {"type": "frob"}}, "can't be compiled: Invalid type: frob"),
        ({"json": {"enum": []}}, "can't be compiled: Unsatisfiable schema"),
        ({"json_object": False}, "json_object must be True"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": [""]}, "texts that aren't empty"),
        ({"choice": "yes"}, "choice must be a list of texts"),
        ({"regex": ""}, "regex must be a text that isn't empty"),
        ({"regex": "(?=a)b"}, "(?s)can't be compiled: .*look-around"),
        ({"regex": "(ab"}, "(?s)can't be compiled: .*unclosed group"),
        ({"grammar": "start: nothing"}, "can't be compiled"),
        ({"grammar": ""}, "grammar must be a text"),
        ({"regex": r"[^\s\S]"}, "no token can begin such a text"),
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"regex": "a", "choice": ["a"]}, r"got \['regex', 'choice'\]"),
        ({"backend": "x", "regex": "a"}, r"has no \['backend'\]"),
        ("json", "must be StructuredOutputsParams or a mapping"),
    ],
    ids=str,
)
def test_what_cannot_be_met_is_refused_and_the_engine_lives(llm, structured, message):
    with pytest.raises(ValueError, match=message):
        say(llm, structured)
    assert say(llm, {"choice": ["ok"]})[0].text == "ok"


KINDS = [
    {"choice": ["abcab", "abd"]},
    {"regex": "ab(c|d)+"},
    {"grammar": 'start: "ab" ("c" | "d")'},
    {"json": {"const": "abc"}},
    {"json": {"type": "object", "properties": {"ab": {"enum": ["c", "d"]}}, "required": ["ab"]}},
]


@pytest.mark.parametrize(
    "tokenizer",
    [
        # A space in front of every text that is encoded: what is forced in the middle of another must not have it.
        sentencepiece_tokenizer(["▁", "a", "b", "c", "d", "▁a", "ab", "▁ab", "bc", "</s>"]),
        # Whole words, and one token for all others: nothing spells a part of a word that is forced.
        word_tokenizer(["?", "ab", "abc", "abd", "c", "d", '"', '{"', '":"', '"}', "</s>"]),
    ],
    ids=["sentencepiece", "words"],
)
def test_vocabularies_that_spell_texts_otherwise(tokenizer, tmp_path):
    eos = tokenizer.token_to_id("</s>")
    logits = np.zeros((320, 320), np.float32)
    folder = write_chain(
        tmp_path, logits, tokenizer, config={"eos_token_id": eos}, tokenizer_config={"eos_token": "</s>"}
    )
    llm = LLM(folder, **OPTIONS)
    for kind in KINDS:
        (output,) = say(llm, kind, prompts=[[1]], temperature=1, seed=3)
        assert output.finish_reason == "stop"
        if "json" in kind:
            assert json.loads(output.text) in ("abc", {"ab": "c"}, {"ab": "d"})
        else:
            assert re.fullmatch("ab[cd]+|abcab", output.text)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ({"choice": ["a<|end|>b"]}, ["a<|end|>b"]),
        ({"choice": ["<|img|>x"]}, ["<|img|>x"]),
        ({"choice": ["<|img|>x", "<|img|>y"]}, ["<|img|>x", "<|img|>y"]),
        ({"json": {"const": "see <|end|> here"}}, ['"see <|end|> here"']),
    ],
)
def test_names_of_special_tokens_in_a_text_are_text(tmp_path, kind, texts):
    """Spelt by their letters: the tokens themselves mean something else, and may have no logits at all (<|img|>)."""
    tokenizer = byte_level_tokenizer(extra=["<|end|>", "<|img|>"])
    eos = tokenizer.token_to_id("<|end|>")
    folder = write_chain(
        tmp_path,
        np.zeros((eos + 1, eos + 1), np.float32),
        tokenizer,
        config={"eos_token_id": eos},
        tokenizer_config={"eos_token": "<|end|>"},
    )
    (output,) = say(LLM(folder, **OPTIONS), kind, prompts=[[1]], temperature=1, seed=3)
    assert (output.finish_reason, output.text in texts) == ("stop", True)


def test_a_model_without_tokenizer_or_end_refuses(tmp_path):
    folder = write_chain(tmp_path / "a", successor_logits(64, {}))
    with pytest.raises(ValueError, match="need the model's tokenizer"):
        LLM(folder, **OPTIONS).generate([[5]], SamplingParams(detokenize=False, structured_outputs={"choice": ["a"]}))
    tokenizer = byte_level_tokenizer()
    folder = write_chain(tmp_path / "b", successor_logits(tokenizer.get_vocab_size(), {}), tokenizer)
    with pytest.raises(ValueError, match="need an end-of-sequence token"):
        LLM(folder, **OPTIONS).generate([[5]], SamplingParams(structured_outputs={"choice": ["a"]}))


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (None, "samples in this step, without grammar_bitmask"),
        (GrammarOutput(["x"], np.zeros((1, 3), np.int32)), r"must be int32 \[1, \d+\], got int32 \[1, 3\]"),
        (GrammarOutput(["y"], None), "'y' has a grammar_bitmask and is not scheduled"),
    ],
)
def test_a_plan_with_wrong_masks_is_refused(llm, masks, message):
    if masks is not None and masks.grammar_bitmask is None:
        masks.grammar_bitmask = np.zeros((1, -(-llm.inputs.vocab_size // 32)), np.int32)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    plan = SchedulerOutput([NewRequestData("x", [5], ([1],), sampling_params=params)], num_scheduled_tokens={"x": 1},
                           total_num_scheduled_tokens=1, grammar_bitmask=masks)  # fmt: skip
    with pytest.raises(ValueError, match=message):
        llm.runner.execute_model(plan)
    assert "x" not in llm.runner.batch.requests


def test_a_running_request_needs_a_mask_for_every_token(llm):
    """Without one it would sample under the last step's, which its text has outgrown. A step in which it only computes
    known tokens needs none."""
    runner, words = llm.runner, -(-llm.inputs.vocab_size // 32)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), ignore_eos=True)
    all_tokens = GrammarOutput(["x"], np.full((1, words), -1, np.int32))

    def plan(computed, count, *, masks=None, new=(), outputs=None, blocks=None, resumed=()):
        cached = CachedRequestData() if new else CachedRequestData(
            ["x"], set(resumed), [blocks], [computed], [] if outputs is None else [outputs])  # fmt: skip
        return SchedulerOutput(list(new), cached, {"x": count}, count, grammar_bitmask=masks)

    runner.reset()
    new = [NewRequestData("x", [5, 6, 7], ([1],), sampling_params=params)]
    runner.execute_model(plan(0, 2, new=new))
    with pytest.raises(ValueError, match="'x' has structured_outputs and samples in this step, without"):
        runner.execute_model(plan(2, 1))
    assert len(runner.execute_model(plan(2, 1, masks=all_tokens)).sampled_token_ids[0]) == 1
    with pytest.raises(ValueError, match="samples in this step, without"):
        runner.execute_model(plan(3, 1, blocks=([2],)))
    runner.execute_model(plan(3, 1, masks=all_tokens))
    # It is preempted, and computes its five tokens again in two steps.
    runner.execute_model(SchedulerOutput(preempted_req_ids={"x"}))
    runner.execute_model(plan(0, 4, blocks=([3],), resumed=["x"]))
    with pytest.raises(ValueError, match="samples in this step, without"):
        runner.execute_model(plan(4, 1, blocks=([4],)))
    runner.execute_model(plan(4, 1, blocks=([4],), masks=all_tokens))
    # Its end is no step for it, and another request may take its name.
    runner.execute_model(SchedulerOutput(finished_req_ids={"x"}))
    runner.execute_model(plan(0, 3, new=[NewRequestData("x", [5, 6, 7], ([1],))]))
    runner.execute_model(plan(3, 1, blocks=([2],)))
    runner.reset()
    llm.engine.reset()
