"""Two cache groups, one addressed in halves by its kernel, and rows with drafts: recorded, checked, replayed, shown."""

import json

import pytest

from jaxrunner.protocol import CachedRequestData, NewRequestData, SchedulerOutput
from jaxrunner.trace import Geometry, HostStepper, Trace, check_trace, diff_traces, open_trace, replay, stops
from jaxrunner.trace.experiment import HostRunner
from jaxrunner.trace.page import page_of
from jaxrunner.trace.tables import request_table, step_tables


def step(runner: HostRunner, computed: dict[str, int], outputs: dict[str, int], drafts: dict[str, list[int]]) -> None:
    counts = {r: 1 + len(drafts.get(r, [])) for r in computed}
    cached = CachedRequestData([*computed], set(), [None] * len(computed), [*computed.values()], [*outputs.values()])
    runner.step(SchedulerOutput([], cached, counts, sum(counts.values()), drafts))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    small = Geometry(3, 32, 16, 100, 0, (2, 8), (0, 0), (4, 8), 20, 2, (), 0)
    path = tmp_path_factory.mktemp("groups") / "t.jsonl"
    runner = HostRunner(path, Geometry.of(small.new_batch()))
    new = [NewRequestData("a", [1, 2, 3, 4, 5], ([1, 2, 3], [4, 5])), NewRequestData("b", [7, 8], ([4, 5], [6]))]
    runner.step(SchedulerOutput(new, num_scheduled_tokens={"a": 5, "b": 2}, total_num_scheduled_tokens=7))
    step(runner, {"a": 5, "b": 2}, {"a": 1, "b": 1}, {"a": [9, 9]})
    step(runner, {"a": 6, "b": 3}, {"a": 2, "b": 2}, {"b": [11]})  # both drafts of a were refused
    runner.recorder.close()
    return open_trace(path)


def test_it_checks_clean_and_replays(trace: Trace):
    line = trace.step(1)
    assert line["logits_indices"][: line["num_logits"]] == [0, 1, 2, 3]
    # a at 5, 6, 7 and b at 2. Block 1 of the pool is blocks 2 and 3 of the first group's kernel.
    assert [slots[:4] for slots in line["slot_mapping"]] == [[9, 10, 11, 18], [37, 38, 39, 50]]
    assert check_trace(trace.lines(), trace.geometry) is None
    assert replay(trace.lines(), HostStepper(trace.geometry)) == (3, None)
    assert diff_traces(trace.lines(), trace.lines()) is None


@pytest.mark.parametrize("group", [0, 1])
def test_a_wrong_slot_of_either_group_is_named(trace: Trace, group: int):
    lines = list(trace.lines())
    lines[1]["slot_mapping"][group][3] += 1
    finding = check_trace(lines, trace.geometry)
    assert (finding.step, finding.req_id, finding.field) == (1, "b", f"slot_mapping, cache group {group}")
    assert replay(lines, HostStepper(trace.geometry))[1].cell == f"[{group}][3]"


def test_both_groups_are_shown(trace: Trace):
    rows, tokens = step_tables(trace.step(1), trace.geometry)
    assert [c.header for c in tokens.columns][-3:] == [f"{n}, group 1" for n in ("logical block", "physical block",
                                                                               "KV slot")]  # fmt: skip
    assert " | " in next(iter(rows.columns[9].cells)) and request_table(trace.lines(), "a").row_count == 3
    assert [stop.number for stop in stops(trace.step(1), trace.geometry)] == list(range(1, 9))
    assert json.dumps(trace.header["geometry"], separators=(",", ":")) in page_of(trace)
