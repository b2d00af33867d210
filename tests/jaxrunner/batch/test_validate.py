"""Every impossible SchedulerOutput is refused by name, and the batch is bit for bit what it was."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxrunner.batch import InputBatch, SchedulerOutputError, update_states, validate
from jaxrunner.protocol import CachedRequestData, NewRequestData, SchedulerOutput
from jaxrunner.sampling_params import SamplingParams


def batch() -> InputBatch:
    """A and B run, C is unscheduled, D is preempted; one index of four is free."""
    b = InputBatch(
        max_num_reqs=4,
        max_model_len=16,
        max_num_batched_tokens=12,
        vocab_size=100,
        block_sizes=(4,),
        num_blocks=30,
        num_speculative_tokens=2,
    )
    new = [NewRequestData(r, [1, 2, 3], ([i + 1],)) for i, r in enumerate("ABCD")]
    update_states(b, SchedulerOutput(new, num_scheduled_tokens=dict.fromkeys("ABCD", 3), total_num_scheduled_tokens=12))
    b.token_ids[:, 3], b.num_tokens[:] = 7, 4
    so = valid()
    so.preempted_req_ids = {"D"}
    update_states(b, so)
    b.token_ids[:2, 4], b.num_tokens[:2] = 8, 5
    return b


def valid() -> SchedulerOutput:
    """A and B decode one token."""
    return SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(["A", "B"], set(), [None, None], [3, 3], [1, 1]),
        num_scheduled_tokens={"A": 1, "B": 1},
        total_num_scheduled_tokens=2,
    )


def next_valid() -> SchedulerOutput:
    so = valid()
    so.scheduled_cached_reqs = CachedRequestData(["A", "B"], set(), [([9],), ([10],)], [4, 4], [2, 2])
    return so


def with_new(**fields: Any) -> SchedulerOutput:
    so = next_valid()
    data = {"req_id": "N", "prompt_token_ids": [1, 2], "block_ids": ([20],)} | fields
    so.scheduled_new_reqs = [NewRequestData(**data)]
    so.num_scheduled_tokens |= {data["req_id"]: 2}
    so.total_num_scheduled_tokens = 4
    return so


def changed(change: Callable[[SchedulerOutput], Any]) -> SchedulerOutput:
    so = next_valid()
    change(so)
    return so


def cached(**columns: Any) -> SchedulerOutput:
    so = next_valid()
    for name, value in columns.items():
        setattr(so.scheduled_cached_reqs, name, value)
    return so


def resume_without_blocks() -> SchedulerOutput:
    so = next_valid()
    so.scheduled_cached_reqs = CachedRequestData(["D"], {"D"}, [None], [0], [1])
    so.num_scheduled_tokens, so.total_num_scheduled_tokens = {"D": 4}, 4
    return so


def too_many() -> SchedulerOutput:
    so = next_valid()
    so.scheduled_new_reqs = [NewRequestData(r, [1], ([20 + i],)) for i, r in enumerate("NO")]
    so.num_scheduled_tokens |= {"N": 1, "O": 1}
    so.total_num_scheduled_tokens = 4
    return so


def drafts(values: dict[str, list[int]], scheduled: int = 2) -> SchedulerOutput:
    so = next_valid()
    so.scheduled_spec_decode_tokens = values
    so.num_scheduled_tokens["A"] = scheduled
    so.total_num_scheduled_tokens = 1 + scheduled
    return so


def resumed(tokens: list[int]) -> SchedulerOutput:
    so = next_valid()
    so.scheduled_cached_reqs = CachedRequestData(["D"], {"D"}, [([20, 21],)], [0], [1], [], {"D": tokens})
    so.num_scheduled_tokens, so.total_num_scheduled_tokens = {"D": 3}, 3
    return so


def sampled_elsewhere(tokens: list[int], computed: int = 4) -> SchedulerOutput:
    so = next_valid()
    so.scheduled_cached_reqs.new_token_ids = [tokens, []]
    so.scheduled_cached_reqs.num_computed_tokens = [computed, 4]
    so.scheduled_cached_reqs.num_output_tokens = []
    return so


def counted(so: SchedulerOutput, names: str) -> SchedulerOutput:
    """One token for each name, whoever that is."""
    so.num_scheduled_tokens, so.total_num_scheduled_tokens = dict.fromkeys(names, 1), len(names)
    return so


MANY_STOPS = SamplingParams(min_tokens=1, stop_token_ids=list(range(40)))

BAD = {
    "more stop tokens than the device keeps": (with_new(sampling_params=MANY_STOPS), "'N': min_tokens holds back at"),
    "block past the cache": (with_new(block_ids=([30],)), "block 30 in cache group 0; its block ids are 0..29"),
    "block no integer": (
        with_new(block_ids=(["x"],)),
        "block ids of cache group 0 must hold integers, got \\['str'\\]",
    ),
    "tokens no integers": (with_new(prompt_token_ids=[1.5, 2.0]), "must be a flat list of integers, got float64"),
    "count no integer": (
        changed(lambda so: so.num_scheduled_tokens.update(A=1.0)),
        "num_scheduled_tokens must hold integers, got \\['float', 'int'\\]",
    ),
    "computed no integer": (cached(num_computed_tokens=[4.0, 4]), "num_computed_tokens must hold integers"),
    "negative outputs": (cached(num_output_tokens=[-2, 2]), "num_output_tokens are not negative"),
    "comes back too long": (
        resumed([1] * 50),
        "'D': all_token_ids has 50 tokens, expected from its prompt's 3 to .* 16",
    ),
    "comes back without its prompt": (resumed([1]), "'D': all_token_ids has 1 tokens"),
    "comes back with foreign tokens": (resumed([1, 2, 500]), "token id 500 among its all_token_ids"),
    "tokens behind a gap": (sampled_elsewhere([9], 7), "'A': new_token_ids are its tokens 7 to 8; it has 5"),
    "tokens past the end": (sampled_elsewhere([9] * 60), "'A': new_token_ids are its tokens 4 to 64"),
    "foreign tokens": (sampled_elsewhere([900, 9]), "token id 900 among its new_token_ids"),
    "unknown id": (cached(req_ids=["A", "X"]), "'X' is scheduled as cached, and the runner does not know it"),
    "duplicate id": (cached(req_ids=["A", "A"]), "twice in scheduled_cached_reqs: \\['A'\\]"),
    "both new and cached": (with_new(req_id="A"), "'A' is both new and cached"),
    "new and known": (with_new(req_id="C"), "'C' is new, and the runner has one"),
    "duplicate new id": (
        changed(lambda so: setattr(so, "scheduled_new_reqs", with_new().scheduled_new_reqs * 2)),
        "twice in scheduled_new_reqs: \\['N'\\]",
    ),
    "new without a count": (counted(with_new(), "AB?"), "'N' is new and not in num_scheduled_tokens"),
    "cached without a count": (counted(next_valid(), "A?"), "\\['B'\\] are cached and not in num_scheduled_tokens"),
    "empty prompt": (with_new(prompt_token_ids=[]), "'N' has an empty prompt"),
    "prompt too long": (
        with_new(prompt_token_ids=[1] * 17, block_ids=([20, 21, 22, 23, 24],)),
        "'N' has 17 tokens, max_model_len is 16",
    ),
    "token outside the vocabulary": (
        with_new(prompt_token_ids=[1, 100]),
        "'N': token id 100 among its tokens is outside the vocabulary 0..99",
    ),
    "negative token": (with_new(prompt_token_ids=[1, -1]), "token id -1"),
    "no room for the tokens": (with_new(block_ids=([],)), "'N': position 1 lies behind its 0 blocks"),
    "wrong number of groups": (with_new(block_ids=([20], [21])), "2 cache groups, there are 1"),
    "negative block": (with_new(block_ids=([-3],)), "block -3"),
    "too many blocks": (with_new(block_ids=([1, 2, 3, 4, 5],)), "5 blocks .* 4 columns"),
    "computed past the prompt": (
        with_new(num_computed_tokens=1),
        "'N': 1 computed \\+ 2 scheduled tokens, and it has 2",
    ),
    "prefill shorter than the prompt": (with_new(prefill_token_ids=[1]), "must hold the whole prompt"),
    "sum is not total": (changed(lambda so: setattr(so, "total_num_scheduled_tokens", 3)), "adds up to 2, .* is 3"),
    "nothing for a request": (changed(lambda so: so.num_scheduled_tokens.update(A=2, B=0)), "'B' is scheduled for 0"),
    "missing count": (changed(lambda so: so.num_scheduled_tokens.pop("B")), "differs in \\['B'\\]"),
    "over the budget": (
        changed(lambda so: (so.num_scheduled_tokens.update(A=12), setattr(so, "total_num_scheduled_tokens", 13))),
        "budget max_num_batched_tokens is 12",
    ),
    "more than known": (
        changed(lambda so: (so.num_scheduled_tokens.update(A=2), setattr(so, "total_num_scheduled_tokens", 3))),
        "'A': 4 computed \\+ 2 scheduled tokens, and it has 5",
    ),
    "negative computed": (cached(num_computed_tokens=[-1, 4]), "'A': -1 computed"),
    "behind its blocks": (cached(new_block_ids=[None, ([10],)]), "'A': position 4 lies behind its 1 blocks"),
    "column lengths": (cached(new_block_ids=[None]), "new_block_ids has 1 entries for 2"),
    "finished and scheduled": (changed(lambda so: so.finished_req_ids.add("A")), "'A' is both finished and"),
    "preempted and not resumed": (
        changed(lambda so: so.preempted_req_ids.add("A")),
        "'A' was preempted: name it in resumed_req_ids",
    ),
    "preempted is unknown": (changed(lambda so: so.preempted_req_ids.add("X")), "preempted requests \\['X'\\]"),
    "resumed is not scheduled": (cached(resumed_req_ids={"D"}), "\\['D'\\] are not in"),
    "resumed without blocks": (resume_without_blocks(), "'D' is resumed without blocks"),
    "no index free": (too_many(), "2 requests enter and 1 of max_num_reqs=4"),
    "drafts of nobody": (drafts({"C": [1]}), "'C' has draft tokens and is not scheduled"),
    "too many drafts": (drafts({"A": [1, 2, 3]}, 4), "3 draft tokens, num_speculative_tokens is 2"),
    "only drafts": (drafts({"A": [1, 2]}), "2 draft tokens among 2 scheduled"),
    "drafts beyond what is scheduled": (
        changed(
            lambda so: (
                setattr(so, "scheduled_spec_decode_tokens", {"B": [1, 2]}),
                so.num_scheduled_tokens.update(A=1, B=3),
                setattr(so, "total_num_scheduled_tokens", 4),
                so.scheduled_cached_reqs.num_computed_tokens.__setitem__(1, 3),
            )
        ),
        "'B': 3 computed \\+ 3 scheduled tokens end before its 5 tokens and 2 drafts do",
    ),
    "writes another's block": (
        with_new(block_ids=([1],)),
        "'N', with 0 tokens computed, writes positions 0 to 3 to block 1 in cache group 0, which 'A' holds too",
    ),
    "holds a block that another writes": (
        with_new(prompt_token_ids=[1] * 6, num_computed_tokens=4, block_ids=([10, 20],)),
        "'B', with 4 tokens computed, writes positions 4 to 7 to block 10 in cache group 0, which 'N' holds too",
    ),
    "one block in two places": (
        with_new(prompt_token_ids=[1] * 6, num_computed_tokens=4, block_ids=([20, 20],)),
        "'N', with 4 tokens computed, writes positions 4 to 7 to block 20 in cache group 0, which 'N' holds too",
    ),
    "writes the null block": (
        with_new(block_ids=([0],)),
        "'N', .* to block 0 in cache group 0, which is the null block",
    ),
    "more requests than rows": (
        counted(
            changed(lambda so: setattr(so, "scheduled_new_reqs", [NewRequestData(r, [1], ([20],)) for r in "NOPQ"])),
            "ABNOPQ",
        ),
        "6 requests are scheduled, and max_num_reqs is 4",
    ),
    "too large for 32 bits": (
        cached(num_computed_tokens=[2**40, 4]),
        "num_computed_tokens must fit into 32 bits, got 10995",
    ),
    "draft outside the vocabulary": (drafts({"A": [100]}), "'A': token id 100 among its draft tokens"),
}


def picture(b: InputBatch) -> list:
    """Everything the batch holds, bit for bit."""
    arrays = [b.columns[c.name].copy() for c in b.columns.columns]
    arrays += [b.block_table[0].table.copy(), b.block_table[0].num_blocks.copy()]
    arrays += [b.row_fields, b.row_of_index, b.num_scheduled, b.scheduled_indices, b.row_indices]
    arrays += [b.block_owners[0].holders]
    plain = (b.req_ids, b.req_id_to_index, b.requests, b.index_of, b._free_indices, b.scheduled_ids, b._entered)
    plain += (b.flags, b.rows.end, b.rows.holes, b.any_drafts, b.scheduled_each, b.longest)
    return [repr(plain), [a.tobytes() for a in arrays]]


def test_the_valid_step_is_accepted() -> None:
    b = batch()
    update_states(b, next_valid())
    update_states(batch(), with_new())
    assert b.req_ids == ["A", "B"]


@pytest.mark.parametrize("name", BAD)
def test_refused_and_unchanged(name: str) -> None:
    so, message = BAD[name]
    b = batch()
    before = picture(b)
    with pytest.raises(SchedulerOutputError, match=message) as error:
        update_states(b, so)
    assert [n for n, (_, other) in BAD.items() if re.search(other, str(error.value))] == [name]  # no other's words
    assert picture(b) == before
    update_states(b, next_valid())  # and the next good step goes through


def test_sharing_below_everyones_computed_tokens_is_legal() -> None:
    b = batch()
    shared = with_new(prompt_token_ids=[1, 2, 3, 7, 9, 9], num_computed_tokens=4, block_ids=([1, 20],))
    update_states(b, shared)  # A's block 1 is full: A goes on in block 9
    assert b.block_owners[0].any_shared
    so = next_valid()
    so.scheduled_cached_reqs = CachedRequestData(["A", "N"], set(), [None, None], [4, 5], [2, 0])
    counted(so, "AN")
    update_states(b, so)
    again = with_new(req_id="M", prompt_token_ids=[1] * 9, num_computed_tokens=4, block_ids=([20, 21],))
    again.scheduled_cached_reqs = so.scheduled_cached_reqs
    again.num_scheduled_tokens, again.finished_req_ids = {"A": 1, "N": 1, "M": 2}, {"C"}
    before = picture(b)
    with pytest.raises(SchedulerOutputError, match="'N', with 5 .* positions 4 to 7 to block 20 .* which 'M' holds"):
        update_states(b, again)
    assert picture(b) == before


def test_a_block_goes_from_hand_to_hand_within_a_step() -> None:
    b = batch()
    so = with_new(block_ids=([3],))
    so.finished_req_ids = {"C"}  # whose block 3 was
    update_states(b, so)
    assert b.block_ids_of("N").tolist() == [3]
    so = next_valid()
    so.scheduled_cached_reqs = CachedRequestData(["A", "N"], {"N"}, [None, ([2],)], [4, 0], [2, 0])
    so.preempted_req_ids = {"N"}
    so.finished_req_ids = {"B"}  # whose block 2 was
    update_states(b, counted(so, "AN"))
    assert b.block_ids_of("N").tolist() == [2]


def test_owners_are_counted_anew_after_a_step_that_was_not_checked() -> None:
    b = batch()
    update_states(b, with_new(block_ids=([20],)), check=False)
    b.remove_request("C")
    again = with_new(req_id="M", block_ids=([20],))
    again.scheduled_cached_reqs, again.num_scheduled_tokens = CachedRequestData(), {"M": 2}
    again.total_num_scheduled_tokens = 2
    with pytest.raises(SchedulerOutputError, match="'M', with 0 .* to block 20 .* which 'N' holds too"):
        update_states(b, again)
    again.scheduled_new_reqs[0].block_ids = ([3],)  # C's, until it was removed
    update_states(b, again)


def test_holders_of_one_block_are_counted_one_by_one() -> None:
    b = batch()
    so = with_new(prompt_token_ids=[1, 2, 3, 7, 9, 9], num_computed_tokens=4, block_ids=([1, 20],))
    other = NewRequestData("M", [1, 2, 3, 7, 9, 9], ([1, 21],), 4)
    so.scheduled_new_reqs.append(other)
    so.num_scheduled_tokens["M"], so.total_num_scheduled_tokens, so.finished_req_ids = 2, 6, {"C"}
    update_states(b, so)
    assert b.block_owners[0].holders[[1, 20, 21, 3]].tolist() == [3, 1, 1, 0]
    update_states(b, SchedulerOutput(finished_req_ids={"M"}, preempted_req_ids={"N"}))
    assert b.block_owners[0].holders[[1, 20, 21]].tolist() == [1, 0, 0]


@pytest.mark.parametrize("as_array", [False, True])
def test_tokens_are_looked_at_as_lists_and_as_arrays(as_array: bool) -> None:
    for tokens, bad in (([1, 100], 100), ([-1, 2], -1)):
        b = batch()
        so = with_new(prompt_token_ids=np.array(tokens, np.int64) if as_array else tokens)
        with pytest.raises(SchedulerOutputError, match=f"'N': token id {bad} among its tokens"):
            update_states(b, so)
    for wrong in (np.array([1.0, 2.0]), np.array([[1, 2]]), np.array([1, 2**40])):
        with pytest.raises(SchedulerOutputError, match="'N': its tokens must"):
            update_states(batch(), with_new(prompt_token_ids=wrong))
    b = batch()
    update_states(b, with_new(prompt_token_ids=np.array([5, 6], np.int64)))
    assert b.token_ids_of("N").tolist() == [5, 6]


def test_validate_alone_changes_nothing() -> None:
    b = batch()
    before = picture(b)
    validate(b, with_new())
    assert picture(b) == before


def test_tokens_sampled_elsewhere_join_on_beside_a_new_request() -> None:
    b = batch()
    so = sampled_elsewhere([8, 9, 10])  # from its token 4 on: the first is known
    so.scheduled_new_reqs = [NewRequestData("N", [1, 2], ([20],))]
    so.num_scheduled_tokens |= {"N": 2}
    so.total_num_scheduled_tokens += 2
    update_states(b, so)
    assert b.token_ids_of("A").tolist() == [1, 2, 3, 7, 8, 9, 10]


def test_check_can_be_left_out() -> None:
    b = batch()
    so = next_valid()
    so.total_num_scheduled_tokens = 99
    update_states(b, so, check=False)
    assert np.array_equal(b.num_scheduled[:2], [1, 1])
