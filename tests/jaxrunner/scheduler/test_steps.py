"""Who runs how many tokens in a step, and how the runner is told."""

import pytest

from jaxrunner.protocol import ModelRunnerOutput
from jaxrunner.scheduler import SchedulerConfig
from tests.jaxrunner.scheduler.workload import Workload


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be an integer of at least 1, got 0"),
        ({"max_model_len": 1}, "max_model_len must be an integer of at least 2, got 1"),
        ({"max_model_len": 99.5}, "max_model_len must be an integer of at least 2, got 99.5"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be .* at least 0, got -1"),
        ({"policy": "lifo"}, "policy must be one of .*'fcfs', 'priority'.*, got 'lifo'"),
        ({"max_num_partial_prefills": -1}, "max_num_partial_prefills must be an integer of at least 0, got -1"),
        ({"max_long_partial_prefills": 1}, "long_prefill_token_threshold, which is 0: set both or neither"),
        (
            {"max_long_partial_prefills": 3, "max_num_partial_prefills": 2, "long_prefill_token_threshold": 5},
            "max_long_partial_prefills .3. must be at most max_num_partial_prefills .2.",
        ),
    ],
)
def test_a_limit_out_of_range_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 99, **changes})


def test_a_new_request_is_sent_whole_and_then_only_differences():
    work = Workload(num_blocks=20)
    request = work.add("a", [1, 2, 3], max_tokens=3, ignore_eos=True)
    output = work.step()
    (new,) = output.scheduled_new_reqs
    assert (new.req_id, new.prompt_token_ids, new.block_ids) == ("a", [1, 2, 3], ([1],))
    assert (new.num_computed_tokens, new.sampling_params) == (0, request.sampling_params)
    assert (output.num_scheduled_tokens, output.total_num_scheduled_tokens) == ({"a": 3}, 3)
    assert not output.scheduled_cached_reqs.req_ids

    for computed, outputs, new_blocks in [(3, 1, None), (4, 2, ([2],))]:
        output = work.step()
        cached = output.scheduled_cached_reqs
        assert not output.scheduled_new_reqs and output.num_scheduled_tokens == {"a": 1}
        assert (cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens) == (["a"], [computed], [outputs])
        assert cached.new_block_ids == [new_blocks]
        assert not cached.new_token_ids and not cached.all_token_ids and not cached.resumed_req_ids


def test_what_was_sent_does_not_change_afterwards():
    work = Workload(num_blocks=20)
    work.add("a", [1, 2, 3], max_tokens=9, ignore_eos=True)
    (new,) = work.step().scheduled_new_reqs
    for _ in range(6):
        work.step()
    assert (new.prompt_token_ids, new.block_ids) == ([1, 2, 3], ([1],))


def test_chunks_of_a_prompt_run_beside_decodes():
    work = Workload(num_blocks=40, max_num_batched_tokens=8)
    work.add("a", [1, 2], max_tokens=9, ignore_eos=True)
    work.step()
    work.add("b", [2] * 20, max_tokens=9, ignore_eos=True)
    work.add("c", [3] * 2, max_tokens=9, ignore_eos=True)
    seen = [work.step().num_scheduled_tokens for _ in range(4)]
    assert seen == [{"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 6, "c": 1}, {"a": 1, "b": 1, "c": 1}]
    assert [len(work.outputs[name]) for name in "abc"] == [5, 2, 1]


def test_a_chunk_that_ends_with_the_budget_gives_no_token_too_early():
    work = Workload(num_blocks=40, max_num_batched_tokens=4)
    work.add("a", [1] * 8, max_tokens=2, ignore_eos=True)
    work.step()
    assert work.outputs["a"] == []
    work.step()
    assert len(work.outputs["a"]) == 1


def test_the_threshold_leaves_room_for_others():
    work = Workload(num_blocks=40, max_num_batched_tokens=12, threshold=5)
    work.add("long", [1] * 20, max_tokens=2, ignore_eos=True)
    work.add("short", [2] * 3, max_tokens=2, ignore_eos=True)
    seen = [work.step().num_scheduled_tokens for _ in range(2)]
    assert seen == [{"long": 5, "short": 3}, {"long": 5, "short": 1}]


def test_a_threshold_above_the_budget_changes_nothing():
    work = Workload(num_blocks=40, max_num_batched_tokens=4, threshold=9)
    work.add("a", [1] * 6, max_tokens=2)
    assert work.step().num_scheduled_tokens == {"a": 4}


def test_max_num_seqs():
    work = Workload(num_blocks=40, max_num_seqs=2)
    for name in "abc":
        work.add(name, [1], max_tokens=2, ignore_eos=True)
    seen = [list(work.step().num_scheduled_tokens) for _ in range(3)]
    assert seen == [["a", "b"], ["a", "b"], ["c"]]


def test_more_requests_than_the_budget_has_tokens():
    work = Workload(num_blocks=40, max_num_batched_tokens=3)
    for name in "abcde":
        work.add(name, [1], max_tokens=2, ignore_eos=True)
    assert [list(work.step().num_scheduled_tokens) for _ in range(4)] == [["a", "b", "c"]] * 2 + [["d", "e"]] * 2


def test_a_large_request_at_the_head_is_not_overtaken():
    work = Workload(num_blocks=8)
    work.add("a", [1] * 12, max_tokens=4, ignore_eos=True)
    work.add("large", [2] * 20, max_tokens=2, ignore_eos=True)
    work.add("small", [3], max_tokens=2, ignore_eos=True)
    seen = [list(work.step().num_scheduled_tokens) for _ in range(5)]
    assert seen == [["a"]] * 4 + [["large", "small"]]


def test_an_empty_step_still_tells_who_finished():
    work = Workload(num_blocks=8)
    work.add("a", [1], max_tokens=1)
    assert work.step().finished_req_ids == set()
    assert not work.scheduler.has_unfinished_requests() and work.scheduler.has_requests()
    output = work.scheduler.schedule()
    assert (output.total_num_scheduled_tokens, output.finished_req_ids) == (0, {"a"})
    assert output.num_common_prefix_blocks == [0]
    assert work.scheduler.update_from_output(output, ModelRunnerOutput()) == []
    assert not work.scheduler.has_requests()
    assert work.scheduler.schedule().finished_req_ids == set()  # told once


def test_all_groups_are_told_of():
    work = Workload(num_blocks=20, block_sizes=(2, 4))
    work.add("a", [1, 2, 3], max_tokens=9, ignore_eos=True)
    output = work.step()
    assert output.scheduled_new_reqs[0].block_ids == ([1, 2], [1])
    assert output.num_common_prefix_blocks == [0, 0]
    grown = [work.step().scheduled_cached_reqs.new_block_ids for _ in range(4)]
    assert grown == [[None], [([3], [2])], [None], [([4], [])]]


def test_prefix_shared_by_all_is_counted():
    work = Workload(num_blocks=40)
    work.add("a", [1] * 8 + [2], max_tokens=9, ignore_eos=True)
    assert work.step().num_common_prefix_blocks == [0]
    work.add("b", [1] * 8 + [3], max_tokens=9, ignore_eos=True)
    output = work.step()
    assert output.num_common_prefix_blocks == [2]
    (new,) = output.scheduled_new_reqs
    assert (new.num_computed_tokens, new.prompt_token_ids) == (8, [1] * 8 + [3])
    assert output.num_scheduled_tokens == {"a": 1, "b": 1}


def test_no_hit_on_what_the_same_step_computes():
    """Eight requests with one prefix at once: whoever started in the first step found nothing to share."""
    work = Workload(num_blocks=200, max_num_batched_tokens=16)
    for i in range(8):
        work.add(f"r{i}", [1] * 64 + [i], max_tokens=4, ignore_eos=True)
    work.run()  # the fake runner reads every computed position back
    assert work.manager.stats.hits == 7 * 64

    work = Workload(num_blocks=200)
    for i in range(8):
        work.add(f"r{i}", [1] * 64 + [i], max_tokens=4, ignore_eos=True)
    assert work.step().total_num_scheduled_tokens == 8 * 65
    work.run()
    assert work.manager.stats.hits == 0


def test_statistics():
    work = Workload(num_blocks=40)
    first = work.add("a", [1] * 9, max_tokens=1)
    work.step()
    second = work.add("b", [1] * 9, max_tokens=1)
    work.run()
    stats = work.manager.stats
    assert (stats.requests, stats.queries, stats.hits, stats.resumed_requests) == (2, 18, 8, 0)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
