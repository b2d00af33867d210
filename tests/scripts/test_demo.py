"""scripts/demo.py, run in this process on a scripted checkpoint in place of its model."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxrunner.compilation_cache import without_compilation_cache
from pallas_kernels.implementation import Kernel
from scripts import demo
from tests.jaxrunner.chain import successor_logits, word_tokenizer, write_chain

V = 64
WORDS = ["<unk>", "<s>", *(f"w{i}" for i in range(2, V))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    template = {"chat_template": "{{ messages[-1].content }}"}
    return str(write_chain(folder, successor_logits(V, {}), word_tokenizer(WORDS), tokenizer_config=template))


@pytest.fixture(autouse=True)
def kept_for_itself(monkeypatch, tmp_path):
    """Programs are kept in a folder of the test, not in the user's."""
    monkeypatch.setattr(demo.platformdirs, "user_cache_path", lambda name: tmp_path)
    return tmp_path / "demo"


def test_a_second_run_takes_the_first_ones_programs(model, capsys, kept_for_itself):
    def run() -> dict:
        with without_compilation_cache():
            assert demo.main(["--model", model, "--prompt", "w3", "--max-tokens", "3", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    first = run()
    assert "no saved executables" in first["kept_executables"] and (kept_for_itself / "executables.json").exists()
    second = run()
    assert second["kept_executables"] == len(second["executables"]) == len(first["executables"])
    assert second["answers"] == first["answers"]
    manifest = json.loads((kept_for_itself / "executables.json").read_text())
    (kept_for_itself / "executables.json").write_text(json.dumps(manifest | {"JAX version": "0.1"}))
    third = run()
    assert "their JAX version is '0.1'" in third["kept_executables"] and third["answers"] == first["answers"]
    assert demo.main(["--model", model, "--prompt", "w3", "--max-tokens", "3"]) == 0
    # The third run kept its own, and the fourth took them.
    assert f"{len(first['executables'])} whole programs of an earlier run" in capsys.readouterr().out


def test_the_report_as_data(model, capsys):
    jax.clear_caches()  # a program that another test has compiled in this process would not be looked up at all
    assert demo.main(["--model", model, "--prompt", "w3", "w9 w8", "--max-tokens", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(a["text"], a["tokens"], a["finish_reason"]) for a in report["answers"]] == [
        ("w4w5w6w7", 4, "length"),
        ("w9w10w11w12", 4, "length"),
    ]
    assert report["generated_tokens"] == 8 and report["prompt_tokens"] == 3 and report["steps"] == 4
    # Few programs: two for the model, one for head and sampler, and the small ones that write device state.
    assert sorted(n for n in report["executables"] if n.startswith(("forward", "head"))) == [
        "forward[256]",
        "forward[8]",
        "head[8]",
    ]
    assert report["compilations_while_generating"] == 0
    assert report["compilation_cache"]["hits"] + report["compilation_cache"]["misses"] >= len(report["executables"])
    kernels = ["write_kv_cache", "rope_and_write_kv_cache", "slot_mapping"]
    assert [line.split(" (")[0] for line in report["kernels"]] == [f"{name}: reference" for name in kernels]
    assert report["segments"].keys() == {"update", "prepare", "dispatch", "wait", "record", "scheduling, text"}
    assert sum(report["segments"].values()) == pytest.approx(report["generate_seconds"])


def test_the_report_on_the_screen(model, capsys):
    assert demo.main(["--model", model, "--prompt", "w3", "--max-tokens", "2"]) == 0
    out = capsys.readouterr().out
    for words in (
        "w4w5",
        "device",
        "attention",
        "write_kv_cache: ",
        "KV cache",
        "tokens/s",
        "compile",
        "Compilation cache: ",
        "Compiled while generating: 0.",
        "dispatch",
        "generate (2 steps)",
    ):
        assert words in out


def test_a_kernel_that_was_passed_over_says_why(monkeypatch):
    module = importlib.import_module("pallas_kernels.write_kv_cache")
    fast = Kernel("fast", print, lambda: "no GPU")
    monkeypatch.setattr(module, "IMPLEMENTATIONS", (fast, Kernel("reference", print)))
    assert "write_kv_cache: reference (passed over fast: no GPU)" in demo.kernel_choices("cpu")
    monkeypatch.setattr(module, "IMPLEMENTATIONS", (Kernel("new", print), fast))
    assert "write_kv_cache: new (the first of 2)" in demo.kernel_choices("cpu")


def test_errors_in_one_line(capsys):
    assert demo.main(["--model", "no-such-model"]) == 2
    assert capsys.readouterr().err.startswith("demo: can't find the model 'no-such-model'")
    assert demo.main(["--max-tokens", "0"]) == 2
    assert capsys.readouterr().err.startswith("demo: --max-tokens must be an integer")


def test_the_command_leaves_stdout_to_the_report(tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(Path(demo.__file__).with_name("demo"), scripts)
    (scripts / "_environment.sh").write_text(f"project={tmp_path} python={sys.executable}\n")
    (scripts / "fetch_model.py").write_text("print('fetched')")
    (scripts / "demo.py").write_text("import sys; print(sys.argv[1:])")
    done = subprocess.run([scripts / "demo", "--json"], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("['--json']\n", "fetched\n", 0)
