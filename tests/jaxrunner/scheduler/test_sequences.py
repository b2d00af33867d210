"""Several sequences of one prompt: computed once, shared, and copied where they part. The fake runner reads every
position back and lets nobody write into a shared block.
"""

import pytest

from jaxrunner.request import Request
from jaxrunner.sampling_params import SamplingParams
from tests.jaxrunner.scheduler.workload import Workload

NAMES = ["a", "1_a", "2_a", "3_a"]


def four(prompt: int, num_blocks=60, **limits) -> Workload:
    work = Workload(num_blocks, **limits)
    work.add_sequences(NAMES, list(range(1, prompt + 1)), max_tokens=9, ignore_eos=True)
    return work


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt", [1, 7, 8, 9])
def test_the_prompt_is_computed_once(prompt, caching):
    work = four(prompt, caching=caching)
    assert list(work.step().num_scheduled_tokens) == ["a"]
    output = work.step()
    assert output.num_scheduled_tokens == dict.fromkeys(NAMES, 1)
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [prompt - 1] * 3
    # Of 9 tokens in blocks of 4 the last begins a block, so there is nothing to copy.
    shared, copied = (prompt - 1) // 4, (prompt - 1) % 4 > 0
    blocks = [work.manager.get_blocks(work.alive[name])[0] for name in NAMES]
    assert all(held[:shared] == blocks[0][:shared] for held in blocks)
    assert len({held[shared] for held in blocks}) == 4
    expected = [[(blocks[0][shared], held[shared]) for held in blocks[1:]]] if copied else []
    assert output.block_copies == expected
    assert (work.manager.stats.branches, work.manager.stats.branched) == (3, 3 * (prompt - 1))
    assert (work.manager.stats.requests, work.manager.stats.hits) == (1, 0)
    work.run()


def test_each_group_shares_and_copies_its_own():
    work = four(7, block_sizes=(2, 4))
    work.step()
    output = work.step()
    assert [len(copies) for copies in output.block_copies] == [0, 3]  # six tokens fill three blocks of two
    work.run()


def test_a_prompt_in_chunks_is_waited_for_and_others_go_first():
    work = four(20, max_num_batched_tokens=8)
    work.add("other", [9], max_tokens=9, ignore_eos=True)
    seen = [list(work.step().num_scheduled_tokens) for _ in range(4)]
    assert seen == [["a"], ["a"], ["a", "other"], ["a", "other", *NAMES[1:]]]
    assert [request.request_id for request in work.scheduler.running] == [*NAMES, "other"]  # by arrival
    work.run()


def test_sequences_branch_off_a_leader_that_has_ended():
    for caching in (True, False):
        work = Workload(num_blocks=40, caching=caching, max_num_seqs=1)
        work.add_sequences(NAMES, [1] * 15, max_tokens=1)
        total = 0
        while work.scheduler.has_requests():
            total += work.step().total_num_scheduled_tokens
        assert total == 15 + 3
        assert work.manager.num_free_blocks == 39


@pytest.mark.parametrize("caching", [True, False])
def test_a_hold_is_given_up_before_anyone_loses_blocks(caching):
    """The leader ends, and the pool is as large as one sequence: the others can't branch off, and run all the same."""
    work = Workload(num_blocks=6, max_num_seqs=1, caching=caching)
    work.add_sequences(NAMES, [1] * 17, max_tokens=1)
    work.run()
    assert work.scheduler.num_preemptions == 0

    work = Workload(num_blocks=10, caching=caching, max_num_seqs=2)
    work.add_sequences(NAMES, [1] * 12, max_tokens=20, ignore_eos=True)
    work.run()


def test_a_hold_is_given_up_before_anyone_loses_blocks_that_it_uses():
    """Five blocks: one sequence of 20 tokens needs them all, while the shared prompt still waits for another one."""
    work = Workload(num_blocks=6, max_num_seqs=1, caching=False)
    leader = work.add("a", [1] * 12, max_tokens=1)
    for name, max_tokens in [("1_a", 9), ("2_a", 2)]:
        work.add(name, [1] * 12, max_tokens=max_tokens, ignore_eos=True, leader=leader)
    work.step()
    work.step()
    assert work.manager.holds and list(work.alive) == ["1_a", "2_a"]
    work.run()
    assert work.scheduler.num_preemptions == 0
    assert work.manager.stats.branches == 1  # the third computed the prompt for itself


def test_a_hold_does_not_hide_what_all_share():
    work = four(9, max_num_seqs=2)
    work.step()
    assert work.step().num_common_prefix_blocks == [2] and work.manager.holds
    work.run()


def test_an_aborted_leader_frees_those_that_wait_for_it():
    for when in ("before", "between", "after"):
        work = four(12, max_num_batched_tokens=8)
        if when == "before":
            work.abort("a")
        work.step(["a"] if when == "between" else [])
        if when == "after":
            work.abort("a")
        work.run()
        assert all(len(work.outputs[name]) == 9 for name in NAMES[1:])


def test_an_aborted_leader_whose_prompt_is_computed_is_still_branched_off():
    work = four(7, caching=False)
    work.step()
    work.abort("a")
    assert work.step().num_scheduled_tokens == dict.fromkeys(NAMES[1:], 1)
    work.run()


def test_sequences_end_while_they_wait():
    work = four(12, max_num_batched_tokens=8)
    for name in NAMES[1:]:
        work.abort(name)
    work.step()
    work.run()
    work = four(12, max_num_seqs=1)
    work.step()
    for name in NAMES[1:]:  # nobody needs the hold any more
        assert work.manager.holds
        work.abort(name)
    assert not work.manager.holds
    work.run()


def test_nobody_branches_off_what_was_computed_before_a_reset():
    for after_steps in (1, 2):
        for aborted in (True, False):
            work = four(12, max_num_batched_tokens=8)
            for _ in range(after_steps):
                work.step()
            work.reset_prefix_cache()  # the fake runner's weights change, and it refuses what the old ones computed
            if aborted:
                work.abort("a")
            work.run()
            assert work.manager.stats.branches == 0


def test_a_salted_prompt_is_shared_between_its_sequences():
    work = Workload(num_blocks=40)
    work.add_sequences(NAMES, [1] * 9, salt="x", max_tokens=2)
    work.run()
    assert work.manager.stats.branches == 3


def test_a_preempted_sequence_comes_back_on_its_own():
    work = Workload(num_blocks=14)
    work.add_sequences(NAMES, [1] * 6, max_tokens=20, ignore_eos=True)
    work.run()
    assert work.scheduler.num_preemptions > 0


def test_prompt_logprobs_are_the_leaders():
    leader = Request("a", [1], SamplingParams())
    with pytest.raises(ValueError, match="'b' has a leader, so the leader's prompt_logprobs are its own"):
        Request("b", [1], SamplingParams(prompt_logprobs=1), leader=leader)
