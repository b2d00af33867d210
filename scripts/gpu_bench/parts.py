"""The parts of `bench_gpu.py`, as what `child` runs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import AttentionLayer
from pallas_kernels.configurations import kernel_tables
from scripts.doctor import device_facts, versions
from scripts.gpu_bench import attention_speed, model_step, numerics, timing, uploads
from scripts.gpu_bench.tasks import BESIDE_ATTENTION, Task
from scripts.gpu_bench.text import text


def rows(task: Task) -> Iterator[dict[str, Any]]:
    """What a task finds, dictionaries that JSON has, as it finds them."""
    tiny, ceilings = task.tiny, dict(task.ceilings)
    match task.part:
        case "device":
            yield device_facts(None) | {"versions": versions(), "implementations": refusals()}
        case "numerics" if task.group == BESIDE_ATTENTION:
            yield from numerics.slots_and_writes(tiny)
        case "numerics":
            yield from numerics.attention(tiny, task.group)
        case "ceilings":
            yield from timing.ceilings(tiny)
        case "attention":
            yield from attention_speed.attention(tiny, ceilings, room() / 3, task.group)
        case "writes":
            yield from attention_speed.writes(tiny, ceilings)
        case "torch":
            yield from torch(task)
        case "uploads":
            yield from uploads.uploads(tiny)
        case "step":
            yield from model_step.decode_step(tiny, task.attention, ceilings, room() * 0.8, task.seconds)
        case "text":
            yield from text(task.model, task.attention)


def refusals() -> dict[str, str | None]:
    """Every implementation of attention, with the reason why it can't be had for a common layer here, or None."""
    layer, platform = AttentionLayer("", 32, 8, 128, 0.1), jax.default_backend()
    dtype = jax.numpy.dtype("bfloat16")
    return {each.name: each.refuses(layer, 16, dtype, platform) for each in kernel_tables()["paged_attention"]}


def room() -> float:
    """Bytes of the device's memory that are free; 1 GB where the device doesn't say."""
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats["bytes_limit"] - stats["bytes_in_use"]) if "bytes_limit" in stats else 1e9


def torch(task: Task) -> Iterator[dict[str, Any]]:
    """PyTorch's attention at the same shapes; it needs no JAX on the device."""
    python = task.torch_python or (sys.executable if find_spec("torch") else None)
    if python is None:
        yield {"left out": "no PyTorch in this environment; --torch-python names the Python of one that has it"}
        return
    shapes: list[list[Any]] = [["decode 64 x 2k", 64, 1, 2048], ["decode 64 x 8k", 64, 1, 8192]]
    shapes += [["decode 1 x 1k", 1, 1, 1024], ["prefill 4k", 1, 4096, 4096], ["prefill 16k", 1, 16384, 16384]]
    if task.tiny:
        shapes = [["decode 4 x 16", 4, 1, 16]]
    script = Path(__file__).parents[1] / "peers" / "torch_attention.py"
    command = [python, str(script), json.dumps(shapes)]
    by_name = {work.name: work for work in attention_speed.workloads(task.tiny)}
    heads, ceilings = attention_speed.Heads(), dict(task.ceilings)
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdout is not None
        for row in (json.loads(line) for line in process.stdout if line.startswith("{")):
            seconds, work = row.get("seconds"), by_name[row["workload"]]
            yield row | (attention_speed.rates(work, heads, seconds, ceilings) if seconds is not None else {})
        if process.wait():
            said.seek(0)
            yield {"left out": f"PyTorch's side ended early: {said.read()[-300:]}"}
