"""Reading lists: every way gives what NumPy gives, and what is no integer of 32 bits is refused or passed on."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrunner.batch.packing import Scratch, lookup, pack, pack_equal, pack_indices, runs
from jaxrunner.request_tables import check_tables
from jaxrunner.sampling_columns import RecordWriter, sampling_flags, sampling_record
from jaxrunner.sampling_params import SamplingParams

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32), st.integers(0, 3))
def test_pack(values: list[int], at: int) -> None:
    out = np.full(len(values) + at + 1, 7, np.int32)
    assert pack(out, values, at).tolist() == values
    assert out.tolist() == [7] * at + values + [7]
    assert pack_indices(np.empty(len(values), np.intp), values).tolist() == values


@pytest.mark.parametrize("bad", [1.0, "1", None, 2**31, -(2**31) - 1])
def test_what_is_no_integer_of_32_bits_is_refused(bad: Any) -> None:
    with pytest.raises(struct.error):
        pack(np.zeros(2, np.int32), [1, bad])


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(INT32, min_size=n, max_size=n), min_size=1)))
def test_lists_of_one_length(lists: list[list[int]]) -> None:
    got = pack_equal(lists, len(lists[0]))
    assert got is not None and got.dtype == np.int32 and got.tolist() == [x for values in lists for x in values]


@pytest.mark.parametrize(
    "lists",
    [
        [[1, 2], [3]],
        [[1], [2, 3], [4, 5, 6]],
        [[1, 2], [3, 2**31]],
        [[1, True], [3, 4]],
        [[1, 2.0], [3, 4]],
        [[1, None], [3, 4]],
        [(1, 2), [3, 4]],
        [[1, np.int32(2)], [3, 4]],
        [np.array([1, 2], np.int32), [3, 4]],
        [[1, object()], [3, 4]],
    ],
    ids=repr,
)
def test_other_lists_are_left_to_others(lists: list) -> None:
    assert pack_equal(lists, 2) is None


def test_runs_lookup_and_scratch() -> None:
    assert runs(np.array([10, 5, 0]), np.array([2, 0, 3], np.int32)).tolist() == [10, 11, 0, 1, 2]
    table = {"a": 1, "b": 2}
    assert [*lookup(table, [])] == [] and [*lookup(table, ["b"])] == [2] and [*lookup(table, ["b", "a"])] == [2, 1]
    with pytest.raises(KeyError, match="c"):
        lookup(table, ["a", "c"])
    scratch = Scratch(2)
    assert scratch.of(2) is scratch.of(1) and len(scratch.of(3)) >= 3


# Another value for the fields. (All of them, later ones too, are part of what a kept record is looked up by.)
OTHER: dict[str, Any] = {
    "n": 2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "temperature": 0.5,
    "top_p": 0.5, "top_k": 5, "min_p": 0.5, "seed": 2**40 + 7, "stop": ["x"], "stop_token_ids": [3], "ignore_eos": True,
    "max_tokens": 99, "min_tokens": 3, "logprobs": 2, "prompt_logprobs": 2, "detokenize": False,
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "include_stop_str_in_output": True,
    "truncate_prompt_tokens": 4, "structured_outputs": {"regex": "a"}, "logit_bias": {3: 1.0},
    "allowed_token_ids": [3, 4], "bad_words": ["x"], "logits_processors": [print], "extra_args": {"a": 1},
    "flat_logprobs": True, "logprob_token_ids": [3], "skip_reading_prefix_cache": True, "thinking_token_budget": 3,
    "repetition_detection": {"max_pattern_size": 2, "min_count": 2}, "bad_words_token_ids": [[3]],
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_a_kept_record_is_the_requests_own(name: str) -> None:
    def record_of(req_id: str, params: SamplingParams, num_prompt: int) -> bytes:
        check_tables(params, 100)
        return sampling_record(params, req_id, num_prompt, (1,), 5)

    writer = RecordWriter(record_of, 5)
    more = {"bad_words_token_ids": [[3]]} if name == "bad_words" else {}
    others = [SamplingParams(), SamplingParams(**{name: OTHER[name]}, **more)]
    for req_id, num_prompt in (("a", 3), ("b", 400), ("a", 5)):
        for params in others:
            expected = record_of(req_id, params, num_prompt), sampling_flags(params)
            assert writer.write(req_id, params, num_prompt) == expected
