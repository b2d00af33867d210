"""scripts/sweep_buckets.py: the ladders of the example traces, every output, and what it refuses."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from jaxrunner.config import RunnerConfig
from jaxrunner.shape_record import read_shapes
from jaxrunner.sweep import costs
from pallas_kernels.gpus import GPUS
from scripts import sweep_buckets

KEYS = {"kind", "executables", "sizes", "padding_waste", "step_time", "compile_s", "memory_bytes"}


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "shapes.jsonl"
    line = '{{"tokens": {}, "requests": 1, "logits_rows": 1, "max_query": 1, "max_len": 1, "mode": "FULL"}}\n'
    path.write_text("".join(line.format(n) for n in (1, 1, 1, 5, 5, 12, 30)))
    return str(path)


@pytest.mark.parametrize("example", sweep_buckets.EXAMPLES, ids=lambda path: path.name.split("_s")[0])
def test_sixteen_buckets_waste_at_most_five_percent_of_an_example(example: Path, capsys) -> None:
    assert sweep_buckets.main(["--trace", str(example), "--max-executables", "16", "--json", "-"]) == 0
    ladders = json.loads(capsys.readouterr().out)["ladders"]
    best = {each["kind"]: each["padding_waste"] for each in ladders}
    assert best["optimal"] <= 0.05 and all(best["optimal"] <= waste for waste in best.values())


def test_there_are_two_examples_of_real_traffic() -> None:
    assert [path.name for path in sweep_buckets.EXAMPLES] == ["azure_code_steps.jsonl.gz", "azure_conv_steps.jsonl.gz"]


def test_every_output(trace, tmp_path, capsys) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "png")}
    ladder = tmp_path / "ladder.json"
    flags = ["--json", str(files["json"]), "--csv", str(files["csv"]), "--plot", str(files["png"])]
    arguments = ["--trace", trace, trace, "--max-executables", "2,3", "--ladder", str(ladder), "--pick", "2", *flags]
    assert sweep_buckets.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "14 steps, 4 sizes" in shown and "optimal 3: 5, 12, 30" in shown
    ladders = json.loads(files["json"].read_text())["ladders"]
    assert all(each.keys() == KEYS for each in ladders)
    assert [(each["kind"], each["sizes"]) for each in ladders[:2]] == [("optimal", [5, 30]), ("optimal", [5, 12, 30])]
    assert ladders[1]["padding_waste"] == pytest.approx(12 / 67)
    with open(files["csv"], newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0].keys() == KEYS and rows[1]["sizes"] == "5 12 30" and len(rows) == len(ladders)
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    config = RunnerConfig(max_num_reqs=4, max_num_batched_tokens=30, token_buckets=str(ladder))
    assert config.shapes().tokens == (5, 30)


def test_arrivals_are_simulated_and_kept(tmp_path, capsys) -> None:
    arrivals, kept = tmp_path / "burst.csv", tmp_path / "kept.jsonl.gz"
    arrivals.write_text("Timestamp,Model,Request tokens,Response tokens\n0,a,20,3\n1,a,7,2\n")
    limits = ["--max-num-batched-tokens", "16", "--max-num-seqs", "2", "--max-executables", "2"]
    assert sweep_buckets.main(["--arrivals", str(arrivals), "--save-trace", str(kept), *limits]) == 0
    assert [step.tokens for step in read_shapes([kept])] == [16, 4, 1, 1, 7, 1]
    assert "6 steps, 4 sizes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--max-num-batched-tokens", "4"], "the token budget is 4"),
    ],
)
def test_refusals_are_told(arguments, message, trace, capsys) -> None:
    given = arguments if "--trace" in arguments else ["--trace", trace, *arguments]
    assert sweep_buckets.main(given) == 2
    assert message in capsys.readouterr().err


def test_files_without_steps_are_told(tmp_path, capsys) -> None:
    empty, torn = tmp_path / "empty.jsonl", tmp_path / "torn.jsonl.gz"
    empty.write_text("")
    torn.write_bytes(sweep_buckets.EXAMPLES[0].read_bytes()[:2000])
    assert sweep_buckets.main(["--trace", str(empty)]) == sweep_buckets.main(["--trace", str(torn)]) == 2
    told = capsys.readouterr().err
    assert "there are no steps to choose buckets for" in told and "ended before the end" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-executables", "0"], "an integer of at least 1 is needed, got '0'"),
        (["--max-executables", "4,x"], "an integer of at least 1 is needed, got 'x'"),
        (["--max-num-batched-tokens", "0"], "an integer of at least 1 is needed, got '0'"),
        (["--cost", "measured"], "--cost measured needs --model"),
        (["--max-executables", "4", "--pick", "5"], "--pick 5 is not among"),
    ],
)
def test_flags_that_make_no_sense(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit):
        sweep_buckets.parse(arguments)
    assert message in capsys.readouterr().err


def test_a_roofline_reads_the_weights_and_does_the_operations(trace, capsys) -> None:
    """A model of one product W [64, 256] in bfloat16: at few tokens bound by W's bytes, at many by operations."""
    import jax
    import jax.numpy as jnp

    def forward_at(size):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((size, 64), (64, 256))]
        return jax.jit(lambda x, w: x @ w), tuple(shapes)

    gpu = GPUS["h200"]
    cost = costs.roofline(forward_at, (1, 4096), gpu)
    (one,), (many,) = (costs.products(*_call(forward_at(size))) for size in (1, 4096))
    assert (one.operations, one.bytes) == (2 * 64 * 256, 2 * (64 + 64 * 256 + 256))
    assert many.operations == 4096 * one.operations
    assert cost.seconds == (one.seconds(gpu), many.seconds(gpu))
    assert one.seconds(gpu) == one.bytes / 4.8e12
    wide = costs.Product(1e12, 1.0)
    assert wide.seconds(gpu) == 1e12 / 989e12
    np.testing.assert_allclose(cost(np.array([1, 4096])), cost.seconds)
    tiny = ["--trace", trace, "--cost", "model", "--config", "tiny", "--max-executables", "2", "--no-compile"]
    assert sweep_buckets.main(tiny) == 0
    shown = capsys.readouterr()
    assert "ms a step" in shown.out and "compile seconds and memory are not known: --no-compile" in shown.err


def test_what_executables_need_is_compiled_for_the_target(gpu_compiler, tmp_path, capsys) -> None:
    steps = tmp_path / "shapes.jsonl"
    steps.write_text('{"tokens": 1, "requests": 1, "logits_rows": 1, "max_query": 1, "max_len": 1, "mode": "FULL"}')
    tiny = ["--trace", str(steps), "--cost", "model", "--config", "tiny", "--max-executables", "1", "--json", "-"]
    assert sweep_buckets.main(tiny) == 0
    report = json.loads(capsys.readouterr().out)
    assert "why_null" not in report and report["step_time_unit"] == "s"
    assert all(each["compile_s"] > 0 and each["memory_bytes"] > 0 for each in report["ladders"])


def test_what_is_not_known_is_null_with_the_reason(trace, monkeypatch, capsys) -> None:
    tiny = ["--trace", trace, "--cost", "model", "--config", "tiny", "--max-executables", "2", "--json", "-"]
    for arguments, reason in [
        (["--trace", trace, "--json", "-"], "--cost tokens knows of no model"),
        ([*tiny], "the GPU compiler isn't installed"),
    ]:
        monkeypatch.setattr("scripts.gpu.compiler.find_compiler", lambda: None)
        assert sweep_buckets.main(arguments) == 0
        report = json.loads(capsys.readouterr().out)
        assert reason in report["why_null"] and report["cost"] == ("model" if arguments == tiny else "tokens")
        assert all(each["compile_s"] is None and each["memory_bytes"] is None for each in report["ladders"])


def _call(pair):
    function, arguments = pair
    return function, *arguments


def test_sampled_costs_never_fall_and_know_what_a_ladder_needs() -> None:
    cost = costs.Sampled((1, 3, 5), (2.0, 1.0, 4.0), (1.0, 2.0, 3.0), (10, 30, 50), (1, 1, 1))
    assert cost(np.array([1, 2, 3, 4, 5])).tolist() == [2, 2, 2, 3, 4]
    assert cost.needs([1, 4]) == (1.0 + 2.5, 2 + 40)
    assert costs.Sampled((1,), (1.0,)).needs([1]) == (None, None)
    assert costs.sample_sizes(64) == (1, 4, 16, 64) and costs.sample_sizes(50) == (1, 4, 16, 50)
    assert costs.sample_sizes(1) == (1,)
