"""scripts/bench_gpu.py at tiny sizes on this machine: every part runs, is written down, and finds what is wrong."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention.reference import ReferenceAttention
from scripts import bench_gpu
from scripts.gpu_bench import numerics
from scripts.gpu_bench.model_step import captured
from scripts.gpu_bench.tasks import BESIDE_ATTENTION, Limits
from tests.jaxrunner.chain import successor_logits, word_tokenizer, write_chain

WORDS = ["<unk>", "<s>", *(f"w{i}" for i in range(2, 64))]


def results(tmp_path, *arguments, code=0):
    out = tmp_path / "out.json"
    assert bench_gpu.main(["--json", str(out), *arguments]) == code
    return json.loads(out.read_text())


HERE = ["--tiny", "--one-process"]
SAMPLE = ["--parts", "tests.scripts.gpu_bench.sample_parts"]


def test_all_parts(tmp_path, capsys):
    model = str(write_chain(tmp_path / "model", successor_logits(64, {}), word_tokenizer(WORDS)))
    found = results(tmp_path, *HERE, "--model", model)
    assert list(found) == list(bench_gpu.PARTS)
    assert found["device"][0]["platform"] == jax.default_backend()
    checked = {(row["kernel"], row["implementation"]) for row in found["numerics"] if row.get("ok")}
    every = ("paged_attention", "rope_and_write_kv_cache", "write_kv_cache", "slot_mapping")
    assert {(kernel, "reference") for kernel in every} <= checked
    assert all(row["ok"] for row in found["numerics"] if "refused" not in row)
    assert [row["ceiling"] for row in found["ceilings"]] == ["memory read", "memory copied", "bfloat16 products"]
    timed = [row for part in ("attention", "writes", "uploads") for row in found[part] if "refused" not in row]
    assert len(timed) >= 7 and all(row["seconds"] > 0 for row in timed)
    assert all(row["of_memory_read"] > 0 for row in found["attention"] if "refused" not in row)
    [step] = found["step"]
    assert step["layers"] == "2 of 2" and step["tokens_per_s"] > 0 and step["variant"] == "as it is"
    assert all(isinstance(text, str) and text for text in found["text"][0]["texts"])
    out = capsys.readouterr().out
    assert "nothing was found wrong" in out and "numerics" in out and "tokens/s" in out


def test_what_breaks_or_hangs_leaves_the_others_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench_gpu.PARTS, "uploads", Limits(0, 3))
    found = results(tmp_path, *SAMPLE, code=1)
    [beside, good, before, killed] = found["numerics"]
    assert (
        beside["of"] == f"numerics {BESIDE_ATTENTION}" and good["of"] == "numerics good" and before["case"] == "before"
    )
    assert (killed["group"], killed["exit_code"]) == ("deadly", -9)
    assert killed["failed"].startswith("its process ended with SIGKILL (exit code -9): not a row: something of")
    assert found["ceilings"][1] == {"failed": "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"}
    good, segfault = found["attention"]
    assert good["ceilings"] == {"memory read": 5.0}
    assert segfault["exit_code"] == -11 and "SIGSEGV" in segfault["failed"] and "in rows" in segfault["failed"]
    assert found["writes"] == [{"failed": "its process ended with exit code 3", "exit_code": 3}]
    [first, hung] = found["uploads"]
    assert first["upload"] == "first" and "not done after 3 s" in hung["failed"] and "in hang" in hung["failed"]
    assert [found[part][0]["of"] for part in ("torch", "step", "text")] == ["torch", "step", "text"]
    out = capsys.readouterr().out
    assert "SOMETHING was found wrong" in out and out.index("not done after 3 s") < out.index("of: step")


def test_what_the_budget_does_not_allow_is_left_out(tmp_path):
    """Also in the middle of a part."""
    start = time.perf_counter()
    found = results(tmp_path, *SAMPLE, "--tiny", "--only", "uploads,step", "--budget", "12")
    assert found["uploads"][1] == {"left out": "the rest of it: --budget 12 is used up"}
    assert found["step"] == [{"left out": "0 s are left of --budget 12"}]
    assert time.perf_counter() - start < 60
    found = results(tmp_path, *SAMPLE, "--only", "step", "--budget", "50")
    assert "left of --budget 50" in found["step"][0]["left out"]


def test_parts_have_processes_of_their_own(tmp_path):
    found = results(tmp_path, "--tiny", "--only", "ceilings")
    assert list(found) == ["device", "ceilings"] and len(found["ceilings"]) == 3


def test_an_unusable_device_is_said(tmp_path):
    found = results(tmp_path, "--parts", "tests.scripts.gpu_bench.no_such_parts", code=1)
    assert "ModuleNotFoundError" in found["device"][0]["failed"] and list(found) == ["device"]


class Wrong(ReferenceAttention):
    """Right but for one thing."""

    def __init__(self, name, spoil):
        self.name, self.spoil = name, spoil

    def attend(self, q, cache, metadata, layer, sinks=None):
        out = super().attend(q, cache, metadata, layer, sinks)
        return self.spoil(out) if self.spoil else 1 / 0


def test_what_is_wrong_is_found(tmp_path, monkeypatch, capsys):
    wrong = (
        Wrong("a little off", lambda out: out.at[0, 0, 0].add(2e-4)),
        Wrong("not a number", lambda out: out.at[0, 1, 2].set(jnp.nan)),
        Wrong("padding", lambda out: out + 1e-9),
        Wrong("broken", None),
    )
    monkeypatch.setattr(sys.modules["pallas_kernels.paged_attention"], "IMPLEMENTATIONS", wrong)
    case = numerics.cases(tiny=True)[0]
    monkeypatch.setattr(numerics, "cases", lambda tiny: [case])
    rows = results(tmp_path, *HERE, "--only", "numerics", code=1)["numerics"]
    verdicts = {row["implementation"]: row for row in rows if row["kernel"] == "paged_attention"}
    assert [row["ok"] for row in verdicts.values()] == [False] * 4
    assert verdicts["a little off"]["error_over_allowed"] < 100
    assert verdicts["not a number"]["error_over_allowed"] == verdicts["padding"]["error_over_allowed"] == numerics.WRONG
    assert "ZeroDivisionError" in verdicts["broken"]["failed"]
    assert "SOMETHING was found wrong" in capsys.readouterr().out


def test_a_part_that_fails_doesnt_take_the_others_along(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.gpu_bench.timing.ceilings", lambda tiny: 1 / 0)
    found = results(tmp_path, *HERE, "--only", "uploads,ceilings", code=1)
    assert "ZeroDivisionError" in found["ceilings"][0]["failed"] and len(found["uploads"]) == 4


def test_a_model_that_isnt_here_is_no_fault_of_a_kernels(tmp_path):
    found = results(tmp_path, *HERE, "--only", "text", "--model", str(tmp_path / "no-model"))
    assert "no-model" in found["text"][0]["left out"]


def test_a_part_that_isnt_there(capsys):
    with pytest.raises(SystemExit):
        bench_gpu.main(["--only", "numerics,nonsense"])
    assert "there is no part nonsense" in capsys.readouterr().err


def test_graphs_are_counted_from_xlas_list(tmp_path):
    assert captured(tmp_path) is None
    text = "001: kCommandBuffer [source]\n  002: kCustomKernel a\n003: kCopy kCopy\n"
    (tmp_path / "module_1.jit_f.thunk_sequence_after_thunk_passes.txt").write_text(text)
    assert captured(tmp_path) == {"graphs": 1, "thunks": 3}
