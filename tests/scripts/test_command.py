"""How commands end: flags in their errors, and no traceback where nobody reads on."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import bench_gpu, bench_host, bench_trace, generate
from scripts.command import READER_IS_GONE, report_error, with_flags

ROOT = Path(__file__).parents[2]
OPTIONS = argparse.Namespace(
    max_num_seqs=8, max_num_batched_tokens=4, num_blocks=None, top_p=2.0, record="x", trace="y", model="m", seed=1
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "max_num_batched_tokens (4) must be at least max_num_seqs (8)",
            "--max-num-batched-tokens (4) must be at least --max-num-seqs (8)",
        ),
        ("num_gpu_blocks_override must be an integer", "--num-blocks must be an integer"),
        ("record_shapes must be a file", "--record must be a file"),
        ("trace must be a file", "--trace must be a file"),
        ("top_p must be from 0 to 1, got 2", "--top-p must be from 0 to 1, got 2"),
        ("the model has no trace of a seed", "the model has no trace of a seed"),
        ("max_num_seqs_x, 'max_num_seqs', gpu_memory", "max_num_seqs_x, 'max_num_seqs', gpu_memory"),
        ("requests.jsonl, line 3: top_p must be from 0 to 1", "requests.jsonl, line 3: top_p must be from 0 to 1"),
    ],
)
def test_names_become_flags(message, expected):
    assert with_flags(message, OPTIONS) == expected


def test_a_command_says_its_own_flags(capsys):
    limits = ["--max-num-seqs", "8", "--max-num-batched-tokens", "4"]
    assert generate.main(["--prompt", "Hi", *limits]) == 2
    assert "generate: --max-num-batched-tokens (4) must be at least --max-num-seqs (8)" in capsys.readouterr().err
    assert generate.main(["--prompt", "Hi", "--top-p", "2"]) == 2
    assert "generate: --top-p must be from 0 to 1, got 2\n" == capsys.readouterr().err


def run_without_a_reader(*command: str) -> subprocess.CompletedProcess:
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        return subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "said", ["print('x')", "import rich; rich.print('x')", "print('x' * 99999)", "sys.stdout.writelines(['x'] * 99999)"]
)
def test_a_reader_that_is_gone_is_no_error(said):
    code = (
        "import sys\n"
        "from scripts.command import report_error, run_command\n"
        "def main():\n"
        f"    try: {said}; sys.stdout.flush()\n"
        "    except OSError as error: return report_error('x', error)\n"
        "run_command(main)"
    )
    done = run_without_a_reader(sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (READER_IS_GONE, "")


def test_nor_is_it_for_help():
    done = run_without_a_reader(sys.executable, str(ROOT / "scripts" / "fetch_model.py"), "--help")
    assert done.returncode in (0, READER_IS_GONE) and done.stderr == ""  # argparse itself may pass over it


def test_an_error_is_one_line_and_a_code(capsys):
    assert report_error("x", ValueError("max_num_seqs is odd"), OPTIONS) == 2
    assert capsys.readouterr().err == "x: --max-num-seqs is odd\n"


def test_every_command_ends_this_way():
    """But the two that are examples of a user's own script, and those that write fixtures in another environment."""
    others = {"own_step", "own_gradient", "make_long_prompts", "make_model_fixtures"}
    for script in sorted((ROOT / "scripts").glob("*.py")):
        text = script.read_text(encoding="utf-8")
        if "__main__" in text and script.stem not in others:
            assert text.endswith('if __name__ == "__main__":\n    run_command(main)\n'), script.name


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (bench_trace.main, ["--reqs", "8,0"], "argument --reqs: an integer of at least 1 is needed, got '0'"),
        (bench_host.main, ["--json", "no/such/x.json"], "argument --json: a file in a folder that exists is needed"),
        (bench_gpu.main, ["--json", "."], "argument --json: a file in a folder that exists is needed, got '.'"),
    ],
)
def test_what_could_not_end_well_does_not_begin(capsys, main, arguments, said):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err
