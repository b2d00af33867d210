"""scripts/bench.py on a scripted checkpoint: every mode runs, and its numbers are of what was asked for."""

import csv
import json
from pathlib import Path

import pytest

from scripts import bench
from tests.jaxrunner.chain import successor_logits, word_tokenizer, write_chain

V = 64
SMALL = ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--num-blocks", "40", "--block-size", "4"]
WORK = ["--num-prompts", "6", "--input-len", "12", "--output-len", "5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    words = [f"w{i}" for i in range(V)]
    return str(write_chain(folder, successor_logits(V, {}), word_tokenizer(words)))


def test_throughput_writes_its_numbers_everywhere(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, table, image = tmp_path / "o.json", tmp_path / "o.csv", tmp_path / "o.png"
    shapes = tmp_path / "shapes.jsonl"
    files = ["--json", str(out), "--csv", str(table), "--plot", str(image), "--record", str(shapes)]
    assert bench.main(["throughput", "--model", model, *SMALL, *WORK, *files, "--prefix-share", "0.5"]) == 0
    assert "output token throughput" in capsys.readouterr().out
    found = json.loads(out.read_text())
    metrics = found["metrics"]
    assert (metrics["completed"], metrics["total_input_tokens"], metrics["total_output_tokens"]) == (6, 72, 30)
    assert metrics["compilations"] == 0
    assert metrics["ttft_ms"]["count"] == 6 and metrics["itl_ms"]["count"] == 24
    assert metrics["cached_input_tokens"] > 0 and 0 < metrics["padding_waste"] < 1
    assert sum(step["num_tokens"] for step in found["events"]["steps"]) == 72 - metrics["cached_input_tokens"] + 24
    assert found["memory"]["host_bytes"] > 0 and found["versions"]["jax"] and found["device"]["platform"] == "cpu"
    recorded = [json.loads(line)["tokens"] for line in shapes.read_text().splitlines()]
    assert recorded[-metrics["steps"] :] == [step["num_tokens"] for step in found["events"]["steps"]]
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["output_tokens"] for row in rows] == ["5"] * 6
    assert image.read_bytes()[:4] == b"\x89PNG"


def test_latency_repeats_its_batch(model: str, capsys: pytest.CaptureFixture[str]):
    flags = ["--batch-size", "2", "--iterations", "3", "--input-len", "6", "--output-len", "3", "--json", "-"]
    assert bench.main(["latency", "--model", model, *SMALL, *flags]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert (metrics["completed"], metrics["total_output_tokens"], metrics["cached_input_tokens"]) == (6, 18, 0)


def test_serving_keeps_to_its_arrivals(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "o.json"
    flags = [
        "--arrivals",
        "bursts",
        "--rate",
        "20",
        "--burst-size",
        "3",
        "--goodput",
        "e2el:100000",
        "--json",
        str(out),
    ]
    assert bench.main(["serve", "--model", model, *SMALL, *WORK, *flags]) == 0
    found = json.loads(out.read_text())
    requests = found["events"]["requests"]
    assert [r["arrival"] for r in requests] == pytest.approx([0, 0, 0, 0.15, 0.15, 0.15])
    assert all(r["outputs"][0][0] > r["arrival"] for r in requests)
    assert found["metrics"]["request_goodput"] == found["metrics"]["request_throughput"]
    assert found["metrics"]["duration_s"] >= 0.15

    trace = tmp_path / "t.csv"
    capsys.readouterr()
    trace.write_text("Timestamp,Request tokens,Response tokens\n0,5,2\n1,6,3\n")
    flags = [
        "--arrivals",
        "trace",
        "--trace-file",
        str(trace),
        "--speedup",
        "10",
        "--max-model-len",
        "32",
        "--json",
        "-",
    ]
    assert bench.main(["serve", "--model", model, *SMALL, "--max-concurrency", "1", *flags]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    metrics = found["metrics"]
    assert (metrics["total_input_tokens"], metrics["total_output_tokens"]) == (11, 5)
    assert found["arguments"]["rate"] == "inf" and "2 requests to be had, not 32" in printed.err


def test_a_profile_has_the_steps_and_their_segments(model: str, tmp_path: Path):
    flags = ["--num-prompts", "1", "--input-len", "4", "--output-len", "3", "--profile", str(tmp_path / "p")]
    assert bench.main(["throughput", "--model", model, *SMALL, *flags]) == 0
    (profile,) = (tmp_path / "p").rglob("*.xplane.pb")
    found = profile.read_bytes()
    assert all(name in found for name in (b"step", b"update", b"prepare", b"dispatch", b"wait", b"record"))


def test_what_cannot_be_measured_is_refused(model: str, capsys: pytest.CaptureFixture[str]):
    for flags, message in (
        (["throughput", "--dataset", "file"], "needs --file"),
        (["throughput", "--goodput", "speed:1"], "must be like"),
        (["serve", "--arrivals", "trace"], "needs --trace-file"),
        (["latency", "--iterations", "0"], "--iterations must be at least 1, got 0"),
        (["throughput", "--output-len", "0"], "--output-len must be at least 1, got 0"),
        (["throughput", "--json", "no/such/folder/o.json"], "there is no folder no/such/folder"),
    ):
        assert bench.main([flags[0], "--model", model, *SMALL, "--max-model-len", "32", *WORK, *flags[1:]]) == 2
        assert message in capsys.readouterr().err
