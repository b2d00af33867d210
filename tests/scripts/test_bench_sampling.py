"""bench_sampling.py: a line for each feature, each to the same base."""

import json

import pytest

from scripts import bench_sampling


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    sizes = ["--rows", "2", "--vocab", "64", "--history", "8", "--logprobs", "3", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", ["bench_sampling.py", *sizes, *args])
    bench_sampling.main()


def test_json_and_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--json")
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert set(lines) == {*bench_sampling.FEATURES, "all", bench_sampling.WITHOUT}
    assert lines[bench_sampling.BASE]["ratio"] == 1.0 and all(line["ms"] > 0 for line in lines.values())
    run(monkeypatch)  # the program is there already
    assert "penalties" in capsys.readouterr().out


def test_all_has_every_feature_that_goes_together() -> None:
    together = bench_sampling.all_together()
    assert {"top_k", "logit_bias", "logprobs", "min_tokens"} <= set(together) and "temperature" not in together
