"""When a request stops, and what is left of a step's tokens then."""

import copy

import pytest

from jaxrunner.request import Request, RequestStatus
from jaxrunner.sampling_params import SamplingParams


def request(prompt=(1, 2, 3), eos=(90, 91), **params) -> Request:
    return Request("r", prompt, SamplingParams(**params), eos)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="'r' has an empty prompt"):
        request(prompt=[])


def test_tokens_are_counted():
    r = request(max_tokens=5)
    assert r.append_output_tokens([4]) == [4]
    assert (r.num_tokens, r.num_prompt_tokens, r.num_output_tokens) == (4, 3, 1)
    assert (r.all_token_ids, r.output_token_ids, r.prompt_token_ids) == ([1, 2, 3, 4], [4], [1, 2, 3])
    assert not r.status.is_finished and r.status.finish_reason is None


@pytest.mark.parametrize("eos", [90, 91])
def test_every_end_of_sequence_id_stops(eos):
    r = request(max_tokens=5)
    r.append_output_tokens([4])
    assert r.append_output_tokens([eos]) == [eos]  # it counts as output
    assert (r.status.finish_reason, r.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on_past_every_one_of_them():
    r = request(max_tokens=4, ignore_eos=True)
    for token in [90, 91, 90, 91]:
        assert not r.status.is_finished
        r.append_output_tokens([token])
    assert (r.status.finish_reason, r.output_token_ids) == ("length", [90, 91, 90, 91])


def test_a_stop_token_is_the_stop_reason():
    r = request(max_tokens=5, stop_token_ids=[7, 8])
    r.append_output_tokens([8])
    assert (r.status.finish_reason, r.stop_reason) == ("stop", 8)


def test_a_stop_token_that_is_an_end_of_sequence_id_stops_despite_ignore_eos():
    r = request(max_tokens=5, stop_token_ids=[90], ignore_eos=True)
    r.append_output_tokens([91])
    r.append_output_tokens([90])
    assert (r.status.finish_reason, r.stop_reason) == ("stop", 90)


def test_max_tokens_and_the_length_limit():
    r = request(max_tokens=2)
    r.append_output_tokens([4])
    r.append_output_tokens([4])
    assert r.status is RequestStatus.FINISHED_LENGTH

    r = request(max_tokens=None)
    r.limit_length(5)
    r.append_output_tokens([4])
    assert not r.status.is_finished
    r.append_output_tokens([4])
    assert (r.status.finish_reason, r.num_tokens) == ("length", 5)


def test_stopping_wins_over_the_length():
    r = request(max_tokens=1)
    r.append_output_tokens([90])
    assert r.status.finish_reason == "stop"


def test_min_tokens_holds_back_stops_but_not_the_length():
    r = request(max_tokens=9, min_tokens=2, stop_token_ids=[7])
    r.append_output_tokens([90])
    r.append_output_tokens([7])
    assert not r.status.is_finished
    r.append_output_tokens([90])  # the first that has two before it
    assert r.status.finish_reason == "stop"

    r = request(max_tokens=None, min_tokens=10)
    r.limit_length(5)
    r.append_output_tokens([4, 4])
    assert r.status.finish_reason == "length"


@pytest.mark.parametrize(
    ("params", "taken", "reason"),
    [
        ({"max_tokens": 9}, [4, 90], "stop"),
        ({"max_tokens": 9, "min_tokens": 2}, [4, 90, 5, 91], "stop"),
        ({"max_tokens": 9, "stop_token_ids": [5], "ignore_eos": True}, [4, 90, 5], "stop"),
        ({"max_tokens": 3, "ignore_eos": True}, [4, 90, 5], "length"),
        ({"max_tokens": 5, "ignore_eos": True}, [4, 90, 5, 91, 6], "length"),
        ({"max_tokens": 6, "ignore_eos": True}, [4, 90, 5, 91, 6], None),
    ],
)
def test_a_stop_inside_a_step_drops_the_rest(params, taken, reason):
    r = request(**params)
    assert r.append_output_tokens([4, 90, 5, 91, 6]) == taken
    assert (r.output_token_ids, r.status.finish_reason) == (taken, reason)
    assert r.all_token_ids == [1, 2, 3, *taken]


def test_what_the_caller_gave_stays_the_callers():
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=3, stop_token_ids=[5])
    before = copy.deepcopy(params)
    r = Request("r", prompt, params, [9])
    r.append_output_tokens([4])
    prompt.append(99)
    assert r.all_token_ids == [1, 2, 3, 4] and r.prompt_token_ids == [1, 2, 3]
    assert r.sampling_params is params and params == before
