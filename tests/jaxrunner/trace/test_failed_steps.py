"""A step that raises is in the trace, with what it raised: for such a step above all one wants to look at it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.protocol import CachedRequestData, SchedulerOutput
from jaxrunner.trace import HostStepper, check_trace, diff_traces, open_trace
from jaxrunner.trace.page import page_of
from jaxrunner.trace.replay import replay as run_again
from scripts import trace as command
from tests.jaxrunner.chain import successor_logits, write_chain
from tests.jaxrunner.small_llm import OPTIONS

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 and 1 are fine, 2 fails on its way to the device; then the same in 3, 4, and 5 on its way back; two plans
    are refused; and three steps more."""
    folder = tmp_path_factory.mktemp("failed")
    path = folder / "t.jsonl"
    llm = LLM(write_chain(folder / "model", successor_logits(32, {})), trace=str(path), **OPTIONS)
    runner = llm.runner

    def gone(*args, **kwargs):
        raise MemoryError("the device\nis gone")

    for target in ((runner.executables, "forward"), ("jaxrunner.runner.record_tokens",)):
        stream = llm.stream([[1, 2, 3], [7]], GREEDY)
        for _ in range(4):  # an output of each request, in two steps
            next(stream)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(*target, gone)
            next(stream)
    unknown = SchedulerOutput([], CachedRequestData(["nobody"], set(), [None], [4], [1]), {"nobody": 1}, 1)
    with pytest.raises(ValueError, match="nobody"):
        runner.execute_model(unknown)
    with pytest.raises(Exception):  # noqa: B017  # whatever it is that a plan without sense raises
        runner.execute_model(SchedulerOutput(num_scheduled_tokens={"x": object()}, total_num_scheduled_tokens=1))
    llm.generate([[1, 2, 3], [7]], replace(GREEDY, max_tokens=3), use_tqdm=False)
    runner.recorder.close()
    return path


def test_they_are_there_with_their_arrays_and_what_they_raised(path: Path):
    trace = open_trace(path)
    lines = list(trace.lines())
    assert [line["step"] for line in lines if "step" in line] == list(range(11))
    kinds = [(line.get("event", "step"), line.get("step")) for line in lines]
    assert [kind for kind in kinds if kind[0] != "step"] == [
        ("failed", 2), ("reset", None), ("failed", 5), ("reset", None), ("failed", 6), ("failed", 7)]  # fmt: skip
    for number in (2, 5):
        line = trace.step(number)
        assert line["error"] == "MemoryError: the device\nis gone" and line["sampled"] == []
        assert len(line["req_ids"]) == 2 and line["positions"][:2] == [4, 2]
    refused, senseless = trace.step(6), trace.step(7)
    assert refused["error"].startswith("SchedulerOutputError: ") and "'nobody'" in refused["error"]
    assert refused["req_ids"] == [] and refused["plan"]["num_scheduled_tokens"] == {"nobody": 1}
    assert senseless["plan"] is None


def test_what_it_was_given_is_checked_and_the_rest_replays(path: Path):
    trace = open_trace(path)
    assert check_trace(trace.lines(), trace.geometry) is None
    assert run_again(trace.lines(), HostStepper(trace.geometry)) == (7, None)
    assert diff_traces(trace.lines(), trace.lines()) is None
    lines = list(trace.lines())
    failed = next(line for line in lines if line.get("event") == "failed")
    failed["slot_mapping"][0][1] += 1
    finding = check_trace(lines, trace.geometry)
    assert (finding.step, finding.field, finding.cell) == (2, "slot_mapping, cache group 0", 1)


def test_every_command_shows_them(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments in (["check"], ["show"]):
        assert command.main([arguments[0], str(path)]) == 0
        assert "step 2 failed: MemoryError" in capsys.readouterr().out
    assert command.main(["check", str(path), "--json"]) == 0
    assert [found["step"] for found in json.loads(capsys.readouterr().out)["failed"]] == [2, 5, 6, 7]
    for number in (2, 6, 7):
        assert command.main(["show", str(path), "--step", str(number)]) == 0
        assert f"step {number} (failed)" in capsys.readouterr().out
    assert command.main(["stops", str(path), "--step", "2"]) == 0
    assert command.main(["stops", str(path), "--step", "7"]) == 2
    assert "failed before its plan was read" in capsys.readouterr().err
    assert command.main(["show", str(path), "--request", "0"]) == 0
    assert "failed" in capsys.readouterr().out
    shown = page_of(open_trace(path))
    data = json.loads(shown.split('type="application/json">')[1].split("</script>")[0])
    assert [step["step"] for step in data["steps"]] == [0, 1, 2, 3, 4, 5, 8, 9, 10]
    assert data["steps"][2]["error"].startswith("MemoryError")
