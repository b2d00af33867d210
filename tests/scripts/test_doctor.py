"""scripts/doctor.py: what is chosen on this machine or another, and why the rest is not."""

import json
import sys

import jax
import pytest

from pallas_kernels.implementation import AttentionSupport, Kernel
from scripts import doctor


class HopperOnly:
    """An implementation of attention that refuses by platform, GPU, layer and dtype."""

    name = "hopper_only"
    support = AttentionSupport.ALWAYS

    def refuses(self, layer, block_size, dtype, platform):
        from pallas_kernels.gpus import current_device

        if platform != "gpu" or current_device().capability != (9, 0):
            return f"needs Hopper, this is {current_device().kind}"
        if dtype.name != "bfloat16" or layer.head_dim != 128 or block_size % 16:
            return f"takes bfloat16, not {dtype}"
        return None

    def configurations(self):
        return ()


@pytest.fixture
def with_hopper_only(monkeypatch):
    home = sys.modules["pallas_kernels.paged_attention"]
    monkeypatch.setattr(home, "IMPLEMENTATIONS", (HopperOnly(), home.IMPLEMENTATIONS[-1]))
    only_gpu = Kernel("only_gpu", lambda: None, refuses=lambda: "no GPU")
    also = Kernel("also", lambda: None)
    home = sys.modules["pallas_kernels.write_kv_cache"]
    monkeypatch.setattr(home, "IMPLEMENTATIONS", (only_gpu, home.IMPLEMENTATIONS[-1], also))


def report(capsys, *arguments):
    assert doctor.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def verdicts(rows):
    return [(row["implementation"], row["verdict"]) for row in rows]


def test_this_machine(capsys, with_hopper_only):
    found = report(capsys)
    kind = jax.devices()[0].device_kind
    assert found["device"]["platform"] == "cpu" and found["device"]["count"] == jax.device_count()
    assert found["versions"]["jax"] == jax.__version__ and found["model"] == "llama-3.1-8b"
    hopper, reference = found["kernels"]["paged_attention"]
    assert hopper == {"implementation": "hopper_only", "verdict": "refuses", "why": f"needs Hopper, this is {kind}"}
    assert reference == {"implementation": "reference", "verdict": "chosen", "why": ""}
    assert verdicts(found["kernels"]["write_kv_cache"]) == [
        ("only_gpu", "refuses"),
        ("reference", "chosen"),
        ("also", "could be asked for"),
    ]


def test_another_gpu(capsys, with_hopper_only):
    found = report(capsys, "--target", "h200")
    assert found["device"] == {"platform": "gpu", "kind": "NVIDIA H200", "capability": [9, 0]}
    expected = [("hopper_only", "chosen"), ("reference", "could be asked for")]
    assert verdicts(found["kernels"]["paged_attention"]) == expected
    a100 = report(capsys, "--target", "a100")["kernels"]["paged_attention"]
    assert verdicts(a100) == [("hopper_only", "refuses"), ("reference", "chosen")]
    assert "this is NVIDIA A100" in a100[0]["why"]
    float32 = report(capsys, "--target", "h200", "--dtype", "float32")["kernels"]["paged_attention"]
    assert float32[0]["why"] == "takes bfloat16, not float32"


def test_one_asked_for_by_name_that_refuses(capsys, with_hopper_only):
    assert doctor.main(["--attention", "hopper_only"]) == 1
    assert "needs Hopper" in capsys.readouterr().err
    assert doctor.main(["--attention", "nonsense"]) == 1
    assert "no implementation 'nonsense'" in capsys.readouterr().err


def test_the_screen(capsys):
    assert doctor.main(["--config", "qwen3-8b"]) == 0
    out = capsys.readouterr().out
    for words in ("device", "versions", "qwen3-8b, bfloat16, blocks of 16", "paged_attention", "reference", "chosen"):
        assert words in out
