"""scripts/check_kernels.py: the kernels CI compiles are as they should be, and what isn't is found and named."""

import json
from pathlib import Path

import pytest

from pallas_kernels.configurations import configurations
from pallas_kernels.gpus import GPUS
from scripts import check_kernels

SAMPLE = ["--configurations", "tests.scripts.gpu.sample_configurations"]
KEYS = (
    "kernel implementation target config registers spill_bytes shared_bytes sass compile_s ok why ptx"  # as documented
).split()
MOST_IN_CI = 40


def test_kernels_are_compiled_and_judged(gpu_compiler, tmp_path, capsys):
    out, keep = tmp_path / "out.json", tmp_path / "ptx"
    arguments = [*SAMPLE, "--targets", "h200,a100", "--json", str(out), "--keep", str(keep)]
    assert check_kernels.main(arguments) == 1
    rows = json.loads(out.read_text())
    assert all(list(row) == KEYS for row in rows)
    verdicts = {(row["target"], row["config"]): (row["ok"], row["why"]) for row in rows}
    assert verdicts == {
        ("h200", "good"): (True, ""),
        ("h200", "no products"): (False, "no tensor-core instruction"),
        ("h200", "failing"): (False, "ValueError: this one can't be lowered"),
        ("a100", "failing"): (False, "ValueError: this one can't be lowered"),
        ("h200", "xla"): (False, "no Pallas kernel is in the compiled program"),
    }
    good = rows[0]
    assert good["registers"] > 0 and good["spill_bytes"] == 0 and good["sass"]["UTMALDG"] > 0
    assert good["shared_bytes"] >= 64 * 64 * 2 and good["compile_s"] > 0
    assert ".target sm_90a" in Path(good["ptx"]).read_text() and good["ptx"].startswith(str(keep))
    assert "1 of 5 as they should be" in capsys.readouterr().out


def test_what_is_asked_for_is_compiled(capsys):
    check_kernels.main([*SAMPLE, "--list"])
    assert capsys.readouterr().out.split("\n")[:-1] == [
        "h200  copy/sample/good",
        "h200  copy/sample/no products",
        "h200  copy/sample/failing",
        "h200  copy/sample/xla",
        "h100  copy/sample/good",
        "h100  copy/sample/no products",
        "h100  copy/sample/failing",
        "h100  copy/sample/xla",
        "a100  copy/sample/failing",
    ]
    check_kernels.main([*SAMPLE, "--list", "--targets", "h100,a100", "--only", "fail|xl"])
    assert (
        capsys.readouterr().out.split()
        == "h100 copy/sample/failing h100 copy/sample/xla a100 copy/sample/failing".split()
    )
    check_kernels.main([*SAMPLE, "--list", "--quick"])
    assert capsys.readouterr().out.split() == ["h200", "copy/sample/good", "h100", "copy/sample/good"]


def test_a_mistyped_gpu_and_an_empty_choice(capsys):
    with pytest.raises(SystemExit):
        check_kernels.main([*SAMPLE, "--targets", "h200,b300"])
    assert "no data sheet of b300" in capsys.readouterr().err
    assert check_kernels.main([*SAMPLE, "--only", "nothing like it"]) == 2


def test_the_projects_kernels(gpu_compiler, tmp_path):
    """Those marked for CI, on the GPUs they are for; Hopper stands for its two."""
    targets = "h200,a100,l4,b200"
    marked = [c for c in configurations() if c.in_ci]
    jobs = sum(GPUS[target].capability in c.capabilities for c in marked for target in targets.split(","))
    assert jobs <= MOST_IN_CI, f"{jobs} pairs of a configuration and a GPU: unmark some"
    if not jobs:
        pytest.skip("no kernel is marked for CI")
    out = tmp_path / "out.json"
    check_kernels.main(["--quick", "--targets", targets, "--json", str(out)])
    assert [(r["target"], r["kernel"], r["config"], r["why"]) for r in json.loads(out.read_text()) if not r["ok"]] == []
