"""The order of service by priority, and limits on prompts that are under way."""

import pytest

from tests.jaxrunner.scheduler.workload import Workload


def by_priority(num_blocks=100, **limits) -> Workload:
    return Workload(num_blocks, policy="priority", **limits)


def test_the_lowest_value_is_admitted_first_and_equals_as_they_came():
    work = by_priority(max_num_seqs=1)
    for name, priority in [("a", 2), ("b", 0), ("c", 2), ("d", -1), ("e", 0)]:
        work.add(name, [1], priority=priority, max_tokens=1)
    assert [next(iter(work.step().num_scheduled_tokens)) for _ in range(5)] == ["d", "b", "e", "a", "c"]


def test_without_the_policy_priorities_are_not_looked_at():
    work = Workload(num_blocks=100, max_num_seqs=1)
    work.add("a", [1], priority=5, max_tokens=1)
    work.add("b", [1], priority=0, max_tokens=1)
    assert list(work.step().num_scheduled_tokens) == ["a"]


def test_the_lowest_priority_gives_up_its_blocks_even_if_it_came_first():
    work = by_priority(num_blocks=10)
    for name, priority in [("low", 9), ("high", 0), ("middle", 5)]:
        work.add(name, [ord(name[0])] * 7, priority=priority, max_tokens=17, ignore_eos=True)
    while not (output := work.step()).preempted_req_ids:
        pass
    assert output.preempted_req_ids == {"low"} and list(output.num_scheduled_tokens) == ["high", "middle"]
    work.run()


def test_new_requests_before_resumed_ones_are_told_in_the_protocols_order():
    """One of high priority that is new starts in the step in which a preempted one of low priority comes back."""
    work = by_priority(num_blocks=10)
    for name, priority in [("low", 9), ("high", 0)]:
        work.add(name, [ord(name[0])] * 11, priority=priority, max_tokens=17, ignore_eos=True)
    while not work.step().preempted_req_ids:
        pass
    work.abort("high")
    work.add("new", [7], priority=1, max_tokens=3, ignore_eos=True)
    output = work.step()
    assert list(output.num_scheduled_tokens) == ["low", "new"]
    assert output.scheduled_cached_reqs.req_ids == ["low"] and output.scheduled_new_reqs[0].req_id == "new"
    assert [request.request_id for request in work.scheduler.running] == ["new", "low"]
    work.run()


def test_a_partial_prefill_keeps_the_next_one_waiting():
    work = Workload(num_blocks=100, max_num_batched_tokens=16, threshold=4, partial=1)
    work.add("a", [1] * 12, max_tokens=2, ignore_eos=True)
    work.add("b", [2] * 12, max_tokens=2, ignore_eos=True)
    work.add("c", [3] * 2, max_tokens=2, ignore_eos=True)
    seen = [work.step().num_scheduled_tokens for _ in range(4)]
    assert seen == [{"a": 4}, {"a": 4}, {"a": 4, "b": 4, "c": 2}, {"a": 1, "b": 4, "c": 1}]
    work.run()


def test_short_prompts_overtake_a_long_one_that_waits_for_its_turn():
    work = Workload(num_blocks=100, max_num_batched_tokens=16, threshold=4, long_partial=1)
    for name, tokens in [("a", 12), ("b", 12), ("c", 2)]:
        work.add(name, [ord(name)] * tokens, max_tokens=4, ignore_eos=True)
    seen = [work.step().num_scheduled_tokens for _ in range(4)]
    assert seen == [{"a": 4, "c": 2}, {"a": 4, "c": 1}, {"a": 4, "b": 4, "c": 1}, {"a": 1, "b": 4, "c": 1}]
    work.run()


def test_what_a_reset_preempts_is_told_even_if_it_does_not_come_back_at_once():
    work = Workload(num_blocks=100, max_num_seqs=2)
    for name in "abc":
        work.add(name, [ord(name)] * 9, max_tokens=5, ignore_eos=True)
    work.step()
    work.scheduler.reset_prefix_cache(reset_running_requests=True)
    work.abort("a")
    work.scheduler.config = type(work.config)(1, 1000, 1000)
    output = work.step()
    assert (output.finished_req_ids, output.preempted_req_ids) == ({"a"}, set())
    assert output.scheduled_cached_reqs.resumed_req_ids == {"b"}
    work.scheduler.reset_prefix_cache(reset_running_requests=True)
    work.add("z", [1], max_tokens=1)
    work.scheduler.waiting.remove(work.alive["b"])  # as if it had no room
    output = work.scheduler.schedule()
    assert output.preempted_req_ids == {"b"}


def test_a_reset_can_start_what_runs_from_its_first_token_again():
    work = Workload(num_blocks=100)
    for name in "ab":
        work.add(name, [ord(name)] * 9, max_tokens=5, ignore_eos=True)
    work.step()
    work.step()
    with pytest.raises(RuntimeError, match="a step is in flight"):
        output = work.scheduler.schedule()
        work.scheduler.reset_prefix_cache(reset_running_requests=True)
    work.take(work.scheduler.update_from_output(output, work.runner.step(output)))
    work.scheduler.reset_prefix_cache(reset_running_requests=True)
    work.runner.weights += 1  # and the fake runner refuses to read what the old ones computed
    work.check()
    output = work.step()
    cached = output.scheduled_cached_reqs
    assert (cached.req_ids, cached.resumed_req_ids) == (["a", "b"], {"a", "b"})
    assert output.num_scheduled_tokens == {"a": 12, "b": 12}
    work.run()
