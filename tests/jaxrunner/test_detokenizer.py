"""Text token by token equals text all at once, for every kind of vocabulary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrunner.detokenizer import IncrementalDetokenizer
from models.tokenizer import Tokenizer
from tests.jaxrunner.chain import byte_level_tokenizer, sentencepiece_tokenizer, word_tokenizer

SPECIAL = "<|end|>"
BYTES = Tokenizer(byte_level_tokenizer([SPECIAL]), {"eos_token": SPECIAL})
PIECES = ["▁", "▁Hello", "▁world", "wor", "ld", "▁▁", "你", "!", "\N{REPLACEMENT CHARACTER}"]
SPM_BACKEND = sentencepiece_tokenizer(PIECES)
SPM_BACKEND.add_special_tokens([SPECIAL])
SPM = Tokenizer(SPM_BACKEND, {"eos_token": SPECIAL})
WORDS = Tokenizer(word_tokenizer(["a", "b", " c", "the end"]), {})
TOKENIZERS = {"byte level": BYTES, "sentencepiece": SPM, "words": WORDS}


def stream(tokenizer, ids, **options):
    """(pieces as they became stable, then the tail; what decode gives)."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    pieces, shown = [], 0
    for token_id in ids:
        detokenizer.append(token_id)
        pieces.append(detokenizer.stable[shown:])
        shown = len(detokenizer.stable)
    return [*pieces, detokenizer.tail], tokenizer.decode(ids, **options)


def ids_of(tokenizer):
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24)


def utf8_like(tokenizer):
    """Byte tokens that make characters more often than chance does, whole and cut, among other tokens."""
    texts = ["你", "é", "🙂", " ", "ab"]
    by_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    runs = [[by_byte[bytes([b])] for b in text.encode() if bytes([b]) in by_byte] for text in texts]
    cut = [run[:k] for run in runs for k in range(len(run) + 1)]
    single = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=2)
    return st.lists(st.one_of(st.sampled_from(cut), single), max_size=10).map(lambda runs: sum(runs, []))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_joined_are_the_decoded_text(name, skip):
    tokenizer = TOKENIZERS[name]

    @given(st.one_of(ids_of(tokenizer), utf8_like(tokenizer)))
    def check(ids):
        pieces, text = stream(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == text

    check()


def test_bytes_of_a_character_are_held_back_until_it_is_whole():
    ids = [BYTES.encode(char)[0] for char in "a"] + BYTES.encode("你") + BYTES.encode("b")
    assert stream(BYTES, ids)[0] == ["a", "", "", "你", "b", ""]


def test_two_bytes_of_three_then_a_space_become_replacement_and_stay():
    first_two = BYTES.encode("你")[:2]
    pieces, text = stream(BYTES, [*first_two, *BYTES.encode(" 你")])
    assert pieces == ["", "", "\N{REPLACEMENT CHARACTER} ", "", "", "你", ""]
    assert "".join(pieces) == text


def test_a_cut_character_at_the_end_is_in_the_tail():
    pieces, text = stream(BYTES, BYTES.encode("a你")[:3])
    assert pieces == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]
    assert text == "a\N{REPLACEMENT CHARACTER}"


def test_sentencepiece_keeps_the_spaces_between_words():
    hello, world = 256 + PIECES.index("▁Hello"), 256 + PIECES.index("▁world")
    assert stream(SPM, [hello, world, world])[0] == ["Hello", " world", " world", ""]


def test_sentencepiece_space_after_a_hidden_special_token_stays():
    hello, world = 256 + PIECES.index("▁Hello"), 256 + PIECES.index("▁world")
    end = SPM.eos_token_id
    assert "".join(stream(SPM, [hello, end, end, world])[0]) == "Hello world"


def test_a_run_of_sentencepiece_bytes_stands_only_when_it_has_ended():
    """Its decoder takes a run as a whole: one bad byte behind a good character turns all of it into U+FFFD."""
    good, bad = list("你".encode()), 0xE4
    hello = 256 + PIECES.index("▁Hello")
    pieces, text = stream(SPM, [*good, bad, hello])
    assert pieces[:4] == ["", "", "", ""]
    assert "".join(pieces) == text == "\N{REPLACEMENT CHARACTER}" * 4 + " Hello"


class Counting:
    """A tokenizer that counts how many tokens it has been given to decode."""

    def __init__(self, tokenizer):
        self._tokenizer, self.decoded = tokenizer, 0
        self.id_to_token, self.special_token_ids = tokenizer.id_to_token, tokenizer.special_token_ids

    def decode(self, ids, skip_special_tokens=True):
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


ENDLESS = {
    "hidden special tokens": (BYTES, BYTES.encode("a") + [BYTES.eos_token_id] * 4000),
    "special tokens only": (SPM, [SPM.eos_token_id] * 4000),
    "ids outside the vocabulary": (BYTES, BYTES.encode("a") + [BYTES.vocab_size + 5] * 4000),
    "bytes that make no character": (BYTES, BYTES.encode("你")[1:2] * 4000),
    "beginnings of characters": (BYTES, BYTES.encode("🙂")[:3] * 1300),
    "words": (WORDS, [0, 1, 2] * 1300),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_token_costs_the_same_however_many_came_before(name):
    tokenizer, ids = ENDLESS[name]
    counting = Counting(tokenizer)
    detokenizer = IncrementalDetokenizer(counting)
    for token_id in ids:
        detokenizer.append(token_id)
    assert counting.decoded < 60 * len(ids)
    assert detokenizer.text == tokenizer.decode(ids)


def test_long_runs_of_broken_bytes_are_settled_as_decoded():
    """As the first test here, with runs long enough that their beginnings are settled before they end."""
    by_byte = {BYTES.token_bytes(i): i for i in reversed(range(BYTES.vocab_size))}
    bytes_of = st.sampled_from([b for b in b"a\x80\xbd\xa0\xe4\xc3\xf0\x9f\x98\x82\xff" if bytes([b]) in by_byte])
    usual = st.sampled_from(list("你🙂é".encode()) + [0x80])

    @given(st.lists(st.one_of(bytes_of, usual), min_size=8, max_size=60))
    def check(stretch):
        ids = [by_byte[bytes([b])] for b in stretch]
        pieces, text = stream(BYTES, ids)
        assert "".join(pieces) == text

    check()
