"""Two cache groups, one addressed in halves by its kernel, and rows with drafts: recorded, checked, replayed, shown."""

import json

import pytest

from jaxrunner.trace import HostStepper, Trace, check_trace, diff_traces, open_trace, replay, stops
from jaxrunner.trace.page import page_of
from jaxrunner.trace.tables import request_table, step_tables
from tests.jaxrunner.trace.traffic import two_groups


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return open_trace(two_groups(tmp_path_factory.mktemp("groups")))


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
