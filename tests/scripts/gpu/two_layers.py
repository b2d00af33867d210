"""Two layers of the published models, compiled for an H200 with each attention: what a step does between them.

A process of its own, with the GPU compiler on its path. It prints a line of JSON for each pair of a model and an
implementation.

Usage: python -m tests.scripts.gpu.two_layers FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax

from models import ModelConfig
from pallas_kernels import choose_attention
from pallas_kernels.gpus import GPUS
from scripts.gpu.compile import aliased_arguments, compile_program, copies_of
from scripts.gpu.launches import launches
from scripts.gpu.published import PUBLISHED
from scripts.gpu.step_programs import StepSize, step_programs, with_layers
from scripts.gpu.target import target_mesh

MODELS = ("llama-3.1-8b", "qwen3-8b")
IMPLEMENTATIONS = ("mosaic_sm90", "triton")
FIRST_OF_A_LAYER = "_rope_and_write_kv_cache"  # to count from; each layer has it once


def figures(model: str, implementation: str, dumps: Path) -> dict[str, Any]:
    # With fewer tokens XLA, which can't try products here, divides some of them in two: a launch more for each.
    gpu, size = GPUS["h200"], StepSize(256, 256, max_model_len=1024)
    # A layer is the same whatever the vocabulary, which takes longer to compile.
    config = with_layers(ModelConfig.from_hf(PUBLISHED[model] | {"vocab_size": 1024}), 2)
    with jax.set_mesh(target_mesh(gpu)):
        chosen, _ = choose_attention(config.attention_layers(), 16, "bfloat16", "gpu", requested=implementation)
        forward, _ = step_programs(config, chosen, size)
    program = compile_program(forward.function, forward.args, forward.donate, gpu, dumps)
    names = [name for _, name in launches(program.thunks)]
    begins = [i for i, name in enumerate(names) if name.startswith(FIRST_OF_A_LAYER)]
    params, caches, *_ = forward.args
    before, leaves = len(jax.tree.leaves(params)), jax.tree.leaves(caches)
    return {
        "model": model,
        "implementation": implementation,
        "layers": len(begins),
        "between": names[begins[0] : begins[-1]],
        "copies": [copy for shape in {leaf.shape for leaf in leaves} for copy in copies_of(program.hlo, shape)],
        "aliased": len(aliased_arguments(program.hlo) & set(range(before, before + len(leaves)))),
        "caches": len(leaves),
    }


if __name__ == "__main__":
    for model in MODELS:
        for implementation in IMPLEMENTATIONS:
            print(json.dumps(figures(model, implementation, Path(sys.argv[1]))), flush=True)
