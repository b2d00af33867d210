"""Where a text stops, and how much of it may be shown before that is known."""

from hypothesis import given
from hypothesis import strategies as st

from jaxrunner.sampling_params import SamplingParams
from jaxrunner.sequence_text import SequenceText
from jaxrunner.stop_strings import find_stop, held_back
from models.tokenizer import Tokenizer
from tests.jaxrunner.chain import word_tokenizer

LETTERS = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def test_the_stop_string_that_is_complete_first_wins():
    assert find_stop("xabcd", ["abcd", "bc"]) == ("bc", 2, 4)
    assert find_stop("xabc", ["abc", "c"]) == ("abc", 1, 4)  # both at once: the first of the list
    assert find_stop("xyz", ["abc"]) is None


def test_a_stop_string_before_after_does_not_count():
    assert find_stop("aSTOPb", ["STOP"], after=4) == ("STOP", 1, 5)
    assert find_stop("aSTOPb", ["STOP"], after=5) is None


@given(LETTERS, STOPS)
def test_find_stop_equals_reading_character_by_character(text, stop):
    expected = None
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            expected = (ending[0], end - len(ending[0]), end)
            break
    assert find_stop(text, stop) == expected


@given(LETTERS, STOPS)
def test_held_back_is_the_longest_beginning_of_a_stop_string(text, stop):
    lengths = [k for s in stop for k in range(1, len(s)) if k <= len(text) and text.endswith(s[:k])]
    assert held_back(text, stop) == max(lengths, default=0)


WORDS = ["ab", "cST", "OPd", "a", "b", "c", "STOP", "abab", " "]
TOKENIZER = Tokenizer(word_tokenizer(WORDS), {})


def run(words, **params):
    """(deltas, final text, stop reason, tokens taken)"""
    text = SequenceText(TOKENIZER, SamplingParams(max_tokens=None, **params))
    deltas = []
    for i, word in enumerate(words):
        text.append([WORDS.index(word)])
        done = text.stop_reason is not None or i == len(words) - 1
        deltas.append(text.take_delta(finished=done))
        if done:
            return deltas, text.text, text.stop_reason, i + 1
    raise AssertionError


def test_stop_over_token_boundaries_is_cut_and_never_shown():
    assert run(["ab", "cST", "OPd", "a"], stop="STOP") == (["ab", "c", ""], "abc", "STOP", 3)


def test_stop_included_in_the_output():
    deltas, text, reason, _ = run(["ab", "cST", "OPd"], stop="STOP", include_stop_str_in_output=True)
    assert (deltas, text, reason) == (["ab", "c", "STOP"], "abcSTOP", "STOP")


def test_what_only_began_like_a_stop_string_is_shown_later():
    assert run(["ab", "cST", "a"], stop="STOP") == (["ab", "c", "STa"], "abcSTa", None, 3)


def test_several_tokens_in_one_step_are_taken_up_to_the_stop():
    text = SequenceText(TOKENIZER, SamplingParams(stop=["STOP"]))
    assert text.append([WORDS.index(w) for w in ("ab", "cST", "OPd", "a")]) == 3
    assert text.text == "abc"


def test_no_stop_before_min_tokens_and_then_only_a_new_one():
    assert run(["STOP", "a", "STOP"], stop="STOP", min_tokens=1)[1:] == ("STOPa", "STOP", 3)
    assert run(["STOP", "a"], stop="STOP", min_tokens=1)[1:] == ("STOPa", None, 2)
    # One that began before and is complete behind min_tokens counts.
    assert run(["cST", "OPd"], stop="STOP", min_tokens=1)[1:] == ("c", "STOP", 2)


def test_the_text_of_a_stop_token_is_left_out_unless_asked_for():
    for include, expected in [(False, "ab"), (True, "abc")]:
        text = SequenceText(TOKENIZER, SamplingParams(include_stop_str_in_output=include))
        text.append([WORDS.index("ab")])
        text.append([WORDS.index("c")], ends_with_stop_token=True)
        assert text.text == expected


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8), STOPS, st.booleans(), st.integers(0, 3))
def test_deltas_join_to_the_text_and_the_cut_does_not_depend_on_tokens(words, stop, include, min_tokens):
    deltas, text, reason, taken = run(words, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    assert "".join(deltas) == text
    before = len("".join(words[:min_tokens]))
    found = find_stop("".join(words), stop, after=before) if len(words) > min_tokens else None
    if found is None:
        assert (text, reason, taken) == ("".join(words), None, len(words))
    else:
        string, start, end = found
        assert (text, reason) == ("".join(words)[: end if include else start], string)
        assert len("".join(words[:taken])) >= end > len("".join(words[: taken - 1]))
