"""scripts/bench_dispatch.py on a scripted checkpoint: every mode's segments, and the calls beside those of nothing."""

import json
from pathlib import Path

import pytest

from scripts import bench_dispatch
from tests.jaxrunner.chain import successor_logits, write_chain


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_chain(tmp_path_factory.mktemp("model"), successor_logits(16, {})))


def test_segments_of_every_mode_and_calls_apart(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    flags = ["--model", model, "--reqs", "2", "--steps", "2", "--modes", "FULL,PIECEWISE,NONE", "--json", str(out)]
    assert bench_dispatch.main(flags) == 0
    shown = capsys.readouterr().out
    assert "2 requests decode" in shown and "nothing" in shown
    report = json.loads(out.read_text())
    layers = sum(name.startswith("attend") for name in report["modes"]["PIECEWISE"]["executables"])
    assert [row["calls"] for row in report["modes"].values()] == [2, 2 * layers + 3, 2]
    assert report["modes"]["FULL"]["executables"] == ["forward[2]"]
    for row in report["modes"].values():
        assert row["segments_us"].keys() == {"update", "prepare", "dispatch"} and row["compile_cpu_s"] > 0
        for value in (*row["segments_us"].values(), row["step_ms"]):
            assert 0 < value["least"] <= value["median"]
    for name, row in report["calls"].items():
        arrays = row["arrays"]
        assert 0 < arrays["donated"] < arrays["in"] and arrays["out"] > arrays["donated"], name
        # Two steps for each of the two programs.
        assert all(0 < row[what]["least"] <= row[what]["median"] for what in ("call", "nothing", "nothing, hot"))


def test_a_forward_is_passed_its_part_of_the_state_only(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A call costs by the array: parameters, caches, block table, last samples and the upload, and nothing else."""
    assert bench_dispatch.main(["--model", model, "--reqs", "1", "--steps", "1", "--json", "-"]) == 0
    calls = json.loads(capsys.readouterr().out)["calls"]
    caches = 2  # of the one layer
    assert calls["forward"]["arrays"]["donated"] == caches + 2
    assert calls["forward"]["arrays"]["out"] == caches + 2 + 1 + 4 + 1  # hidden states, the head's inputs, all hidden


@pytest.mark.parametrize("flags", [["--modes", "FULL,EAGER"], ["--reqs", "0"], ["--steps", "0"]])
def test_flags_out_of_range(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench_dispatch.parse(flags)


def test_a_model_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_dispatch.main(["--model", "no/such/model"]) == 2
    assert "bench_dispatch: " in capsys.readouterr().err
