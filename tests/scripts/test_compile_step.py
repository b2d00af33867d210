"""scripts/compile_step.py: a whole step, really compiled for a GPU, and its figures."""

import json
import subprocess
import sys

import pytest

from scripts import compile_step
from tests.scripts.gpu.two_layers import IMPLEMENTATIONS, MODELS

MOST_LAUNCHES = 11  # of a layer, the merge of divided keys among them


def test_a_small_step(gpu_compiler, tmp_path, capsys):
    out = tmp_path / "out.json"
    size = ["--config", "tiny", "--tokens", "16", "--reqs", "4", "--blocks", "64"]
    assert compile_step.main([*size, "--implementation", "reference", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["implementation"] == "reference" and figures["layers"] == 2
    assert figures["caches"] == figures["caches_aliased"] == 4 and figures["cache_copies"] == 0
    assert figures["launches_of_forward"] > 2 * figures["launches_per_layer"] > 10
    assert figures["launches"] == figures["launches_of_forward"] + figures["launches_of_head_and_sampler"]
    assert sum(figures["launches_of_a_layer"].values()) == figures["launches_per_layer"]
    assert figures["temp_bytes"] > 0 and figures["compile_s"] > 0
    assert figures["cache_bytes"] == 4 * 64 * 16 * 2 * 64 * 2
    assert "compiled for h200, not run" in " ".join(capsys.readouterr().out.split())


def test_a_layer_has_few_launches_and_its_caches_stay_in_place(gpu_compiler, tmp_path):
    """Published 8B models, two layers of each, with both attentions of a Hopper GPU."""
    command = [sys.executable, "-m", "tests.scripts.gpu.two_layers", str(tmp_path)]
    done = subprocess.run(command, env=gpu_compiler.environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(row["model"], row["implementation"]) for row in rows] == [(m, i) for m in MODELS for i in IMPLEMENTATIONS]
    for row in rows:
        assert row["layers"] == 2
        assert 8 <= len(row["between"]) <= MOST_LAUNCHES, row
        assert row["copies"] == [] and row["aliased"] == row["caches"] == 4, row


def test_a_refusal_is_the_users_to_read(gpu_compiler, capsys):
    assert compile_step.main(["--config", "tiny", "--implementation", "nonsense"]) == 2
    assert "no implementation 'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "figures, words",
    [
        ({"cache_copies": 2}, "2 copies of a cache, such as %copy.1"),
        ({"caches_aliased": 3}, "3 of 4 caches are updated in place"),
        ({"launches_per_layer": 11}, "11 launches a layer, 10 are allowed"),
    ],
)
def test_what_is_wrong_is_named(figures, words):
    good = {"cache_copies": 0, "copies": ["%copy.1"], "caches": 4, "caches_aliased": 4, "launches_per_layer": 10}
    assert compile_step.problems_of(good, 10) == []
    assert words in compile_step.problems_of(good | figures, 10)[0]
