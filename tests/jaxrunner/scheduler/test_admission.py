"""What is refused, what is promised to run, and when a length limit ends it."""

import pytest

from jaxrunner.request import Request
from jaxrunner.sampling_params import SamplingParams
from tests.jaxrunner.scheduler.workload import Workload


def test_length_limit_of_the_model():
    work = Workload(num_blocks=40, max_model_len=20)
    with pytest.raises(ValueError, match="'a': the prompt has 20 tokens, but max_model_len is 20 .* to 19 tokens"):
        work.add("a", [1] * 20)
    with pytest.raises(ValueError, match="prompt has 21 tokens"):
        work.add("a", [1] * 21)
    work.add("a", [1] * 19, max_tokens=None, ignore_eos=True)
    work.add("b", [1] * 17, max_tokens=None, ignore_eos=True)
    work.run()
    assert [len(work.outputs[name]) for name in "ab"] == [1, 3]
    assert work.finish_reasons == {"a": "length", "b": "length"}


def test_length_limit_of_the_pool():
    """Five blocks of four: 20 tokens fit, and the last token sampled needs no room."""
    work = Workload(num_blocks=6)
    assert work.scheduler.max_model_len == 21
    with pytest.raises(ValueError, match="'a': .* 21 tokens, but the KV cache holds 20 of one request"):
        work.add("a", [1] * 21)
    for name, prompt in [("a", 20), ("b", 19), ("c", 3)]:
        work.add(name, [1] * prompt, max_tokens=None, ignore_eos=True)
    work.run()
    assert [len(work.outputs[name]) for name in "abc"] == [1, 2, 18]
    assert set(work.finish_reasons.values()) == {"length"}


def test_a_refused_request_leaves_no_trace():
    work = Workload(num_blocks=6)
    with pytest.raises(ValueError):
        work.add("a", [1] * 99)
    assert not work.scheduler.has_requests()
    work.add("a", [1] * 3, max_tokens=2)
    work.run()


def test_an_id_is_taken_until_its_request_has_ended():
    work = Workload(num_blocks=6)
    work.add("a", [1], max_tokens=2)
    with pytest.raises(ValueError, match="request id 'a' is taken"):
        work.scheduler.add_request(Request("a", [1], SamplingParams()))
    work.run()
    work.add("a", [1], max_tokens=2)
    work.run()


def test_a_request_is_used_once():
    work = Workload(num_blocks=6)
    request = work.add("a", [1], max_tokens=2)
    work.run()
    with pytest.raises(ValueError, match="used already"):
        work.scheduler.add_request(request)


def test_a_long_prompt_is_admitted_whole_or_not_at_all():
    """Two prompts of 60% of the cache, in small chunks: one after the other, without taking blocks in turns."""
    work = Workload(num_blocks=11, max_num_batched_tokens=4, caching=False)
    for name in "ab":
        work.add(name, [ord(name)] * 24, max_tokens=8, ignore_eos=True)
    steps = 0
    while work.scheduler.has_unfinished_requests():
        work.step()
        steps += 1
        assert len(work.scheduler.running) == 1 or not work.scheduler.running
    assert work.scheduler.num_preemptions == 0
    assert steps == 2 * (6 + 7)


def test_a_running_request_gets_its_next_block_before_a_new_one_its_first():
    work = Workload(num_blocks=4)
    work.add("a", [1] * 8, max_tokens=4, ignore_eos=True)
    work.add("b", [2], max_tokens=2, ignore_eos=True)
    seen = [list(work.step().num_scheduled_tokens) for _ in range(5)]
    assert seen == [["a"]] * 4 + [["b"]]  # one block was free, and a was going to want it
    assert work.scheduler.num_preemptions == 0
