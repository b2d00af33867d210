"""The writer's thread: what it cannot write is told, it never falls behind without bound, and it always ends."""

import gc
import os
import threading
from pathlib import Path

import pytest

from jaxrunner.protocol import SchedulerOutput
from jaxrunner.trace import StepRecorder, open_trace
from jaxrunner.trace import recorder as module
from jaxrunner.trace.experiment import HostRunner
from tests.jaxrunner.trace.traffic import geometry


def step(recorder: StepRecorder) -> None:
    recorder.finish(recorder.begin(SchedulerOutput(), None), [], {})


def fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrunner.trace.encode.plan_to_json", lambda plan: 1 / 0)


def test_what_cannot_be_written_is_told_before_a_step_changes_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runner = HostRunner(tmp_path / "t.jsonl", geometry())
    fail(monkeypatch)
    runner.step(SchedulerOutput())
    runner.recorder._thread.join()
    monkeypatch.setattr(HostRunner, "settle", lambda self, plan: pytest.fail("the batch was changed"))
    with pytest.raises(RuntimeError, match="could not be written: division by zero"):
        runner.step(SchedulerOutput())
    runner.recorder.close()  # once is enough


def test_what_cannot_be_written_of_the_last_steps_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recorder = StepRecorder(tmp_path / "t.jsonl", geometry())
    fail(monkeypatch)
    step(recorder)
    with pytest.raises(RuntimeError, match="could not be written"):
        recorder.close()
    recorder.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_told():
    recorder = StepRecorder("/dev/full", geometry())
    recorder._thread.join(10)
    with pytest.raises(RuntimeError, match="/dev/full could not be written: .*No space left"):
        recorder.check()


def test_steps_after_the_end_are_not_kept(tmp_path: Path):
    recorder = StepRecorder(tmp_path / "t.jsonl", geometry())
    step(recorder)
    recorder.close()
    step(recorder)
    recorder.reset()
    assert [item for item in recorder._queue if item is not module._END] == []
    assert len(list(open_trace(recorder.path).lines())) == 1


def test_the_step_thread_waits_for_a_writer_that_is_far_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    go_on, write = threading.Event(), module.Encoder.line
    monkeypatch.setattr(module.Encoder, "line", lambda self, record: go_on.wait(10) and write(self, record))
    recorder = StepRecorder(tmp_path / "t.jsonl", geometry())
    most = []

    def run() -> None:
        for _ in range(20):
            step(recorder)
            most.append(len(recorder._queue))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    go_on.set()
    thread.join(10)
    recorder.close()
    assert max(most) <= 3 and len(list(open_trace(recorder.path).steps())) == 20


def test_it_may_be_collected_in_the_writers_own_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A runner is part of cycles, so the collector can meet it in any thread, the writer's above all."""
    recorder = StepRecorder(tmp_path / "t.jsonl", geometry())
    thread, write = recorder._thread, module.Encoder.line
    dropped = threading.Event()

    def line(self, record):
        dropped.wait(10)
        gc.collect()
        return write(self, record)

    monkeypatch.setattr(module.Encoder, "line", line)
    step(recorder)
    recorder.cycle = recorder  # type: ignore[attr-defined]
    gc.disable()
    try:
        del recorder
        dropped.set()
        thread.join(10)
    finally:
        gc.enable()
    assert not thread.is_alive()
    assert len(list(open_trace(tmp_path / "t.jsonl").steps())) == 1
