"""Ends: by a token, from outside, between schedule and update; and what an update refuses."""

import pytest

from jaxrunner.protocol import ModelRunnerOutput
from jaxrunner.request import Request
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.scheduler import RequestUpdate
from tests.jaxrunner.scheduler.workload import Workload


def rows(**tokens) -> ModelRunnerOutput:
    ids = list(tokens)
    return ModelRunnerOutput(ids, {req_id: i for i, req_id in enumerate(ids)}, list(tokens.values()))


def scheduled(*names, **limits) -> tuple:
    """A scheduler whose first step is under way: prompts of three tokens."""
    work = Workload(num_blocks=20, **limits)
    for name in names:
        params = SamplingParams(max_tokens=4, stop_token_ids=[50])
        work.scheduler.add_request(Request(name, [1, 2, 3], params, [60]))
    return work.scheduler, work.scheduler.schedule()


def test_updates_say_how_a_request_ended():
    scheduler, output = scheduled("a", "b", "c", "d")
    updates = scheduler.update_from_output(output, rows(d=[9, 50, 9], c=[60], b=[9], a=[1, 2, 3, 4, 5]))
    assert updates == [
        RequestUpdate("a", [1, 2, 3, 4], "length"),
        RequestUpdate("b", [9]),
        RequestUpdate("c", [60], "stop"),
        RequestUpdate("d", [9, 50], "stop", 50),
    ]
    assert [r.request_id for r in scheduler.running] == ["b"] and list(scheduler.requests) == ["b"]
    output = scheduler.schedule()
    assert (output.finished_req_ids, output.num_scheduled_tokens) == ({"a", "c", "d"}, {"b": 1})


def test_blocks_in_use_are_those_of_the_step_not_of_what_is_left_of_it():
    scheduler, output = scheduled("a", "b")
    scheduler.update_from_output(output, rows(a=[60], b=[60]))
    assert scheduler.usage_in_step == pytest.approx(2 / 19) and scheduler.manager.usage == 0


def test_several_tokens_per_step_are_all_fed_in():
    scheduler, output = scheduled("a")
    scheduler.update_from_output(output, rows(a=[7, 8]))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 2}
    assert output.scheduled_cached_reqs.num_computed_tokens == [3]
    assert output.scheduled_cached_reqs.num_output_tokens == [2]


def test_an_abort_frees_everything_whenever_it_comes():
    """After the first chunk of four, beside others that must not notice."""
    for when in ("before the step", "in it", "after it", "never"):
        work = Workload(num_blocks=40, max_num_batched_tokens=8)
        work.add("other", [1, 2], max_tokens=9)
        work.step()
        free = work.manager.num_free_blocks
        work.add("long", [3] * 28, max_tokens=9)
        if when == "before the step":
            work.abort("long")
        work.step(["long"] if when == "in it" else [])
        if when == "after it":
            work.abort("long")
        assert (work.manager.num_free_blocks == free) == (when != "never")
        # What the runner has never heard of, it needn't be told of.
        assert work.step().finished_req_ids == ({"long"} if when in ("in it", "after it") else set())
        work.run()


def test_blocks_of_an_aborted_step_are_not_found():
    work = Workload(num_blocks=40)
    work.add("a", [1] * 9, max_tokens=2)
    work.step(abort_between=["a"])
    assert work.manager.get_computed_blocks(Request("b", [1] * 9, SamplingParams()))[1] == 0


def test_an_id_that_comes_back_before_its_last_tokens():
    """Abort and resubmit while the step runs: the tokens are the old request's, and nobody's any more."""
    scheduler, output = scheduled("a", "b")
    assert scheduler.finish_requests("a") == ["a"]
    again = Request("a", [4, 5], SamplingParams(max_tokens=4))
    scheduler.add_request(again)
    assert scheduler.update_from_output(output, rows(a=[7], b=[7])) == [RequestUpdate("b", [7])]
    assert again.num_tokens == 2
    output = scheduler.schedule()
    assert output.finished_req_ids == {"a"}
    assert [new.req_id for new in output.scheduled_new_reqs] == ["a"]
    assert output.num_scheduled_tokens == {"b": 1, "a": 2}


def test_finish_requests():
    scheduler, output = scheduled("a", "b", "c", max_num_seqs=2)
    a, b, c = scheduler.requests.values()
    assert scheduler.finish_requests(["c", "a", "a", "nobody"], "stop") == ["c", "a"]
    assert (a.status.finish_reason, b.status.finish_reason, c.status.finish_reason) == ("stop", None, "stop")
    assert scheduler.finish_requests("b") == ["b"] and b.status.finish_reason == "abort"
    assert scheduler.finish_requests("b") == []
    assert scheduler.update_from_output(output, rows(a=[1], b=[1])) == []
    assert scheduler.schedule().finished_req_ids == {"a", "b"}
    with pytest.raises(ValueError, match="reason must be one of .*'abort'.* got 'bored'"):
        scheduler.finish_requests("a", "bored")


def test_a_step_is_updated_before_the_next():
    scheduler, output = scheduled("a")
    with pytest.raises(RuntimeError, match="last step's tokens"):
        scheduler.schedule()
    scheduler.update_from_output(output, rows(a=[1]))
    with pytest.raises(ValueError, match="each SchedulerOutput once"):
        scheduler.update_from_output(output, rows(a=[1]))
    scheduler.schedule()


def test_a_step_that_failed_ends_with_its_requests():
    scheduler, output = scheduled("a", "b", "c", max_num_seqs=2)
    scheduler.finish_requests(["a", "b"])
    output = scheduler.schedule()  # no update: the step never came back
    assert (output.finished_req_ids, output.num_scheduled_tokens) == ({"a", "b"}, {"c": 3})
    scheduler.update_from_output(output, rows(c=[60]))
    scheduler.manager.check_accounting()
    assert scheduler.manager.num_free_blocks == 19


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (rows(a=[1]), "lacks request 'b'"),
        (rows(a=[1], b=[]), r"gave request 'b' the tokens \[\] in a step that left 0 of its 3 tokens"),
    ],
)
def test_a_row_too_few_changes_nothing(told, message):
    scheduler, output = scheduled("a", "b")
    with pytest.raises(ValueError, match=message):
        scheduler.update_from_output(output, told)
    assert all(r.num_computed_tokens == 0 and r.num_tokens == 3 for r in scheduler.requests.values())
    assert len(scheduler.update_from_output(output, rows(a=[1], b=[1]))) == 2


def test_a_token_too_early_is_refused():
    scheduler, output = scheduled("a", max_num_batched_tokens=2)
    with pytest.raises(ValueError, match=r"gave request 'a' the tokens \[1\] in a step that left 1 of its 3 tokens"):
        scheduler.update_from_output(output, rows(a=[1]))
    assert scheduler.update_from_output(output, rows(a=[])) == []


def test_blocks_of_an_aborted_request_are_free_only_when_its_step_is_over():
    """One step is in flight; what it may still write into is nobody else's before its output is there."""
    work = Workload(num_blocks=20, caching=False)
    work.add("a", [1] * 9, max_tokens=4)
    work.add("b", [2] * 9, max_tokens=4)
    output = work.schedule()
    (held,) = (list(ids) for ids in output.scheduled_new_reqs[0].block_ids)
    work.abort("a")
    assert work.manager.num_free_blocks == 19 - 6
    work.manager.check_accounting()  # they count as owned
    again = work.add("a", [3] * 9, max_tokens=4)  # the id is free already
    told = work.runner.step(output)
    work.take(work.scheduler.update_from_output(output, told))
    assert work.manager.num_free_blocks == 19 - 3
    work.step()
    assert set(held) == set(work.manager.get_blocks(again)[0])
    work.run()


def test_a_prompt_computed_by_an_aborted_step_is_not_found():
    """The blocks come back with what is known to be computed, not with what the step was going to compute."""
    work = Workload(num_blocks=20, max_num_batched_tokens=8)
    work.add("a", [1] * 16, max_tokens=4)
    work.step()
    work.step(abort_between=["a"])
    probe = Request("b", [1] * 17, SamplingParams())
    assert work.manager.get_computed_blocks(probe)[1] == 8
