"""The trace command, from recording to finding a planted fault."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import trace as command

SCRIPT = Path(__file__).parents[2] / "scripts" / "trace.py"


@pytest.fixture
def recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "t.jsonl"
    assert command.main(["experiment", "--keep", str(path)]) == 0
    capsys.readouterr()
    return path


def test_the_experiment_prints_its_arrays(capsys: pytest.CaptureFixture[str]):
    assert command.main(["experiment", "--json"]) == 0
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert list(steps[0])[1:] == list(command.EXPERIMENT_ARRAYS)
    step = steps[2]
    assert step["scheduled"] == [1, 3] and step["positions"] == [8, 0, 1, 2] and step["discard"] == [False, True]
    assert command.main(["experiment", "--prompts", "A=x"]) == 2
    assert "--prompts must be like" in capsys.readouterr().err


def test_a_clean_trace_passes_every_command(recorded: Path, capsys: pytest.CaptureFixture[str]):
    for arguments in (["check"], ["replay"], ["show"], ["show", "--step", "2"], ["show", "--request", "B"]):
        assert command.main([arguments[0], str(recorded), *arguments[1:]]) == 0
        assert capsys.readouterr().out
    assert command.main(["diff", str(recorded), str(recorded)]) == 0
    assert command.main(["stops", str(recorded), "--step", "2"]) == 0
    assert "slot = block_table[row][position // 4] * 4 + position % 4" in capsys.readouterr().out
    assert command.main(["symptoms"]) == 0


def test_a_planted_fault_is_named_and_told_by_the_exit_status(recorded: Path, capsys: pytest.CaptureFixture[str]):
    lines = recorded.read_text().splitlines()
    step = json.loads(lines[4])
    step["slot_mapping"][0][1] += 1
    lines[4] = json.dumps(step)
    recorded.write_text("\n".join(lines) + "\n")
    assert command.main(["check", str(recorded), "--json"]) == 1
    finding = json.loads(capsys.readouterr().out)["finding"]
    assert (finding["step"], finding["req_id"], finding["cell"]) == (3, "B", 1)
    assert finding["symptom"]["name"] == "wrong_slot"
    assert command.main(["replay", str(recorded)]) == 1
    assert "slot_mapping[0][1]" in capsys.readouterr().out


@pytest.mark.parametrize("cut", ["plan", "positions", "logits_indices", "block_rows", "new_block_ids", "geometry"])
def test_a_trace_that_lacks_a_part_is_refused_with_its_line(
    recorded: Path, capsys: pytest.CaptureFixture[str], cut: str
):
    lines = [json.loads(text) for text in recorded.read_text().splitlines()]
    if cut in ("plan", "geometry"):
        del lines[4 if cut == "plan" else 0][cut]
    elif cut == "new_block_ids":
        lines[4]["plan"]["cached"][cut].pop()
    else:
        lines[4][cut].clear()
    recorded.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for arguments in (["check"], ["replay"], ["show"], ["show", "--step", "3"], ["stops", "--step", "3"], ["html", "-o",
                      str(recorded.with_suffix(".html"))]):  # fmt: skip
        assert command.main([arguments[0], str(recorded), *arguments[1:]]) == 2
        error = capsys.readouterr().err
        assert ("no geometry" if cut == "geometry" else "line 5 is no whole step") in error


def test_a_trace_that_was_cut_off_passes_every_command_with_a_warning(
    recorded: Path, capsys: pytest.CaptureFixture[str]
):
    whole = recorded.read_text().splitlines(keepends=True)
    recorded.write_text("".join(whole[:5]) + whole[5][:70])
    for arguments in (["check"], ["replay"], ["show"], ["show", "--step", "3"], ["show", "--request", "A"],
                      ["html", "-o", str(recorded.with_suffix(".html"))]):  # fmt: skip
        assert command.main([arguments[0], str(recorded), *arguments[1:]]) == 0
        said = capsys.readouterr().err
        last = arguments[-2:] == ["--step", "3"]  # found before the end of the file
        assert said.count("warning: ") == (0 if last else 1) and ("line 6 was cut off" in said) != last
    recorded.write_text(whole[0] + whole[1][:70])
    assert command.main(["check", str(recorded)]) == 2
    assert "line 2 was cut off, and nothing else follows" in capsys.readouterr().err


def test_a_step_that_points_outside_can_be_looked_at(recorded: Path, capsys: pytest.CaptureFixture[str]):
    lines = [json.loads(text) for text in recorded.read_text().splitlines()]
    lines[3]["req_indices"][1] = 2  # there are rows 0 and 1
    lines[3]["query_start_loc"][1:] = [99] * len(lines[3]["query_start_loc"][1:])
    recorded.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert command.main(["show", str(recorded), "--step", "2"]) == 0
    assert "row 2?" in capsys.readouterr().out
    assert command.main(["stops", str(recorded), "--step", "2"]) == 0
    assert command.main(["check", str(recorded)]) == 1


def test_any_text_is_shown_as_a_request_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, name = tmp_path / "t.jsonl", "[red]:smile:[/b]"
    assert command.main(["experiment", "--keep", str(path), "--prompts", f"{name}=5"]) == 0
    for arguments in (["show", "--step", "1"], ["show", "--request", name], ["stops", "--step", "1"]):
        capsys.readouterr()
        assert command.main([arguments[0], str(path), *arguments[1:]]) == 0
        assert name in capsys.readouterr().out


def test_a_request_that_no_step_knows_is_an_error(recorded: Path, capsys: pytest.CaptureFixture[str]):
    for more in ([], ["--json"]):
        assert command.main(["show", str(recorded), "--request", "nobody", *more]) == 2
        assert "'nobody'" in capsys.readouterr().err
    assert command.main(["show", str(recorded), "--request", "B", "--json"]) == 0
    assert all("B" in json.loads(line)["req_ids"] for line in capsys.readouterr().out.splitlines())


def test_it_runs_as_a_script_and_says_what_is_missing(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "check", str(tmp_path / "none.jsonl")], capture_output=True, text=True
    )
    assert done.returncode == 2 and "there is no trace" in done.stderr


def test_the_cost_of_recording_is_measured(capsys: pytest.CaptureFixture[str]):
    from scripts import bench_trace

    assert bench_trace.main(["--reqs", "2,4", "--steps", "10", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["host"]
    assert [row["reqs"] for row in rows] == [2, 4] and all(row["recording_us"] > 0 for row in rows)
