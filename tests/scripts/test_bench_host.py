"""scripts/bench_host.py: its reference agrees with the host path and sees a wrong array; its rows have their keys."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from jaxrunner.batch import StepInputs
from scripts import bench_host
from scripts.host_bench import replay
from scripts.host_bench.bare import BareWork
from scripts.host_bench.floor import readings
from scripts.host_bench.workload import SCENARIOS, TraceConfig, trace


def small(scenario: str) -> TraceConfig:
    return TraceConfig(
        scenario, 6, warmup_steps=0, measured_steps=12, max_num_reqs=8, max_model_len=256, vocab_size=1000,
        prompt_min=3, prompt_max=20, turnover=0.3, arrival_prompt=40, arrival_cached=32, token_budget=30,
        mixed_min=5, mixed_max=60, preempted=0.2,
    )  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_equals_the_reference(scenario: str) -> None:
    assert replay.compare_with_reference(small(scenario)) == 13


@pytest.mark.parametrize("scenario", ["mixed", "preempt"])
def test_many_requests_are_read_in_another_way(scenario: str) -> None:
    config = replace(
        small(scenario), num_reqs=140, max_num_reqs=140, measured_steps=6, token_budget=200, preempted=0.05
    )
    assert replay.compare_with_reference(config) == 7


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_bare_work_has_what_a_step_needs(scenario: str) -> None:
    config = small(scenario)
    path, bare = replay.HostPath(config), BareWork(config)
    for step in trace(config):
        path.update(step, check=True)
        inputs = path.prepare(step)
        bare.step(step.scheduler_output)
        n, total = len(inputs.req_ids), inputs.num_tokens
        slots, starts, computed, lengths = bare.buffer[total : total + 4 * n].reshape(4, n)
        queries = dict(zip(slots.tolist(), zip(computed.tolist(), lengths.tolist(), strict=True), strict=True))
        tokens = dict(zip(slots.tolist(), np.split(bare.buffer[:total], starts[1:]), strict=True))
        for row, req_id in enumerate(inputs.req_ids):
            slot = bare.slots[req_id]
            of_row = slice(inputs.query_start_loc[row], inputs.query_start_loc[row + 1])
            assert queries[slot] == (inputs.positions[of_row][0], inputs.seq_lens[row])
            assert tokens[slot].tolist() == inputs["token_ids"][of_row].tolist()
            blocks = path.batch.block_table[0].row(int(inputs["idx_mapping"][row]))
            held = -(-int(inputs.seq_lens[row]) // config.block_size)
            assert bare.table[slot, :held].tolist() == blocks[:held].tolist()
        path.record(inputs, path.sampled(step))
        for req_id, sampled in step.sampled.items():
            slot = bare.slots[req_id]
            end = int(inputs.seq_lens[inputs.req_ids.index(req_id)]) - len(
                step.scheduler_output.scheduled_spec_decode_tokens.get(req_id, ())
            )
            bare.tokens[slot, end : end + len(sampled)] = sampled


def break_tokens(inputs: StepInputs) -> None:
    inputs["token_ids"][1] += 1


def break_cell(inputs: StepInputs) -> None:
    inputs["update_value"][int(np.argmin(inputs["update_cell"]))] += 1


@pytest.mark.parametrize(("damage", "named"), [(break_tokens, "token_ids"), (break_cell, "block table of req-00000")])
def test_a_wrong_array_is_named(
    monkeypatch: pytest.MonkeyPatch, damage: Callable[[StepInputs], None], named: str
) -> None:
    prepare = replay.HostPath.prepare

    def damaged(path: replay.HostPath, step: replay.TraceStep) -> StepInputs:
        inputs = prepare(path, step)
        damage(inputs)
        return inputs

    monkeypatch.setattr(replay.HostPath, "prepare", damaged)
    with pytest.raises(AssertionError, match=named):
        replay.compare_with_reference(TraceConfig("steady", 4, 0, 8, max_num_reqs=4, prompt_max=300))


def test_a_trace_is_a_function_of_its_seed() -> None:
    first, again, other = (
        [step.scheduler_output for step in trace(TraceConfig("mixed", 4, 0, 3, seed=seed, max_num_reqs=4))]
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_halves_take_turns() -> None:
    _, *steps = trace(TraceConfig("alternate", 5, 0, 4, max_num_reqs=5))
    ids = [step.scheduler_output.scheduled_cached_reqs.req_ids for step in steps]
    assert ids[0] == ids[2] == ["req-000001", "req-000003"]
    assert ids[1] == ids[3] == ["req-000000", "req-000002", "req-000004"]
    assert not any(step.scheduler_output.preempted_req_ids for step in steps)


def test_rows(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    file = tmp_path / "out.json"
    bench_host.main(
        ["--scenario", "steady,mixed", "--reqs", "2", "--steps", "12", "--warmup", "1", "--json", str(file)]
    )
    steady, mixed = json.loads(file.read_text())
    assert (steady["scenario"], mixed["scenario"], mixed["reqs"]) == ("steady", "mixed", 2)
    assert steady.keys() >= {
        "scenario", "reqs", "phase_us", "before_forward_us", "record_us", "upload_us", "validation_us", "p99_us",
        "floor_us", "ratio_to_floor",
    }  # fmt: skip
    assert steady["membership_us"] == 0 < mixed["membership_us"]
    phases = mixed["phase_us"]
    assert set(phases) == {"update_states", "prepare_inputs", "record_sampled"} and all(v > 0 for v in phases.values())
    assert set(mixed["p99_us"]) == {*phases, "before_forward"}
    assert "mixed" in capsys.readouterr().out


def test_a_profile_names_the_statements_and_adds_up(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "out.json"
    arguments = ["--scenario", "preempt", "--reqs", "6", "--steps", "40", "--warmup", "9", "--json", str(file)]
    bench_host.main([*arguments, "--clock", "cpu", "--profile", "9"])
    (row,) = json.loads(file.read_text())
    before, record = row["profile"]["before_forward"], row["profile"]["record_sampled"]
    for phase in (before, record):
        shares = [s["share"] for s in phase["statements"]]
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1, abs=0.05)  # rounded
        assert sum(s["us"] for s in phase["statements"]) == pytest.approx(phase["us"], rel=0.05)
        assert phase["watched_us"] > phase["us"] > 0 < phase["reading_us"]
    source = {(s["function"], s["source"]): s for s in before["statements"]}
    every_step = source["update_states", "_take_counts(batch, scheduler_output, plan)"]
    assert every_step["times"] == 1 and every_step["file"] == "jaxrunner/batch/update_states.py"
    assert {s["file"] for s in record["statements"]} >= {"jaxrunner/batch/record_sampled.py"}
    assert not any(s["function"].startswith("HostPath.sampled") for s in record["statements"])
    assert capsys.readouterr().out.count("µs when watched") == 2


def test_check_reports_what_it_compared(tmp_path, capsys) -> None:
    file = tmp_path / "out.json"
    bench_host.main(
        ["--check", "--scenario", "alternate", "--reqs", "3", "--steps", "4", "--warmup", "0", "--json", str(file)]
    )
    assert "alternate 3: 5 steps equal the reference" in capsys.readouterr().out
    assert json.loads(file.read_text()) == [{"scenario": "alternate", "reqs": 3, "steps_compared": 5}]


def test_the_yardstick_reads_what_a_scheduler_sends() -> None:
    work = readings(3)
    assert len(work) == 6
    assert work["count of each request"]().tolist() == [1, 1, 1]
    assert work["row of each request"]().tolist() == [0, 1, 2] and work["same requests"]() is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "steady,stedy"], "unknown scenarios \\['stedy'\\]"),
        (["--reqs", "8,x"], "numbers with commas"),
        (["--reqs", "2000"], "from 1 to 1024"),
        (["--steps", "0"], "at least 1"),
        (["--profile", "--steps", "19"], "--steps of at least 20"),
        (["--profile", "0"], "--profile must be at least 1"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        bench_host.main(arguments)
