"""Where a text ends, and how it reads, through the whole engine on scripted checkpoints."""

import pytest

from jaxrunner import LLM, SamplingParams
from tests.jaxrunner.chain import (
    byte_level_tokenizer,
    chain,
    sentencepiece_tokenizer,
    successor_logits,
    word_tokenizer,
    write_chain,
)

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "token_buckets": [32], "logits_buckets": [8], "quiet": True}
V = 64
NAMED = ["<unk>", "<s>", "</s>", "<eot>", "ab", "cST", "OPd", "go", "x"]
WORDS = [*NAMED, *(f"w{i}" for i in range(len(NAMED), V))]
ID = {word: i for i, word in enumerate(WORDS)}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def greedy(**params):
    return SamplingParams(temperature=0, **params)


def deltas(llm, prompt, params):
    """The pieces in which a streaming user would get the text, and the finished output."""
    llm.engine.add_request("streamed", llm.inputs.process(prompt, params))
    pieces = []
    while True:
        result = llm.engine.step()
        pieces += [delta.text for delta in result.deltas]
        if result.finished:
            return pieces, result.finished[0].outputs[0]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """go ab cST OPd w9 w10 w11 ...; </s> is the tokenizer's EOS, <eot> the generation configuration's."""
    successor = chain(ID["go"], ID["ab"], ID["cST"], ID["OPd"], 9) | {20: ID["</s>"], 30: ID["<eot>"]}
    folder = write_chain(
        tmp_path_factory.mktemp("words"),
        successor_logits(V, successor),
        word_tokenizer(WORDS),
        generation_config={"eos_token_id": ID["<eot>"], "temperature": 0.0, "max_new_tokens": 5},
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"},
    )
    return LLM(folder, **SMALL)


def only(llm, prompt, params=None):
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0]


def test_stop_string_over_tokens(words):
    pieces, output = deltas(words, "go", greedy(stop="STOP"))
    assert (pieces, output.text) == (["ab", "c", ""], "abc")
    assert (output.finish_reason, output.stop_reason) == ("stop", "STOP")
    assert output.token_ids == [ID["ab"], ID["cST"], ID["OPd"]]


def test_stop_string_in_the_output(words):
    pieces, output = deltas(words, "go", greedy(stop=["STOP"], include_stop_str_in_output=True))
    assert (pieces, output.text) == (["ab", "c", "STOP"], "abcSTOP")


def test_no_stop_strings_and_none_that_matches(words):
    for stop in ([], None, "STOPX"):
        output = only(words, "go", greedy(stop=stop, max_tokens=4))
        assert (output.text, output.finish_reason, output.stop_reason) == ("abcSTOPdw9", "length", None)


def test_the_tokenizers_eos_stops_and_so_does_the_generation_configurations(words):
    for before, end in [("w18", "</s>"), ("w28", "<eot>")]:
        output = only(words, before, greedy(max_tokens=30))
        assert output.token_ids == [ID[before] + 1, ID[before] + 2, ID[end]]
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert output.text == "".join(f"w{ID[before] + i}" for i in (1, 2))


def test_ignore_eos_goes_on_past_every_one(words):
    for before in ("w18", "w28"):
        output = only(words, before, greedy(max_tokens=10, ignore_eos=True))
        assert (len(output.token_ids), output.finish_reason) == (10, "length")


def test_stop_token_ids(words):
    output = only(words, "w40", greedy(max_tokens=30, stop_token_ids=[43]))
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([41, 42, 43], "stop", 43)
    assert output.text == "w41w42"  # as in vLLM the stop token's own text is left out


def test_min_tokens_holds_stop_tokens_and_strings_back(words):
    held = only(words, "w40", greedy(max_tokens=5, min_tokens=5, stop_token_ids=[42, 43]))
    assert not {42, 43} & set(held.token_ids) and len(held.token_ids) == 5
    late = only(words, "go", greedy(stop="STOP", min_tokens=3, max_tokens=5))
    assert (late.finish_reason, late.text) == ("length", "abcSTOPdw9w10")


def test_the_checkpoints_recommendation_is_the_default(words):
    assert words.get_default_sampling_params() == greedy(max_tokens=5)
    assert len(only(words, "w40").token_ids) == 5


def test_min_tokens_masks_every_eos(tmp_path):
    """After every token EOS b is likeliest, then EOS a, then x."""
    logits = successor_logits(V, dict.fromkeys(range(V), ID["x"]), height=10.0)
    a, b = ID["</s>"], ID["<eot>"]
    logits[:, a], logits[:, b] = 15.0, 20.0
    llm = LLM(write_chain(tmp_path, logits, word_tokenizer(WORDS), generation_config={"eos_token_id": [a, b]}), **SMALL)
    assert only(llm, "go", greedy(min_tokens=5, max_tokens=9)).token_ids == [ID["x"]] * 5 + [b]
    assert only(llm, "go", greedy(max_tokens=9)).token_ids == [b]
    ignoring = only(llm, "go", greedy(max_tokens=10, ignore_eos=True))
    assert (ignoring.token_ids, ignoring.finish_reason) == ([b] * 10, "length")


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """Byte level. "g" is followed by two bytes of 你, a space, and then a whole 你, as a pair of bytes and one."""
    tokenizer = byte_level_tokenizer(pairs=["ä½"])
    first, second, third = (tokenizer.token_to_id(char) for char in "ä½ł")
    pair, space, start = (tokenizer.token_to_id(token) for token in ("ä½", "Ġ", "g"))
    successor = chain(start, first, second, space, pair, third, tokenizer.token_to_id("."))
    folder = write_chain(tmp_path_factory.mktemp("letters"), successor_logits(320, successor), tokenizer)
    return LLM(folder, **SMALL)


def test_a_broken_character_then_a_whole_one(letters):
    pieces, output = deltas(letters, "g", greedy(max_tokens=6))
    assert output.text == f"{REPLACEMENT} 你." == letters.get_tokenizer().decode(output.token_ids)
    assert pieces == ["", "", f"{REPLACEMENT} ", "", "你", "."]


@pytest.mark.parametrize("max_tokens, text", [(1, REPLACEMENT), (2, REPLACEMENT), (4, f"{REPLACEMENT} {REPLACEMENT}")])
def test_max_tokens_cuts_a_character(letters, max_tokens, text):
    pieces, output = deltas(letters, "g", greedy(max_tokens=max_tokens))
    assert output.text == "".join(pieces) == letters.get_tokenizer().decode(output.token_ids) == text


def test_sentencepiece_spaces_survive(tmp_path):
    pieces = ["▁Hello", "▁big", "▁world", "!", "▁"]
    hello, big, world, bang, space = range(256, 261)
    byte = 0xE4  # a lone byte between words
    successor = chain(space, hello, big, byte, world, bang)
    llm = LLM(write_chain(tmp_path, successor_logits(320, successor), sentencepiece_tokenizer(pieces)), **SMALL)
    streamed, output = deltas(llm, [space], greedy(max_tokens=5))
    assert output.token_ids == [hello, big, byte, world, bang]
    assert "".join(streamed) == output.text == f"Hello big{REPLACEMENT} world!"
    assert output.text == llm.get_tokenizer().decode(output.token_ids)
