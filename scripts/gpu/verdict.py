"""Whether a kernel's machine code is what it has to be."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pallas_kernels.configurations import (
    ASYNC_COPIES,
    IN_PLACE,
    TENSOR_CORES,
    TMA_LOADS,
    WGMMA,
    WIDE_LOADS,
    KernelConfiguration,
)
from pallas_kernels.gpus import Gpu

_TENSOR_CORES = ("HGMMA", "HMMA", "IMMA", "QGMMA", "UTCMMA")
_ELEMENTS = ("LDG.16", "LDG.8")
_WORDS = ("LDG.32", "LDGSTS.32")
_WIDE = ("LDG.128", "LDG.256", "LDGSTS.128", "UTMALDG", "UBLKCP")


def row_of(configuration: KernelConfiguration, target: str, gpu: Gpu, answer: dict[str, Any]) -> dict[str, Any]:
    """A configuration's row in `check_kernels.py`'s JSON, from what its compilation gave (see `worker`).

    A configuration may be several GPU kernels, such as split and merge: registers and shared memory are of the kernel
    with the most, spills and instructions are sums, "ptx" is the file of the longest.
    """
    kernels = answer.get("kernels", [])
    sass = Counter[str]()
    for kernel in kernels:
        sass.update(kernel["sass"])
    problems = [answer["error"]] if "error" in answer else problems_of(configuration, gpu, answer, dict(sass))
    longest = max(kernels, key=lambda k: k["sass"]["total"], default=None)
    return {
        "kernel": configuration.kernel,
        "implementation": configuration.implementation,
        "target": target,
        "config": configuration.config,
        "registers": max((k["registers"] for k in kernels), default=0),
        "spill_bytes": sum(k["spill_bytes"] for k in kernels),
        "shared_bytes": max((k["shared_bytes"] for k in kernels), default=0),
        "sass": dict(sass),
        "compile_s": round(answer.get("compile_s", 0.0), 3),
        "ok": not problems,
        "why": "; ".join(problems),
        "ptx": longest["ptx"] if longest is not None else None,
    }


def problems_of(
    configuration: KernelConfiguration, gpu: Gpu, answer: dict[str, Any], sass: dict[str, int]
) -> list[str]:
    """What is wrong with compiled code, in words; nothing if it is as `configuration.needs` asks."""
    kernels, needs = answer["kernels"], configuration.needs
    if not kernels:
        return ["no Pallas kernel is in the compiled program"]
    problems = []
    for kernel in kernels:
        if kernel["spill_bytes"]:
            problems.append(f"{kernel['name']} spills {kernel['spill_bytes']} bytes of registers a thread")
        elif local := kernel["sass"].get("LDL", 0) + kernel["sass"].get("STL", 0):
            problems.append(f"{kernel['name']} has {local} instructions on local memory")
        if kernel["shared_bytes"] > gpu.shared_bytes:
            problems.append(
                f"{kernel['name']} wants {kernel['shared_bytes']} of {gpu.shared_bytes} bytes shared memory"
            )
        if WGMMA in needs and kernel["serialised"]:
            problems.append(f"ptxas runs the wgmma of {kernel['name']} one after the other")
        if WIDE_LOADS in needs:
            problems += [f"{kernel['name']} {why}" for loop in kernel["loops"] if (why := scalar_loop(loop))]
    if {TENSOR_CORES, WGMMA} & needs and not any(sass.get(name) for name in _TENSOR_CORES):
        problems.append("no tensor-core instruction")
    if WGMMA in needs and gpu.capability == (9, 0) and (sass.get("HMMA") or not sass.get("HGMMA")):
        found = f"{sass.get('HGMMA', 0)} wgmma and {sass.get('HMMA', 0)} mma instructions"
        problems.append(f"{found}: a product isn't done by wgmma")
    if TMA_LOADS in needs and not sass.get("UTMALDG"):
        problems.append("no TMA load")
    if ASYNC_COPIES in needs and not (sass.get("LDGSTS.128") or sass.get("UTMALDG")):
        problems.append("no 16-byte asynchronous copy")
    if WIDE_LOADS in needs and not any(sass.get(name) for name in _WIDE):
        problems.append("no 16-byte load")
    if IN_PLACE in needs:
        if answer["aliased"] < answer["donated"] or not answer["donated"]:
            problems.append(f"{answer['aliased']} of {answer['donated']} donated arrays are aliased")
        if answer["copies"]:
            problems.append(f"{len(answer['copies'])} copies of a donated array: {answer['copies'][0]}")
    return problems


def scalar_loop(loop: dict[str, int]) -> str:
    """Why an innermost loop, by its instruction classes, loads scalars where it should load vectors; "" if it doesn't.

    Keys and values have two bytes, so a load of two or one is a load by element. A few words are table entries;
    where words are more than vectors (of which there are some, or products to feed), the data come by word.
    """
    if elements := sum(loop.get(kind, 0) for kind in _ELEMENTS):
        return f"loads {elements} single elements in an inner loop"
    words, wide = (sum(loop.get(kind, 0) for kind in kinds) for kinds in (_WORDS, _WIDE))
    if words > wide and any(loop.get(kind) for kind in _TENSOR_CORES):
        return f"loads {words} words and {wide} vectors in an inner loop with products"
    return ""
