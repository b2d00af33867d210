"""Outputs that repeat themselves: found where a brute-force search finds them, and ended there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrunner import LLM, RepetitionDetectionParams, SamplingParams
from jaxrunner.request import Request
from tests.jaxrunner.chain import successor_logits, write_chain
from tests.jaxrunner.small_llm import OPTIONS

small = st.integers(0, 4)


@given(st.lists(st.integers(0, 1), max_size=16), small, small, st.integers(2, 4))
def test_what_is_found_is_what_a_search_finds(tokens, longest, shortest, count):
    params = RepetitionDetectionParams(max(longest, shortest), shortest, count)
    sizes = range(max(shortest, 1), max(longest, shortest) + 1)
    ends = [tokens[-size:] * count for size in sizes if size <= len(tokens)]
    assert params.found_in(tokens) == any(len(end) <= len(tokens) and tokens[-len(end) :] == end for end in ends)


@pytest.mark.parametrize("size", [1, 20, 2048])
def test_long_patterns_are_compared_to_their_end(size):
    pattern, params = list(range(size)), RepetitionDetectionParams(size, size, 2)
    assert params.found_in([7, *pattern, *pattern])
    assert not params.found_in([*pattern[1:], *pattern])
    assert not params.found_in([9999, *pattern[1:], *pattern])


def request(**params):
    detection = {"max_pattern_size": 5, "min_pattern_size": 2, "min_count": 3}
    return Request("r", [10, 20, 10, 20], SamplingParams(max_tokens=8, repetition_detection=detection, **params), [99])


@pytest.mark.parametrize(
    ("tokens", "params", "reason"),
    [
        ([10, 20, 10, 20, 10, 20], {}, ("repetition", "repetition_detected")),
        ([10, 20], {}, (None, None)),  # the prompt is none of it
        ([10, 20, 10, 20, 10, 20], {"min_tokens": 7}, (None, None)),
        ([10, 20, 10, 20, 10, 20, 10], {"min_tokens": 7}, ("repetition", "repetition_detected")),
        ([10, 20, 10, 20, 99], {}, ("stop", None)),
        ([10, 99, 10, 99, 10, 99], {"ignore_eos": True, "stop_token_ids": [30]}, ("repetition", "repetition_detected")),
        ([1, 1, 1], {}, (None, None)),  # shorter than the shortest pattern
        ([5, 5, 10, 20, 10, 20, 10, 20], {}, ("length", None)),  # as in vLLM the limit comes first
    ],
)
def test_when_it_ends_a_request(tokens, params, reason):
    r = request(**params)
    for token in tokens:
        assert not r.status.is_finished
        r.append_output_tokens([token])
    assert (r.status.finish_reason, r.stop_reason) == reason


def test_several_tokens_of_one_step():
    r = request()
    assert r.append_output_tokens([10, 20, 10, 20, 10, 20, 30]) == [10, 20, 10, 20, 10, 20]
    assert r.status.finish_reason == "repetition"


def test_through_the_model(tmp_path):
    llm = LLM(write_chain(tmp_path, successor_logits(48, {3: 4, 4: 5, 5: 3})), **OPTIONS)
    each = [
        SamplingParams(temperature=0, max_tokens=20, detokenize=False, repetition_detection=detection)
        for detection in (RepetitionDetectionParams(4, 1, 3), None)
    ]
    repeated, other = (o.outputs[0] for o in llm.generate([[1], [1]], each, use_tqdm=False))
    assert repeated.token_ids == [2, *[3, 4, 5] * 3] and len(other.token_ids) == 20
    assert (repeated.finish_reason, repeated.stop_reason) == ("repetition", "repetition_detected")
    assert llm.stats().num_running == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"max_pattern_size": 4}, r"repetition_detection.min_count must be an integer from 2 to .* got 0"),
        ({"max_pattern_size": 2049, "min_count": 2}, r"max_pattern_size must be an integer from 0 to 2048, got 2049"),
        ({"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}, r"min_pattern_size \(2\) is greater than"),
        ({"max_patern_size": 1}, r"has no \['max_patern_size'\]; it has \['max_pattern_size'"),
        (True, "must be RepetitionDetectionParams or a mapping"),
    ],
)
def test_what_makes_no_sense_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(repetition_detection=value)
