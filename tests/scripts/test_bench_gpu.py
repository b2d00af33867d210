"""scripts/bench_gpu.py at tiny sizes on this machine: every part runs, is written down, and finds what is wrong."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention.reference import ReferenceAttention
from scripts import bench_gpu
from scripts.gpu_bench import numerics
from scripts.gpu_bench.model_step import captured
from tests.jaxrunner.chain import successor_logits, word_tokenizer, write_chain

WORDS = ["<unk>", "<s>", *(f"w{i}" for i in range(2, 64))]


def results(tmp_path, *arguments, code=0):
    out = tmp_path / "out.json"
    assert bench_gpu.main(["--tiny", "--json", str(out), *arguments]) == code
    return json.loads(out.read_text())


def test_all_parts(tmp_path, capsys):
    model = str(write_chain(tmp_path / "model", successor_logits(64, {}), word_tokenizer(WORDS)))
    found = results(tmp_path, "--model", model)
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


def test_what_the_budget_does_not_allow_is_left_out(tmp_path):
    """Also in the middle of a part."""
    found = results(tmp_path, "--only", "uploads,writes", "--budget", "1e-9")
    assert [list(row) for row in found["writes"]][1:] == [["left out"]] == [list(row) for row in found["uploads"]][1:]
    assert "the rest of it: --budget 1e-09 is used up" in found["uploads"][1]["left out"]


def test_a_kernel_that_hangs_ends_the_run(tmp_path):
    out = tmp_path / "out.json"
    program = f"""
import time
from scripts import bench_gpu

def rows(self, part):
    yield {{"case": "first"}}
    time.sleep(100)

bench_gpu.Bench._rows, bench_gpu.PATIENCE = rows, -99.5
bench_gpu.main(["--tiny", "--budget", "100", "--only", "device", "--json", {str(out)!r}])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "in rows" in done.stderr
    assert json.loads(out.read_text()) == {"device": [{"case": "first"}]}


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
    rows = results(tmp_path, "--only", "numerics", code=1)["numerics"]
    verdicts = {row["implementation"]: row for row in rows if row["kernel"] == "paged_attention"}
    assert [row["ok"] for row in verdicts.values()] == [False] * 4
    assert verdicts["a little off"]["error_over_allowed"] < 100
    assert verdicts["not a number"]["error_over_allowed"] == verdicts["padding"]["error_over_allowed"] == numerics.WRONG
    assert "ZeroDivisionError" in verdicts["broken"]["failed"]
    assert "SOMETHING was found wrong" in capsys.readouterr().out


def test_a_part_that_fails_or_has_no_time_doesnt_take_the_others_along(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.gpu_bench.timing.ceilings", lambda tiny: 1 / 0)
    found = results(tmp_path, "--only", "uploads,ceilings", code=1)
    assert "ZeroDivisionError" in found["ceilings"][0]["failed"] and len(found["uploads"]) == 4
    out = tmp_path / "out.json"
    bench = bench_gpu.Bench(bench_gpu.argparse.Namespace(tiny=False, budget=50, json=out), bench_gpu.Console())
    assert bench.run(["step"]) and "left of --budget 50" in json.loads(out.read_text())["step"][0]["left out"]


def test_a_part_that_isnt_there(capsys):
    with pytest.raises(SystemExit):
        bench_gpu.main(["--only", "numerics,nonsense"])
    assert "there is no part nonsense" in capsys.readouterr().err


def test_graphs_are_counted_from_xlas_list(tmp_path):
    assert captured(tmp_path) is None
    text = "001: kCommandBuffer [source]\n  002: kCustomKernel a\n003: kCopy kCopy\n"
    (tmp_path / "module_1.jit_f.thunk_sequence_after_thunk_passes.txt").write_text(text)
    assert captured(tmp_path) == {"graphs": 1, "thunks": 3}
