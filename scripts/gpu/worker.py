"""A process that compiles kernel configurations for one GPU.

It reads names of configurations from stdin, a line each, and answers each with a line of JSON on stdout:
{"name", "error"} or {"name", "compile_s", "aliased", "donated", "copies", "kernels": [GpuKernel, ...]}.
A compiler that aborts takes this process along; whoever started it sees which name got no answer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.configurations import KernelConfiguration
from pallas_kernels.gpus import GPUS, Gpu
from scripts.gpu.compile import aliased_arguments, compile_program, copies_of


def compile_configuration(
    configuration: KernelConfiguration, gpu: Gpu, dumps: Path, tools: tuple[Path, Path], kept: str = ""
) -> dict[str, Any]:
    """The answer to one name.

    Args:
        kept: how the paths begin that PTX files are kept under; "": they aren't kept.
    """
    args, donate = configuration.args, configuration.donate
    try:
        program = compile_program(configuration.function, args, donate, gpu, dumps, tools)
    except Exception as error:  # whatever a compiler raises is the answer
        return {"name": configuration.name, "error": f"{type(error).__name__}: {error}"[:4000]}
    for kernel in program.kernels:
        kernel.ptx = shutil.copy(kernel.ptx, f"{kept}-{Path(kernel.ptx).stem}.ptx") if kept and kernel.ptx else None
    leaves, donated, copies = 0, set[int](), []
    for position, arg in enumerate(args):
        arrays = jax.tree.leaves(arg)
        if position in donate:
            donated |= set(range(leaves, leaves + len(arrays)))
            for array in arrays:
                copies += copies_of(program.hlo, array.shape)
        leaves += len(arrays)
    return {
        "name": configuration.name,
        "compile_s": program.lower_s + program.compile_s,
        "donated": len(donated),
        "aliased": len(donated & aliased_arguments(program.hlo)),
        "copies": sorted(set(copies)),
        "kernels": [asdict(kernel) for kernel in program.kernels],
    }


def listed(module: str) -> Iterable[KernelConfiguration]:
    """What `module.configurations()` lists."""
    return importlib.import_module(module).configurations()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, choices=GPUS)
    parser.add_argument("--configurations", required=True, help="module whose configurations() lists them")
    parser.add_argument("--dumps", required=True, type=Path)
    parser.add_argument("--ptxas", required=True, type=Path)
    parser.add_argument("--nvdisasm", required=True, type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the PTX")
    args = parser.parse_args()
    # What compilers print to stdout must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    known = {configuration.name: configuration for configuration in listed(args.configurations)}
    for line in sys.stdin:
        name, tools = line.rstrip("\n"), (args.ptxas, args.nvdisasm)
        kept = str(args.keep / re.sub(r"[^\w.-]+", "_", f"{args.target}-{name}")) if args.keep else ""
        answer = compile_configuration(known[name], GPUS[args.target], args.dumps, tools, kept)
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
