"""bench_sampling.py: a line for each feature, each to the same base."""

import json

import pytest

from scripts import bench_sampling
from scripts.host_bench import features


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    sizes = ["--rows", "2", "--vocab", "300", "--history", "8", "--logprobs", "3", "--rounds", "1"]
    sizes += ["--host-rounds", "2"]
    monkeypatch.setattr("sys.argv", ["bench_sampling.py", *sizes, *args])
    bench_sampling.main()


def test_json_and_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--json")
    report = json.loads(capsys.readouterr().out)
    lines, host = report["lines"], report["host_ms"]
    assert {"grammar: masks", "logprobs: kept"} <= set(host) and all(ms > 0 for ms in host.values())
    assert set(lines) == {*bench_sampling.FEATURES, "all", bench_sampling.WITHOUT}
    assert lines[bench_sampling.BASE]["ratio"] == 1.0 and all(line["ms"] > 0 for line in lines.values())
    run(monkeypatch)  # the program is there already
    assert "penalties" in capsys.readouterr().out


def test_all_has_every_feature_that_goes_together() -> None:
    together = bench_sampling.all_together()
    assert {"top_k", "logit_bias", "logprobs", "min_tokens"} <= set(together) and "temperature" not in together


def test_the_texts_of_the_host_lines_go_on() -> None:
    """Every row follows its grammar to the end and begins anew, and masks are of as many tokens as there are words."""
    rows, vocab = 4, 300
    lines = features.lines(rows, vocab, 3)
    for _ in range(2 * len(features.TEXT) + 3):
        for line in lines.values():
            line()
    uploads = lines["grammar: masks cut into uploads"]()
    assert uploads[0][1].shape[1] == -(-vocab // 32) and all(mask.any() for mask in uploads[0][1][:rows])
