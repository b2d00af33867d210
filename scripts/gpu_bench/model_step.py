"""The step of a model with random weights: its time beside what memory allows, and whether it is one graph launch."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.kv_cache.allocate import bytes_per_block
from jaxrunner.shapes import StepLayout, StepShapes
from models import ModelConfig
from pallas_kernels import choose_attention
from scripts.gpu.published import PUBLISHED
from scripts.gpu.step_programs import StepSize, step_programs, with_layers
from scripts.gpu_bench.timing import seconds_of


def decode_buffer(layout: StepLayout, rows: int, context: int) -> np.ndarray:
    """The upload of a step that decodes one token for each of `rows` requests, each its `context`-th."""
    buffer = np.zeros(layout.size, np.int32)

    def put(name: str, values: Any) -> None:
        at, length = layout.fields[name]
        buffer[at : at + length] = values

    index = np.arange(rows)
    put("num_reqs", rows)
    put("num_tokens", rows)
    put("num_logits", rows)
    put("query_start_loc", np.arange(rows + 1))
    put("idx_mapping", index)
    put("num_computed", context - 1)
    put("num_known", context)
    put("num_prompt", 1)
    put("use_device", 1)
    put("logits_indices", index)
    put("update_cell", np.iinfo(np.int32).max)
    return buffer


def decode_step(
    tiny: bool, attention: str, ceilings: dict[str, float], most_bytes: float, seconds_left: float
) -> Iterator[dict[str, Any]]:
    """Rows: the step as it is, and with command buffers turned off."""
    name = "tiny" if tiny else "llama-3.1-8b"
    rows, context, block = (4, 16, 4) if tiny else (64, 2048, 16)
    dtype = "float32" if tiny else "bfloat16"
    config = ModelConfig.from_hf(PUBLISHED[name])
    per_request = -(-context // block)
    blocks = 1 + rows * per_request
    whole = config.num_layers
    config = with_layers(config, _layers_that_fit(config, blocks, block, dtype, most_bytes))
    layers = config.attention_layers()
    implementation, _ = choose_attention(layers, block, dtype, jax.default_backend(), attention)
    size = StepSize(rows, rows, blocks, block, context)
    forward, head = step_programs(config, implementation, size, dtype)
    params = _random(forward.args[0])
    caches = _random(forward.args[1])
    state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), forward.args[2])
    table = np.zeros((rows + 1, per_request), np.int32)
    table[:rows] = 1 + np.arange(rows * per_request).reshape(rows, per_request)
    layout = StepShapes(rows, rows, min_block_size=block, token_buckets=(rows,)).layouts[rows]
    buffer = decode_buffer(layout, rows, context)
    weight_bytes = sum(p.nbytes for p in params) - (
        0 if config.tie_word_embeddings else params_of_embedding(config, dtype)
    )
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(caches)) * rows * per_request / blocks
    row: dict[str, Any] = {
        "model": name,
        "layers": f"{config.num_layers} of {whole}",
        "requests": rows,
        "context": context,
        "implementation": implementation.name,
        "least_bytes": int(weight_bytes + cache_bytes),
    }
    variants: dict[str, dict[str, Any]] = {"as it is": {}}
    if jax.default_backend() == "gpu":
        variants["without command buffers"] = {"xla_gpu_enable_command_buffer": ""}
    for variant, options in variants.items():
        with tempfile.TemporaryDirectory(prefix="bench_gpu.") as dumps:
            dump = {"xla_dump_to": dumps, "xla_dump_hlo_as_text": True}
            compiled = [
                jax.jit(p.function, donate_argnums=p.donate).lower(*p.args).compile(compiler_options=dump | options)
                for p in (forward, head)
            ]
            graphs = captured(Path(dumps))
        held = [caches, replace(state, block_tables=(jnp.asarray(table),))]

        def step(compiled: Any = compiled, held: Any = held) -> Any:
            hidden, head_inputs, held[0], held[1], *_ = compiled[0](params, held[0], held[1], buffer)
            sampled, held[1], *_ = compiled[1](params, held[1], hidden, head_inputs)
            return sampled

        seconds = seconds_of(step, for_seconds=min(3.0, seconds_left / 4))
        caches = held[0]
        rates: dict[str, Any] = {
            "seconds": seconds,
            "tokens_per_s": rows / seconds,
            "bytes_per_s": row["least_bytes"] / seconds,
        }
        if read := ceilings.get("memory read"):
            rates["of_memory_read"] = rates["bytes_per_s"] / read
        yield row | {"variant": variant, "command_buffers": graphs} | rates


def captured(dumps: Path) -> dict[str, int] | None:
    """Of the programs dumped there: graph launches, and launches outside of any; None if XLA tells nothing."""
    files = list(dumps.glob("*thunk_sequence_after_thunk_passes*"))
    if not files:
        return None
    kinds = re.findall(r"^\s*\d+:\s+(k\w+)", "\n".join(f.read_text() for f in files), re.MULTILINE)
    graphs = kinds.count("kCommandBuffer")
    return {"graphs": graphs, "thunks": len(kinds)}


def params_of_embedding(config: ModelConfig, dtype: str) -> int:
    """Bytes of the token embeddings: of them a step reads a row a token, not all."""
    return config.vocab_size * config.hidden_size * jnp.dtype(dtype).itemsize


def _layers_that_fit(config: ModelConfig, blocks: int, block: int, dtype: str, most_bytes: float) -> int:
    """All layers, or as many as leave room for weights and caches."""
    one, two = (with_layers(config, n).num_parameters * jnp.dtype(dtype).itemsize for n in (1, 2))
    cache = bytes_per_block(config.attention_layers()[:1], block, jnp.dtype(dtype)) * blocks
    fixed, each = one - (two - one), (two - one) + cache
    return int(max(1, min(config.num_layers, (most_bytes - fixed) // each)))


def _random(tree: Any) -> Any:
    """Small random numbers of these shapes; one program per distinct shape."""

    def make(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.jit(lambda key: (jax.random.normal(key, shape, jnp.bfloat16) * 0.02).astype(dtype))

    made: dict[Any, Any] = {}
    leaves, treedef = jax.tree.flatten(tree)
    arrays = []
    for n, leaf in enumerate(leaves):
        kind = (leaf.shape, leaf.dtype)
        made.setdefault(kind, make(*kind))
        arrays.append(made[kind](jax.random.key(n)))
    return jax.tree.unflatten(treedef, arrays)
