"""Blocks run out: who gives up its own, and how it comes back."""

from tests.jaxrunner.scheduler.workload import Workload


def crowded(caching=True, **limits) -> Workload:
    """Three requests that start together in 9 blocks of 4 tokens and outgrow them."""
    work = Workload(num_blocks=10, caching=caching, **limits)
    for name in "abc":
        work.add(name, [ord(name)] * 7, max_tokens=17, ignore_eos=True)
    return work


def until_preemption(work):
    for _ in range(100):
        output = work.step()
        if output.preempted_req_ids:
            return output
    raise AssertionError("nothing was preempted")


def test_the_last_that_came_gives_up_its_blocks():
    work = crowded()
    output = until_preemption(work)
    assert output.preempted_req_ids == {"c"}
    assert list(output.num_scheduled_tokens) == ["a", "b"]
    (waiting,) = work.scheduler.waiting
    assert (waiting.request_id, waiting.num_computed_tokens) == ("c", 0)


def test_nobody_is_admitted_in_a_step_that_preempts():
    work = crowded(max_num_seqs=3)
    work.add("d", [9], max_tokens=1)
    output = until_preemption(work)
    assert not output.scheduled_new_reqs
    assert [r.request_id for r in work.scheduler.waiting] == ["c", "d"]  # to the front


def test_a_request_comes_back_with_all_its_tokens_and_blocks():
    work = crowded()
    until_preemption(work)
    request = work.alive["c"]
    while "c" not in (output := work.step()).scheduled_cached_reqs.resumed_req_ids:
        assert "c" not in output.num_scheduled_tokens
    cached = output.scheduled_cached_reqs
    assert (cached.resumed_req_ids, cached.req_ids[-1]) == ({"c"}, "c")
    tokens = cached.all_token_ids["c"]
    assert tokens == request.all_token_ids[: len(tokens)] and len(tokens) == 7 + cached.num_output_tokens[-1]
    # Found again what nobody has overwritten, computed the rest: the outputs too, and only the last gives a token.
    assert cached.num_computed_tokens[-1] % 4 == 0
    assert output.num_scheduled_tokens["c"] == len(tokens) - cached.num_computed_tokens[-1]
    (blocks,) = cached.new_block_ids[-1]
    assert len(blocks) == -(-len(tokens) // 4)
    assert request.num_preemptions == 1
    work.run()


def test_what_comes_back_finds_its_own_blocks():
    found = {}
    for caching in (True, False):
        work = crowded(caching)
        requests = list(work.alive.values())
        work.run()
        assert [request.num_cached_tokens for request in requests] == [0, 0, 0]  # at first, not now
        assert work.scheduler.num_preemptions > 0
        stats = work.manager.stats
        assert stats.resumed_requests == work.scheduler.num_preemptions
        assert (stats.requests, stats.hits) == (3, 0)
        found[caching] = stats.resumed_hits
    assert found[True] > 0 == found[False]


def test_a_preempted_request_resumes_in_chunks():
    work = crowded(max_num_batched_tokens=6, caching=False)
    until_preemption(work)
    seen = []
    while work.scheduler.has_unfinished_requests():
        seen.append(work.step().num_scheduled_tokens.get("c", 0))
    assert max(seen) > 1 and sum(n > 1 for n in seen) > 1


def test_preempted_between_others_order_is_kept():
    """Two preempted in one step come back in the order they arrived (checked after every step)."""
    work = Workload(num_blocks=7, block_sizes=(1,), max_num_seqs=4)
    for name in "abc":
        work.add(name, [ord(name)], max_tokens=5, ignore_eos=True)
    work.run()
    assert work.scheduler.num_preemptions > 0


def test_abort_of_a_preempted_request_is_told():
    work = crowded()
    until_preemption(work)
    work.abort("c")
    assert not work.scheduler.waiting
    assert work.step().finished_req_ids == {"c"}
    work.run()


def test_sixty_four_requests_in_twenty_four_blocks():
    """Preemption together with prefix hits: all get what they get from a large cache."""
    outputs = []
    for num_blocks in (24, 2000):
        work = Workload(num_blocks, max_num_batched_tokens=32)
        for i in range(64):
            work.add(f"r{i}", [1] * 8 + [2] * (i % 3) + [i], max_tokens=20, ignore_eos=True)
        work.run()
        outputs.append(work.outputs)
        preempted, found = work.scheduler.num_preemptions, work.manager.stats.hits
        assert (preempted > 0) == (num_blocks == 24) and found > 0
    assert outputs[0] == outputs[1]


def test_few_tokens_are_computed_twice():
    """A request is let in only where those that run have a block to spare: no throwing out at once."""
    work = Workload(num_blocks=100, caching=False)
    useful = 0
    for i in range(100):
        prompt, outputs = 5 + 11 * i % 40, 5 + 7 * i % 40
        work.add(f"r{i}", [i] * prompt, max_tokens=outputs, ignore_eos=True)
        useful += prompt + outputs - 1
    total = 0
    while work.scheduler.has_unfinished_requests():
        total += work.step().total_num_scheduled_tokens
    assert total < 1.1 * useful
