#!/usr/bin/env python
"""What this machine runs a model with: device, versions, and which implementation of each kernel is chosen, and why.

  doctor.py                                     for a Llama-3.1-8B-shaped model in bfloat16
  doctor.py --model smollm2-135m-instruct       for a model that is here
  doctor.py --target a100                       as if this machine had that GPU
  doctor.py --dtype float32 --block-size 32 --json

An implementation that doesn't take a case says why, and the choice falls to the next. --attention asks for one by name,
as `LLM(attention=...)` does: if it refuses, that is an error with its reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from rich.console import Console
from rich.table import Table

from models import ModelConfig, open_checkpoint, resolve_model
from models.errors import ModelNotFoundError
from pallas_kernels import AttentionLayer, choose_attention
from pallas_kernels.configurations import kernel_tables
from pallas_kernels.gpus import GPUS, current_device
from pallas_kernels.implementation import choose_kernel
from scripts.command import report_error, run_command  # noqa: E402
from scripts.gpu.compiler import find_compiler
from scripts.gpu.published import PUBLISHED

PACKAGES = (
    *("jax", "jaxlib", "flax", "numpy"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-cudnn-cu13"),
)


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter here, those that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def driver() -> str | None:
    """Version of NVIDIA's driver; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip().partition("\n")[0] or None if done.returncode == 0 else None


def device_facts(target: str | None) -> dict[str, Any]:
    """The device that is computed on, or asked about."""
    device = current_device()
    facts: dict[str, Any] = {
        "platform": device.platform,
        "kind": device.kind,
        "capability": list(device.capability) if device.capability else None,
    }
    if target is None:
        real = jax.devices()[0]
        stats = real.memory_stats() or {}
        facts |= {
            "count": jax.device_count(),
            "memory_bytes": stats.get("bytes_limit"),
            "runtime": real.client.platform_version.strip().replace("\n", ", "),
            "driver": driver(),
        }
    return facts


def attention_choice(layers: Sequence[AttentionLayer], args: argparse.Namespace, on: str) -> list[dict[str, str]]:
    """Each implementation of attention, with its part in the choice.

    Raises:
        ValueError: the one asked for refuses, or all do.
    """
    chosen, _ = choose_attention(layers, args.block_size, args.dtype, on, args.attention)
    rows = []
    for each in kernel_tables()["paged_attention"]:
        # A reason is a layer's; one layer stands for all of its kind.
        reasons = (each.refuses(layer, args.block_size, jax.numpy.dtype(args.dtype), on) for layer in layers)
        why = next((reason for reason in reasons if reason is not None), None)
        rows.append(_row(each.name, each is chosen, why))
    return rows


def kernel_choice(what: str) -> list[dict[str, str]]:
    """Each implementation of another kernel, with its part in the choice."""
    kernels = kernel_tables()[what]
    chosen, _ = choose_kernel(what, kernels)
    return [_row(each.name, each is chosen, each.refuses()) for each in kernels]


def _row(name: str, chosen: bool, refusal: str | None) -> dict[str, str]:
    verdict = "chosen" if chosen else "could be asked for" if refusal is None else "refuses"
    return {"implementation": name, "verdict": verdict, "why": refusal or ""}


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """All that is worth telling, as plain data."""
    if args.model:
        config = open_checkpoint(resolve_model(args.model)).config
    else:
        config = ModelConfig.from_hf(PUBLISHED[args.config])
    context: Any = nullcontext()
    if args.target:
        gpu = GPUS[args.target]
        there = AbstractDevice(device_kind=gpu.kind, num_cores=gpu.num_sms, platform="gpu")
        mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=there)
        context = jax.sharding.use_abstract_mesh(mesh)
    with context:
        device = device_facts(args.target)
        kernels = {"paged_attention": attention_choice(config.attention_layers(), args, device["platform"])}
        kernels |= {what: kernel_choice(what) for what in kernel_tables() if what not in kernels}
    compiler = find_compiler()
    return {
        "device": device,
        "versions": versions(),
        "gpu_compiler": None if compiler is None else {"folder": str(compiler.folder), **compiler.versions},
        "model": args.model or args.config,
        "dtype": args.dtype,
        "block_size": args.block_size,
        "kernels": kernels,
    }


def show(console: Console, report: dict[str, Any], target: str | None) -> None:
    device = report["device"]
    facts = Table(show_header=False, box=None)
    name = f"{device['platform']}: {device['kind']}"
    if device["capability"]:
        name += f", compute capability {'.'.join(map(str, device['capability']))}"
    facts.add_row("device", name + (" (asked about, not here)" if target else f", {device['count']} of it"))
    if not target:
        if device["memory_bytes"]:
            facts.add_row("memory", f"{device['memory_bytes'] / 1e9:.1f} GB for JAX")
        facts.add_row("runtime", device["runtime"])
        facts.add_row("NVIDIA driver", device["driver"] or "none")
    facts.add_row("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    compiler = report["gpu_compiler"]
    facts.add_row("GPU compiler", compiler["folder"] if compiler else "not installed (scripts/check_kernels.py does)")
    console.print(facts)
    title = f"kernels for {report['model']}, {report['dtype']}, blocks of {report['block_size']}"
    table = Table("kernel", "implementation", "verdict", "why", title=title, title_justify="left")
    for kernel, rows in report["kernels"].items():
        for index, row in enumerate(rows):
            style = "bold" if row["verdict"] == "chosen" else None
            last = index + 1 == len(rows)
            table.add_row("" if index else kernel, *row.values(), style=style, end_section=last)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog=__doc__.split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="a model that is here: a path, or a name of scripts/fetch_model.py")
    which.add_argument("--config", choices=PUBLISHED, default="llama-3.1-8b", help="a published model's shapes")
    parser.add_argument("--target", choices=GPUS, help="ask about this GPU instead of the one here")
    parser.add_argument("--dtype", default="bfloat16", help="of model and cache (default: bfloat16)")
    parser.add_argument("--block-size", type=int, default=16, help="of the KV cache (default: 16)")
    parser.add_argument("--attention", default="auto", help="ask for an implementation of attention by name")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = parser.parse_args(arguments)
    try:
        report = examine(args)
    except (ValueError, TypeError, ModelNotFoundError) as error:
        return report_error("doctor", error, args, code=1)
    if args.json:
        print(json.dumps(report))
    else:
        show(Console(highlight=False, width=None if sys.stdout.isatty() else 140), report, args.target)
    return 0


if __name__ == "__main__":
    run_command(main)
