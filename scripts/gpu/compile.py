"""Compiles a function for a GPU that isn't there, and gathers what the compilers left behind.

Runs in a process with `GpuCompiler.environment`, and for one GPU only: Mosaic keeps compiled kernels by their source,
so that a second GPU in one process would be given the first one's code.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.gpus import Gpu
from scripts.gpu.machine_code import parse_listing, parse_ptxas
from scripts.gpu.target import placed, target_mesh


@dataclass
class GpuKernel:
    """One Pallas kernel of a compiled program.

    Attributes:
        shared_bytes: of a block, static and dynamic.
        serialised: see `PtxasReport`.
        sass, loops: see `MachineCode`.
        ptx: its file.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    serialised: bool
    sass: dict[str, int]
    loops: list[dict[str, int]]
    ptx: str | None


@dataclass
class CompiledProgram:
    """A program for a GPU.

    Attributes:
        hlo: the optimised program, as text.
        thunks: what the host will have done, a line each, as XLA prints it.
        code_bytes: of its machine code, as XLA counts it.
        kernels: the Pallas kernels among it, if they were asked for.
    """

    lower_s: float
    compile_s: float
    temp_bytes: int
    hlo: str
    thunks: list[str]
    code_bytes: int = 0
    kernels: list[GpuKernel] = field(default_factory=list)


def compile_program(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    donate: tuple[int, ...],
    gpu: Gpu,
    dumps: Path,
    tools: tuple[Path, Path] | None = None,
) -> CompiledProgram:
    """Lowers and compiles the whole program that `jax.jit(function)` is for arguments of these shapes.

    Args:
        dumps: the folder that `GpuCompiler.environment` was given; emptied first.
        tools: ptxas and nvdisasm, to look into its Pallas kernels with; None: they aren't looked into.

    Raises:
        Exception: whatever the compilers raise.
    """
    _empty(dumps)
    mesh = target_mesh(gpu)
    jax.clear_caches()  # a kernel that is lowered already would not be dumped again
    start = time.perf_counter()
    # Mosaic asks the default device for its capability, and without one compiles for 9.0.
    with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
        lowered = jax.jit(function, donate_argnums=donate).lower(*placed(args, mesh))
        middle = time.perf_counter()
        compiled = lowered.compile()
    end = time.perf_counter()
    analysis = compiled.memory_analysis()
    thunks = [
        line
        for path in sorted(dumps.glob("xla/*thunk_sequence.txt"))
        for line in path.read_text().splitlines()
        if line.strip()
    ]
    temp, code = (
        (0, 0) if analysis is None else (int(analysis.temp_size_in_bytes), int(analysis.generated_code_size_in_bytes))
    )
    program = CompiledProgram(middle - start, end - middle, temp, compiled.as_text() or "", thunks, code)
    if tools is not None:
        program.kernels = _kernels(program, gpu, dumps, *tools)
    return program


def _empty(dumps: Path) -> None:
    for name in ("xla", "mosaic"):
        shutil.rmtree(dumps / name, ignore_errors=True)
        (dumps / name).mkdir(parents=True)


def _kernels(program: CompiledProgram, gpu: Gpu, dumps: Path, ptxas: Path, nvdisasm: Path) -> list[GpuKernel]:
    names = pallas_names(program.hlo)
    found = []
    for ptx in sorted(dumps.glob("xla/*.ptx")):
        if not any(_is_one_of(names, entry) for entry in entries(ptx)):
            continue  # of XLA's own making, as most are
        for kernel in _disassembled(ptx, gpu, ptxas, nvdisasm):
            if _is_one_of(names, kernel.name):
                kernel.shared_bytes += thunk_shared_bytes(program.thunks, kernel.name)
                found.append(kernel)
    new = []
    for ptx in sorted(dumps.glob("mosaic/*.ptx"), key=lambda path: int(path.stem.rpartition("_")[2])):
        for kernel in _disassembled(ptx, gpu, ptxas, nvdisasm):
            kernel.shared_bytes += mosaic_shared_bytes(ptx.with_suffix(".mlir-passes.log"))
            new.append(kernel)
    return found + _remembered(program.hlo, new, dumps)


def entries(ptx: Path) -> list[str]:
    """The kernels in a PTX file."""
    return re.findall(r"\.entry (\S+?)\(", ptx.read_text())


def _is_one_of(names: Sequence[str], kernel: str) -> bool:
    """Whether a kernel has one of the names, or one with a number behind it: XLA numbers those that have one name."""
    return kernel in names or re.sub(r"_\d+$", "", kernel) in names


@dataclass
class _Known:
    kernel: GpuKernel
    ptx: str


_KNOWN: dict[str, _Known] = {}


def _remembered(hlo: str, new: list[GpuKernel], dumps: Path) -> list[GpuKernel]:
    """The Mosaic kernels of a program: those just compiled, and those that this process had compiled before.

    Mosaic compiles a kernel once a process, by the hash of its source, and so leaves nothing behind the second time.
    """
    hashes = list(dict.fromkeys(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', hlo)))
    unknown = [each for each in hashes if each not in _KNOWN]
    if len(unknown) != len(new):
        raise RuntimeError(f"{len(new)} Mosaic kernels were dumped, {len(unknown)} are new in the program")
    for each, kernel in zip(unknown, new, strict=True):
        _KNOWN[each] = _Known(kernel, Path(kernel.ptx or "").read_text())
    kernels = []
    for each in hashes:
        known = _KNOWN[each]
        path = dumps / "mosaic" / Path(known.kernel.ptx or "").name
        path.write_text(known.ptx)
        kernels.append(replace(known.kernel, ptx=str(path)))
    return kernels


def _disassembled(ptx: Path, gpu: Gpu, ptxas: Path, nvdisasm: Path) -> list[GpuKernel]:
    if not entries(ptx):
        return []
    cubin = ptx.with_suffix(".cubin")
    command = [str(ptxas), "-v", f"-arch={gpu.arch}", str(ptx), "-o", str(cubin)]
    report = subprocess.run(command, capture_output=True, text=True)
    if report.returncode:
        raise RuntimeError(f"ptxas: {report.stderr[-1000:]}")
    listing = subprocess.run([str(nvdisasm), "-c", str(cubin)], capture_output=True, text=True, check=True)
    codes = parse_listing(listing.stdout)
    return [
        GpuKernel(
            name=name,
            registers=figures.registers,
            spill_bytes=figures.spill_bytes,
            shared_bytes=figures.shared_bytes,
            serialised=figures.serialised,
            sass=codes[name].histogram(),
            loops=list(codes[name].loops()),
            ptx=str(ptx),
        )
        for name, figures in parse_ptxas(report.stderr).items()
    ]


def pallas_names(hlo: str) -> list[str]:
    """Names of the Pallas Triton kernels that a program calls."""
    calls = (line for line in hlo.splitlines() if 'custom_call_target="__gpu$xla.gpu.triton"' in line)
    return [name[1] for line in calls if (name := re.search(r'[ {]name = "([^"]+)"', line))]


def thunk_shared_bytes(thunks: list[str], kernel: str) -> int:
    """Dynamic shared memory that XLA launches a kernel with."""
    sizes = (re.search(rf" {re.escape(kernel)} .*shared_memory: (\d+)", line) for line in thunks)
    return max((int(size[1]) for size in sizes if size), default=0)


def mosaic_shared_bytes(passes_log: Path) -> int:
    """Dynamic shared memory that a Mosaic kernel is launched with, from the log of its compiler."""
    found = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes_log.read_text()) if passes_log.exists() else []
    return max(map(int, found), default=0)


def aliased_arguments(hlo: str) -> set[int]:
    """Flat indices of the arguments whose memory the program's results reuse."""
    header = hlo.partition("\n")[0]
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry_computation", header)
    return {int(index) for index in re.findall(r": \((\d+), \{", aliases[1])} if aliases else set()


def copies_of(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions anywhere in a program that copy an array of this shape, or of as many numbers."""
    size = math.prod(shape)
    copies = []
    for line in hlo.splitlines():
        copy = re.match(r"\s*(?:ROOT )?%?\S+ = \(?\w+\[([\d,]*)\]\S* .*?\b(?:copy|copy-start)\(", line)
        if copy and math.prod(int(n) for n in copy[1].split(",") if n) >= size:
            copies.append(line.strip()[:200])
    return copies
