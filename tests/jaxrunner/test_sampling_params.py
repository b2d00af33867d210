"""Ranges are checked when parameters are made, and a caller's object never changes."""

import math

import numpy as np
import pytest

from jaxrunner.sampling_params import SamplingParams

BAD = [
    ({"temperature": -0.1}, "temperature must be from 0 to 3.4e\\+38, got -0.1"),
    ({"top_p": 0.0}, "top_p must be greater than 0"),
    ({"top_p": 1.1}, "top_p must be from 0 to 1"),
    ({"top_k": -2}, "top_k must be an integer from -1"),
    ({"top_k": 1.5}, "top_k must be an integer"),
    ({"top_k": True}, "top_k must be an integer"),
    ({"min_p": 1.5}, "min_p must be from 0 to 1"),
    ({"presence_penalty": 2.5}, "presence_penalty must be from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty must be from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty must be greater than 0"),
    ({"n": 0}, "n must be an integer from 1"),
    ({"seed": 2**64}, "seed must be an integer"),
    ({"max_tokens": 0}, "max_tokens must be an integer from 1"),
    ({"min_tokens": -1}, "min_tokens must be an integer from 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is greater than max_tokens 4"),
    ({"logprobs": -2}, "logprobs must be an integer from -1"),
    ({"stop": ""}, "stop holds an empty string"),
    ({"stop": ["a", ""]}, "stop holds an empty string"),
    ({"stop": [1]}, "stop must be a string or a list of strings"),
    ({"stop_token_ids": [-1]}, "stop_token_ids\\[0\\] must be an integer from 0"),
    ({"stop_token_ids": "12"}, "stop_token_ids must be a list of token ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"temperature": 1e39}, "temperature must be from 0 to 3.4e\\+38, got 1e\\+39"),
    ({"n": 2, "temperature": 0}, "greedy sequences are all the same"),
    ({"n": 10**9}, "n must be an integer from 1 to 16384"),
    ({"ignore_eos": "false"}, "ignore_eos must be True or False, got 'false'"),
    ({"detokenize": 0}, "detokenize must be True or False, got 0"),
    ({"logit_bias": {2.7: 1}}, "logit_bias key must be an integer"),
    ({"logit_bias": {"abc": 1}}, "logit_bias key must be an integer from 0"),
    ({"logit_bias": {-1: 1}}, "logit_bias key must be an integer from 0"),
    ({"logit_bias": {3: math.nan}}, "logit_bias\\[3\\] must be a finite number"),
    ({"logit_bias": {3: math.inf}}, "logit_bias\\[3\\] must be a finite number"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids\\[0\\] must be an integer from 0"),
    ({"bad_words_token_ids": [[-1]]}, "bad_words_token_ids\\[0\\] must be an integer from 0"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or at least 1"),
    ({"stop": ["a"], "detokenize": False}, "stop strings need the text"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=str)
def test_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_numbers_must_be_finite(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be a finite number"):
        SamplingParams(**{field: value})


def test_normalised_once_and_immutable() -> None:
    words = ["x"]
    params = SamplingParams(stop=words, top_k=-1, temperature=1e-6)
    assert params.stop == ("x",) and params.top_k == 0 and params.is_greedy
    words.append("y")
    assert params.stop == ("x",)
    with pytest.raises(AttributeError):
        params.temperature = 2.0  # type: ignore[misc]
    assert SamplingParams(stop=[]).stop == () and SamplingParams(stop=None).stop == ()


def test_what_is_accepted_as_it_comes() -> None:
    """NumPy's integers, JSON's string keys, repeated stop tokens, vLLM's seed of -1."""
    params = SamplingParams(
        stop_token_ids=[np.int64(3), 3, 5], top_k=np.int32(4), logit_bias={"7": 1, 8: np.float32(-200)}, seed=-1
    )
    assert params.stop_token_ids == (3, 5) and params.top_k == 4 and params.seed is None
    assert params.logit_bias == {7: 1.0, 8: -100.0}


def test_from_dict_names_what_it_does_not_know() -> None:
    assert SamplingParams.from_dict({"top_k": 3}).top_k == 3
    with pytest.raises(ValueError, match="unknown sampling parameters \\['topk'\\]"):
        SamplingParams.from_dict({"topk": 3})
