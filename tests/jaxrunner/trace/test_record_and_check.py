"""Recording without a model: what a line holds, that a clean trace checks clean, and that it replays bit for bit."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxrunner.batch import update_states
from jaxrunner.shapes import Policy
from jaxrunner.trace import (
    HostStepper,
    TraceChecker,
    check_trace,
    diff_traces,
    open_trace,
    replay,
    run_experiment,
    stops,
)
from jaxrunner.trace.experiment import HostRunner
from jaxrunner.trace.symptoms import SYMPTOMS
from jaxrunner.trace.tables import request_table, step_tables
from tests.jaxrunner.trace.traffic import geometry, run_traffic


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    run_traffic(path, num_requests=30)
    return path


def test_the_traffic_has_what_it_is_meant_to_have(traffic: Path):
    steps = list(open_trace(traffic).steps())
    assert any(line["plan"]["preempted_req_ids"] for line in steps)
    assert any(line["plan"]["cached"]["resumed_req_ids"] for line in steps)
    assert any(d["num_computed_tokens"] for line in steps for d in line["plan"]["new"])
    assert any(any(line.get("discard", ())) for line in steps)
    assert [line["step"] for line in steps] == list(range(len(steps)))


def test_a_clean_trace_reports_nothing(traffic: Path):
    trace = open_trace(traffic)
    assert check_trace(trace.lines(), trace.geometry) is None


def test_the_experiment_of_the_first_document(tmp_path: Path):
    run_experiment(tmp_path / "e.jsonl")
    line = open_trace(tmp_path / "e.jsonl").step(2)
    assert line["req_ids"] == ["A", "B"]
    assert (line["scheduled"], line["computed"]) == ([1, 3], [8, 0])
    assert line["query_start_loc"] == [0, 1, 4]
    assert line["positions"] == [8, 0, 1, 2]
    assert line["seq_lens"] == [9, 3]
    assert line["logits_indices"][:2] == [0, 3]
    assert line["discard"] == [False, True]
    rows = line["block_rows"][0]
    assert line["slot_mapping"] == [[rows[0][2] * 4, *(rows[1][0] * 4 + i for i in range(3))]]


def test_a_replay_gives_the_same_arrays(traffic: Path):
    trace = open_trace(traffic)
    steps, difference = replay(trace.lines(), HostStepper(trace.geometry))
    assert difference is None and steps == len(list(trace.steps()))


@pytest.mark.parametrize("field", ["token_ids", "slot_mapping", "block_rows", "computed", "logits_indices"])
def test_a_planted_cell_is_found_and_named(traffic: Path, field: str):
    trace = open_trace(traffic)
    lines = list(trace.lines())
    target = next(n for n, line in enumerate(lines) if n > 10 and len(line["req_ids"]) > 1 and any(line["sampled"]))
    values, cell = lines[target][field], ""
    while isinstance(values[-1], list):
        values, cell = next((v, f"{cell}[{i}]") for i, v in enumerate(values) if v)
    values[0] += 1
    _, difference = replay(lines, HostStepper(trace.geometry))
    assert difference is not None
    assert (difference.step, difference.field, difference.cell) == (target, field, f"{cell}[0]")
    assert difference.recorded == difference.again + 1
    assert check_trace(lines, trace.geometry).step == target


def test_a_planted_sample_shows_where_it_is_fed_back(traffic: Path):
    trace = open_trace(traffic)
    lines = list(trace.lines())
    target = next(n for n, line in enumerate(lines) if line["sampled"] and line["sampled"][0]
                  and line["req_ids"][0] in lines[n + 1]["req_ids"])  # fmt: skip
    req_id = lines[target]["req_ids"][0]
    lines[target]["sampled"][0][0] += 1
    finding = check_trace(lines, trace.geometry)
    assert (finding.step, finding.req_id, finding.symptom.name) == (target + 1, req_id, "stale_tokens")
    _, difference = replay(lines, HostStepper(trace.geometry))
    assert (difference.step, difference.field) == (target + 1, "token_ids")


@pytest.mark.parametrize("edit", ["block_copies", "new_block_ids_to_zero"])
def test_a_copy_or_a_clearing_of_a_shared_block_is_named(traffic: Path, edit: str):
    trace = open_trace(traffic)
    lines = list(trace.lines())

    def held(line: dict) -> Counter:
        return Counter(block for row in line.get("block_rows", [[]])[0] for block in row)

    target = next(n for n, line in enumerate(lines) if max(held(line).values(), default=0) > 1)
    counts = held(lines[target])
    shared, own = max(counts, key=counts.__getitem__), lines[target]["block_rows"][0][0][-1]
    assert counts[own] == 1
    for block, named in ((own, None), (shared, "shared_block_written")):
        lines[target]["plan"][edit] = [[[1, block]]] if edit == "block_copies" else [[block]]
        finding = check_trace(lines, trace.geometry)
        assert (finding and (finding.step, finding.symptom.name)) == (named and (target, named))
        assert finding is None or f"block {shared} c" in finding.field


def test_a_row_without_its_samples_is_named(traffic: Path):
    trace = open_trace(traffic)
    lines = list(trace.lines())
    lines[5]["sampled"].pop()
    finding = check_trace(lines, trace.geometry)
    assert (finding.step, finding.field) == (5, "number of sampled lists")


def test_diff_sees_no_difference_in_another_order_of_rows(traffic: Path, tmp_path: Path):
    class Reordering(HostRunner):
        def settle(self, plan):
            update_states(self.batch, plan, reorder_threshold=1)  # decodes before prefills

    other = tmp_path / "other.jsonl"
    run_traffic(other, num_requests=30, make_runner=Reordering)
    a, b = open_trace(traffic), open_trace(other)
    assert any(x["req_ids"] != y["req_ids"] for x, y in zip(a.steps(), b.steps(), strict=True))
    assert check_trace(b.lines(), b.geometry) is None
    assert diff_traces(a.lines(), b.lines()) is None


def test_diff_names_request_field_and_cell(traffic: Path, tmp_path: Path):
    a = open_trace(traffic)
    lines = list(a.lines())
    target = next(n for n, line in enumerate(lines) if len(line["req_ids"]) > 2)
    line = lines[target]
    at = line["query_start_loc"][1]
    line["token_ids"][at] += 1
    difference = diff_traces(a.lines(), lines)
    assert (difference.step, difference.req_id) == (target, line["req_ids"][1])
    assert (difference.field, difference.cell) == ("token_ids", "[0]")
    shorter = diff_traces(a.lines(), list(a.lines())[:-1])
    assert shorter.field == "trace"


def test_what_is_shown_of_a_step(traffic: Path):
    trace = open_trace(traffic)
    line = next(line for line in trace.steps() if len(line["req_ids"]) > 1 and line["num_tokens"] > 4)
    rows, tokens = step_tables(line, trace.geometry)
    assert rows.row_count == len(line["req_ids"]) and tokens.row_count == line["bucket"]["tokens"]
    life = request_table(trace.lines(), "r3")
    assert life.row_count
    with pytest.raises(ValueError, match="'nobody'"):
        request_table(trace.lines(), "nobody")
    found = stops(line, trace.geometry)
    assert [stop.number for stop in found] == list(range(1, 9))
    by_hand = found[5].values
    block, size = line["slot_mapping"][0][by_hand["token"]] // 4, 4
    assert by_hand["slot"] == block * size + by_hand["position"] % size


def test_a_broken_trace_is_refused_with_its_line(tmp_path: Path, traffic: Path):
    with pytest.raises(ValueError, match="there is no trace"):
        open_trace(tmp_path / "missing.jsonl")
    other = tmp_path / "other.jsonl"
    other.write_text('{"format": "something"}\n')
    with pytest.raises(ValueError, match="is no trace"):
        open_trace(other)
    broken = tmp_path / "broken.jsonl"
    texts = traffic.read_text().splitlines(keepends=True)
    broken.write_text("".join([*texts[:5], texts[5][:50] + "\n", *texts[6:]]))
    with pytest.raises(ValueError, match="line 6 is no JSON"):
        list(open_trace(broken).lines())
    with pytest.raises(ValueError, match="there is no step 100000"):
        open_trace(traffic).step(100000)


@pytest.mark.parametrize("end", ["", "{", '{"step": 3, "req_ids": ["\u00e9'.encode()[:-1], bytes(100)], ids=repr)
def test_a_trace_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path, traffic: Path, end: str | bytes):
    """As a crash leaves it: such a run above all is one to look at."""
    cut, said = tmp_path / "cut.jsonl", []
    whole = "".join(traffic.read_text().splitlines(keepends=True)[:8]).encode()
    cut.write_bytes(whole + (end.encode() if isinstance(end, str) else end))
    trace = open_trace(cut, said.append)
    assert list(trace.lines()) == list(open_trace(traffic).lines())[:7]
    assert said == ([f"{cut}, line 9 was cut off: the 7 steps and events before it count"] if end else [])
    cut.write_bytes(whole.rstrip(b"\n"))  # only the end of the line is missing
    assert len(list(open_trace(cut, pytest.fail).lines())) == 7
    first = whole.index(b"\n") + 1
    cut.write_bytes(whole[: first + 20])
    with pytest.raises(ValueError, match="line 2 was cut off, and nothing else follows the header"):
        list(open_trace(cut).lines())


def test_the_header_says_what_was_run(traffic: Path):
    header = json.loads(traffic.read_text().split("\n", 1)[0])
    assert header["geometry"]["block_sizes"] == [4] and "numpy" in header["versions"]


def test_a_recorder_that_cannot_write_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runner = HostRunner(tmp_path / "t.jsonl", geometry())
    monkeypatch.setattr("jaxrunner.trace.encode.plan_to_json", lambda plan: 1 / 0)
    with pytest.raises(RuntimeError, match="could not be written"):
        from jaxrunner.protocol import SchedulerOutput

        for _ in range(1000):
            runner.step(SchedulerOutput())
            runner.recorder._thread.join(0.001)
    runner.recorder.close()


def test_long_rows_are_cut_and_still_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("encode", "check"):
        monkeypatch.setattr(f"jaxrunner.trace.{module}.MOST_BLOCKS", 3)
    run_traffic(tmp_path / "t.jsonl")
    trace = open_trace(tmp_path / "t.jsonl")
    assert any(n > 3 for line in trace.steps() for n in line.get("block_row_lengths", [[0]])[0])
    assert max(len(row) for line in trace.steps() for row in line.get("block_rows", [[[]]])[0]) == 3
    assert replay(trace.lines(), HostStepper(trace.geometry))[1] is None
    assert check_trace(trace.lines(), trace.geometry) is None
    assert np.all([stop.stop in range(1, 9) for stop in SYMPTOMS.values()])
    assert TraceChecker(trace.geometry).check({"event": "reset"}) is None


@pytest.mark.parametrize("policy", list(Policy))
def test_every_way_to_execute_is_recorded_and_replayed(tmp_path: Path, policy: Policy):
    def make(path: Path, g) -> HostRunner:
        runner = HostRunner(path, g)
        runner.shapes = replace(runner.shapes, policy=policy)
        return runner

    run_traffic(tmp_path / "t.jsonl", make_runner=make)
    trace = open_trace(tmp_path / "t.jsonl")
    assert check_trace(trace.lines(), trace.geometry) is None
    assert replay(trace.lines(), HostStepper(trace.geometry))[1] is None
