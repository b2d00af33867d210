"""What a model's forwards need at several sizes: each compiled whole for a GPU that isn't there, from shapes alone.

Started by scripts/sweep_buckets.py in a process that has the GPU compiler on its path.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.gpu.compiler import CompilerUnavailable, GpuCompiler


def forward_needs(
    compiler: GpuCompiler, config: str, target: str, sizes: Sequence[int], max_num_seqs: int
) -> dict[str, list[Any]]:
    """{"compile_s", "temp_bytes", "code_bytes"}, of the forward at each size.

    Args:
        config: of ``scripts.gpu.published``.
        target: of ``pallas_kernels.gpus``.
        sizes: padded tokens.

    Raises:
        CompilerUnavailable: it failed; says how.
    """
    with tempfile.TemporaryDirectory(prefix="forward_needs.") as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "scripts.gpu.forward_needs", config, target, ",".join(map(str, sizes))]
        command += [str(max_num_seqs), folder, str(result)]
        done = subprocess.run(command, env=compiler.environment(Path(folder)), capture_output=True, text=True)
        if not result.exists():
            last = (done.stderr.strip() or f"it ended with {done.returncode}").splitlines()[-1]
            raise CompilerUnavailable(f"the GPU compiler failed: {last[:500]}")
        needs: dict[str, list[Any]] = json.loads(result.read_text())
        return needs


def compile_forwards(config_name: str, target: str, sizes: Sequence[int], max_num_seqs: int, dumps: Path) -> Any:
    """``forward_needs``, in the process that compiles."""
    import jax

    from models import ModelConfig
    from pallas_kernels import choose_attention
    from pallas_kernels.gpus import GPUS
    from scripts.gpu.compile import compile_program
    from scripts.gpu.published import PUBLISHED
    from scripts.gpu.step_programs import StepSize, step_programs
    from scripts.gpu.target import target_mesh

    config, gpu = ModelConfig.from_hf(PUBLISHED[config_name]), GPUS[target]
    needs: dict[str, list[Any]] = {"compile_s": [], "temp_bytes": [], "code_bytes": []}
    for size in sizes:
        with jax.set_mesh(target_mesh(gpu)):
            attention, _ = choose_attention(config.attention_layers(), 16, "bfloat16", "gpu")
            forward, _ = step_programs(config, attention, StepSize(size, min(size, max_num_seqs)))
        program = compile_program(forward.function, forward.args, forward.donate, gpu, dumps)
        needs["compile_s"].append(program.lower_s + program.compile_s)
        needs["temp_bytes"].append(program.temp_bytes)
        needs["code_bytes"].append(program.code_bytes)
    return needs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("config", "target", "sizes", "max_num_seqs", "dumps", "result"):
        parser.add_argument(name)
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    needs = compile_forwards(args.config, args.target, sizes, int(args.max_num_seqs), Path(args.dumps))
    Path(args.result).write_text(json.dumps(needs))


if __name__ == "__main__":
    main()
