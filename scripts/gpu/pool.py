"""Compiling many configurations at once, in processes of one GPU each."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.configurations import KernelConfiguration
from scripts.gpu.compiler import GpuCompiler

CHUNK = 16  # configurations a process compiles: starting one takes as long as compiling one or two


@dataclass(frozen=True)
class Job:
    """One configuration for one GPU."""

    configuration: KernelConfiguration
    target: str


def compile_all(
    jobs: Sequence[Job], compiler: GpuCompiler, module: str, processes: int, folder: Path, keep: Path | None = None
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Each job with its answer (see `worker`), as they are ready.

    A compiler that aborts its process gives that job an error as its answer; the jobs after it get a new process.

    Args:
        module: where the processes find the configurations again, by name.
        folder: for what the compilers leave behind.
        keep: where the PTX goes; None: nowhere.
    """
    command = [sys.executable, "-m", "scripts.gpu.worker", "--configurations", module]
    command += ["--ptxas", str(compiler.ptxas), "--nvdisasm", str(compiler.nvdisasm)]
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        command += ["--keep", str(keep.resolve())]
    todo: queue.SimpleQueue[list[Job]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Job, dict[str, Any]] | BaseException] = queue.SimpleQueue()
    for chunk in _chunks(jobs, processes):
        todo.put(chunk)
    stopping = threading.Event()

    def run(number: int) -> None:
        try:
            while not stopping.is_set():
                try:
                    chunk = todo.get_nowait()
                except queue.Empty:
                    return
                _run_chunk(chunk, command, compiler, folder / str(number), done, todo, stopping)
        except BaseException as error:  # a mistake here must not leave the caller waiting
            done.put(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(processes)]
    for thread in threads:
        thread.start()
    try:
        for _ in jobs:
            item = done.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def _chunks(jobs: Sequence[Job], processes: int) -> Iterator[list[Job]]:
    size = max(1, min(CHUNK, -(-len(jobs) // processes)))
    for target in dict.fromkeys(job.target for job in jobs):
        mine = [job for job in jobs if job.target == target]
        for start in range(0, len(mine), size):
            yield mine[start : start + size]


def _run_chunk(
    chunk: list[Job],
    command: list[str],
    compiler: GpuCompiler,
    folder: Path,
    done: queue.SimpleQueue[Any],
    todo: queue.SimpleQueue[list[Job]],
    stopping: threading.Event,
) -> None:
    command = [*command, "--target", chunk[0].target, "--dumps", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    errors = folder / "errors.txt"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=compiler.environment(folder),
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        for index, job in enumerate(chunk):
            if stopping.is_set():
                return
            try:
                process.stdin.write(job.configuration.name + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if not answer:
                said = errors.read_text(errors="replace").strip()[-600:]
                done.put((job, {"error": f"the compiler's process ended with {process.wait()}: {said}"}))
                if chunk[index + 1 :]:
                    todo.put(chunk[index + 1 :])
                return
            done.put((job, json.loads(answer)))
    finally:
        process.stdin.close()
        if stopping.is_set():
            process.kill()
        process.wait()
        process.stdout.close()
