"""One engine, several threads: each gets its own, whoever drives; and what happens when a step fails."""

import threading

import numpy as np
import pytest

from jaxrunner.engine import EngineDeadError
from jaxrunner.outputs import Prompt
from jaxrunner.sampling_params import RequestOutputKind, SamplingParams
from jaxrunner.shared_engine import Inbox, SharedEngine, Submission, checked_output
from tests.jaxrunner.test_engine import make_engine

FINAL = RequestOutputKind.FINAL_ONLY


def submission(request_id, *ids, priority=0, **params):
    params = SamplingParams(temperature=0, ignore_eos=True, **params)
    return Submission(request_id, Prompt(None, list(ids), params), priority, FINAL)


def run(shared, *submissions):
    """Token ids by request id, as one caller sees them."""
    inbox, outputs = Inbox(), {}
    shared.submit(submissions, inbox)
    while inbox.unfinished:
        shared.drive(inbox.has_news)
        arrived, _ = inbox.take()
        for output in map(checked_output, arrived):
            outputs[output.request_id] = output.outputs[0].token_ids
    return outputs


def in_threads(*functions):
    """Runs them at once, and raises what one raised."""
    results, failures = [None] * len(functions), []

    def call(i):
        try:
            results[i] = functions[i]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return results


def test_many_threads_get_what_each_asked_for():
    shared = SharedEngine(make_engine())

    def caller(number):
        return lambda: [
            run(shared, *(submission(f"{number}.{turn}.{i}", 4, max_tokens=1 + (number + i) % 7) for i in range(4)))
            for turn in range(5)
        ]

    cycle = [5, 6, 7, 4] * 3
    for number, turns in enumerate(in_threads(*map(caller, range(6)))):
        for turn, outputs in enumerate(turns):
            assert outputs == {f"{number}.{turn}.{i}": cycle[: 1 + (number + i) % 7] for i in range(4)}
    assert not shared.engine.has_unfinished_requests()
    shared.engine.scheduler.manager.check_accounting()


def test_one_step_serves_all_callers():
    shared = SharedEngine(make_engine())
    first, second = Inbox(), Inbox()
    shared.submit([submission("a", 4, max_tokens=3)], first)
    shared.submit([submission("b", 4, max_tokens=3)], second)
    shared.drive(lambda: not first.unfinished)  # the first caller alone drives
    assert not second.unfinished and second.take()[0][0].request_id == "b"
    assert shared.engine.runner.steps == 3


def test_a_call_comes_between_two_steps_and_gives_its_result_or_its_error():
    shared = SharedEngine(make_engine())
    inbox = Inbox()
    shared.submit([submission("a", 4, max_tokens=50)], inbox)
    shared.drive(inbox.has_news)
    assert shared.call(shared.engine.stats).num_running == 1
    with pytest.raises(ZeroDivisionError):
        shared.call(lambda: 1 / 0)
    assert shared.engine.runner.steps == 1
    shared.drive(lambda: not inbox.unfinished)


def test_an_abort_from_another_thread():
    shared = SharedEngine(make_engine())
    step, started, posted = shared.engine.runner.execute_model, threading.Event(), threading.Event()

    def waits_for_the_abort(plan):
        if shared.engine.runner.steps == 2:
            started.set()
            assert posted.wait(60)
        return step(plan)

    shared.engine.runner.execute_model = waits_for_the_abort
    inbox = Inbox()
    shared.submit([submission("gone", 4, max_tokens=60), submission("stays", 4, max_tokens=40)], inbox)

    def driver():
        shared.drive(lambda: not inbox.unfinished)

    def aborter():
        assert started.wait(60)
        shared.abort(["gone", "never was"])
        posted.set()

    in_threads(driver, aborter)
    outputs, _ = inbox.take()
    reasons = {output.request_id: output.outputs[0].finish_reason for output in outputs}
    assert reasons == {"gone": "abort", "stays": "length"}
    assert shared.engine.scheduler.manager.num_free_blocks == 63


def test_an_abort_in_the_middle_of_a_step_is_not_waited_for_and_not_forgotten():
    """As when an iterator that nobody holds any more is closed by the garbage collector, whatever runs just then."""
    shared = SharedEngine(make_engine())
    step = shared.engine.runner.execute_model

    def aborting(plan):
        if shared.engine.runner.steps == 2:
            shared.abort(["gone"])
        return step(plan)

    shared.engine.runner.execute_model = aborting
    mine, other = Inbox(), Inbox()
    shared.submit([submission("mine", 4, max_tokens=3)], mine)
    shared.submit([submission("gone", 4, max_tokens=60)], other)
    shared.drive(lambda: not mine.unfinished)  # the abort comes in the last step that is driven
    assert other.take()[0][0].outputs[0].finish_reason == "abort"
    assert not shared.engine.has_unfinished_requests()


def test_a_failed_step_is_told_to_every_caller_and_the_next_request_runs():
    shared = SharedEngine(make_engine())
    mine, other = Inbox(), Inbox()
    shared.submit([submission("a", 4, max_tokens=9)], mine)
    shared.submit([submission("b", 4, max_tokens=9)], other)
    shared.engine.runner.fail_at = 3
    with pytest.raises(RuntimeError, match="the device is gone"):
        shared.drive(lambda: not mine.unfinished)
    assert not mine.unfinished and not other.unfinished
    (error,), _ = other.take()
    with pytest.raises(RuntimeError, match="a step failed while another caller ran it") as raised:
        checked_output(error)
    assert str(raised.value.__cause__) == "the device is gone"
    assert run(shared, submission("a", 4, max_tokens=2)) == {"a": [5, 6]}


def test_any_exception_between_the_steps_is_told_too(monkeypatch):
    """Of the engine, of whoever is told of an output: nobody waits for ever, and nothing runs that nobody waits for."""
    shared = SharedEngine(make_engine())
    mine, other, deaf = Inbox(), Inbox(), Inbox()
    shared.submit([submission("deaf", 4, max_tokens=1)], deaf)
    shared.submit([submission("a", 4, max_tokens=9)], mine)
    shared.submit([submission("b", 4, max_tokens=9)], other)

    def cannot_hear():
        raise OSError("nobody listens")

    deaf.on_arrival = cannot_hear
    with pytest.raises(OSError, match="nobody listens"):
        shared.drive(lambda: not mine.unfinished)
    for inbox in (mine, other):
        (error,), _ = inbox.take()
        assert isinstance(error, OSError) and not inbox.unfinished
    assert not shared.engine.has_unfinished_requests() and not shared.is_taken("a")
    assert run(shared, submission("a", 4, max_tokens=2)) == {"a": [5, 6]}


def test_what_was_queued_while_a_step_failed_is_told_and_never_runs():
    shared = SharedEngine(make_engine())
    mine, late = Inbox(), Inbox()
    shared.submit([submission("a", 4, max_tokens=9)], mine)
    step = shared.engine.runner.execute_model

    def failing(plan):
        shared.submit([submission("late", 4, max_tokens=9)], late)
        raise RuntimeError("the device is gone")

    shared.engine.runner.execute_model = failing
    with pytest.raises(RuntimeError, match="the device is gone"):
        shared.drive(lambda: not mine.unfinished)
    assert len(late.take()[0]) == 1 and not late.unfinished
    shared.engine.runner.execute_model = step
    assert run(shared, submission("late", 4, max_tokens=2)) == {"late": [5, 6]}  # the id is free, and one request runs
    assert not shared.engine.has_unfinished_requests()


def test_a_fault_while_a_request_is_queued_is_this_requests_own(monkeypatch):
    shared = SharedEngine(make_engine())
    add, mine, other = shared.engine.scheduler.add_request, Inbox(), Inbox()

    def faulty(request):
        if request.request_id == "mine":
            raise TypeError("unhashable")
        add(request)

    monkeypatch.setattr(shared.engine.scheduler, "add_request", faulty)
    shared.submit([submission("mine", 4)], mine)
    shared.submit([submission("other", 4, max_tokens=2)], other)
    shared.drive(lambda: not other.unfinished)
    assert other.take()[0][0].outputs[0].token_ids == [5, 6]
    with pytest.raises(ValueError, match="'mine' could not be queued: TypeError: unhashable"):
        checked_output(mine.take()[0][0])
    assert not shared.engine.has_unfinished_requests()


def test_an_engine_that_can_not_be_reset_says_that_it_is_dead(monkeypatch):
    shared = SharedEngine(make_engine())
    runner, mine, other = shared.engine.runner, Inbox(), Inbox()
    shared.submit([submission("a", 4, max_tokens=9)], mine)
    shared.submit([submission("b", 4, max_tokens=9)], other)
    runner.fail_at = 2
    reset = runner.reset

    def gone():
        raise MemoryError("no room for the caches")

    monkeypatch.setattr(runner, "reset", gone)
    with pytest.raises(MemoryError):
        shared.drive(lambda: not mine.unfinished)
    assert not mine.unfinished and not other.unfinished and other.take()[0]
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="can't go on: .*MemoryError: no room for the caches.*make a new one"):
            run(shared, submission("a", 4, max_tokens=2))
    with pytest.raises(EngineDeadError):
        shared.engine.step()
    monkeypatch.setattr(runner, "reset", reset)
    shared.engine.reset()
    assert run(shared, submission("a", 4, max_tokens=2)) == {"a": [5, 6]}


def test_what_can_not_be_queued():
    shared = SharedEngine(make_engine())
    inbox = Inbox()
    shared.submit([submission("a", 4, max_tokens=2)], inbox)
    with pytest.raises(ValueError, match="'a' is taken"):
        shared.submit([submission("b", 4), submission("a", 4)], Inbox())
    assert shared.is_taken("a") and not shared.is_taken("b")
    with pytest.raises(ValueError, match="priority is 3, but requests are served first come, first served"):
        shared.submit([submission("b", 4, priority=3)], Inbox())
    with pytest.raises(ValueError, match="priority must be an integer, got 'high'"):
        shared.submit([submission("b", 4, priority="high")], Inbox())
    with pytest.raises(ValueError, match="priority is 3, but"):
        shared.submit([submission("b", 4, priority=np.int64(3))], Inbox())
    late = Inbox()
    shared.submit([submission("0_x", 4, max_tokens=2)], inbox)
    several = SamplingParams(n=2, max_tokens=2)
    shared.submit([Submission("x", Prompt(None, [4], several))], late)  # whose first sequence is 0_x as well
    shared.drive(lambda: not late.unfinished)
    (error,), _ = late.take()
    with pytest.raises(ValueError, match="'0_x' is taken"):
        checked_output(error)
    shared.drive(lambda: not inbox.unfinished)
    with pytest.raises(RuntimeError, match="nothing is left to run"):
        shared.drive(lambda: False)


def test_the_background_thread_lives_as_long_as_there_are_requests():
    shared = SharedEngine(make_engine())
    for _ in range(20):
        inbox, done = Inbox(), threading.Event()
        inbox.on_arrival = done.set
        shared.submit([submission("a", 4, max_tokens=3)], inbox)
        shared.drive_in_background()
        assert done.wait(60) and inbox.take()[0][0].outputs[0].token_ids == [5, 6, 7]
    shared.shutdown()
    assert shared._background is None or not shared._background.is_alive()


def test_shutdown_ends_what_runs():
    shared = SharedEngine(make_engine())
    inbox = Inbox()
    shared.submit([submission("a", 4, max_tokens=60)], inbox)
    shared.shutdown()
    assert inbox.take()[0][0].outputs[0].finish_reason == "abort"
    assert not shared.engine.has_unfinished_requests()


def test_a_failed_step_in_the_background_does_not_end_the_thread_for_others():
    shared = SharedEngine(make_engine())
    shared.engine.runner.fail_at = 2
    for expected in ("fails", "runs"):
        inbox, done = Inbox(), threading.Event()
        inbox.on_arrival = done.set
        shared.submit([submission("a", 4, max_tokens=3)], inbox)
        shared.drive_in_background()
        assert done.wait(60)
        (output,), _ = inbox.take()
        assert isinstance(output, RuntimeError) == (expected == "fails")
    shared.shutdown()
