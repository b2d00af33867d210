"""What there is to compile of an attention on GPUs: each fact of a layer and a step varied from a common middle."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.configurations import KernelConfiguration
from pallas_kernels.implementation import AttentionImplementation, AttentionLayer, GroupSpec
from pallas_kernels.metadata import CommonAttentionMetadata, KVCache

# (tokens, rows) of a step: one token a row, and rows of many.
STEPS = {"decode": (64, 64), "mixed": (2048, 64)}
MIDDLE: dict[str, Any] = {"d": 128, "g": 4, "b": 16, "dtype": "bfloat16"}
FEATURES: tuple[dict[str, Any], ...] = (
    {"dtype": "float16"},
    {"window": 1024},
    {"soft_cap": 50.0},
    {"sinks": True},
    {"blocks": 2**20},  # a cache past 2**32 bytes
    {"d": 64, "g": 7},  # as Qwen2.5-0.5B's: a token's queries are no whole number of rows of 128
    {"d": 256, "g": 2, "window": 512, "soft_cap": 50.0},  # as Gemma 2's and 3's
    {"d": 64, "g": 8, "window": 128, "sinks": True},  # as GPT-OSS's
    {"d": 256, "g": 8, "b": 64, "window": 512, "soft_cap": 50.0, "sinks": True, "dtype": "float16"},
)
IN_CI: tuple[dict[str, Any], ...] = ({}, {"d": 64, "g": 8, "window": 128, "sinks": True})


def attention_configurations(
    implementation: AttentionImplementation,
    *,
    head_dims: Sequence[int],
    groups: Sequence[int],
    block_sizes: Sequence[int],
    capabilities: tuple[Any, ...],
    needs: frozenset[str],
) -> Iterator[KernelConfiguration]:
    """Decode and mixed steps over all that an implementation takes.

    Args:
        head_dims, groups, block_sizes: D, H / Hkv and B that it takes.
        capabilities: of the GPUs that it is for.
        needs: what the compiled program must show.
    """
    sizes = (("d", head_dims), ("g", groups), ("b", block_sizes))
    varied: list[dict[str, Any]] = [{}, *({key: n} for key, ns in sizes for n in ns), *FEATURES]
    for step, (tokens, rows) in STEPS.items():
        for change in varied:
            facts = MIDDLE | change
            if change and facts == MIDDLE:
                continue  # the middle itself comes first
            options = [key for key in ("window", "soft_cap", "sinks", "blocks") if key in facts]
            name = f"{step} d{facts['d']} g{facts['g']} b{facts['b']} {facts['dtype']}"
            yield KernelConfiguration(
                kernel="paged_attention",
                implementation=implementation.name,
                config=" ".join([name, *("large cache" if key == "blocks" else key for key in options)]),
                function=partial(_attend, implementation, _layer(facts)),
                args=_arguments(facts, tokens, rows),
                capabilities=capabilities,
                needs=needs,
                in_ci=change in IN_CI,
            )


def _layer(facts: dict[str, Any]) -> AttentionLayer:
    kv_heads, head_dim = max(8 // facts["g"], 1), facts["d"]
    heads = facts["g"] * kv_heads
    return AttentionLayer("", heads, kv_heads, head_dim, head_dim**-0.5, facts.get("window"), facts.get("soft_cap"))


def _arguments(facts: dict[str, Any], tokens: int, rows: int) -> tuple[Any, ...]:
    layer, block_size = _layer(facts), facts["b"]
    blocks = facts.get("blocks", -(-(2**16) // block_size))
    q = jax.ShapeDtypeStruct((tokens, layer.num_heads, layer.head_dim), facts["dtype"])
    cache: Any = jax.ShapeDtypeStruct((blocks, block_size, layer.num_kv_heads, layer.head_dim), facts["dtype"])
    of_step = [(rows + 1,), (rows,), (tokens,), (rows, max(4096 // block_size, 1)), (tokens,)]
    ints = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in of_step)
    sinks = (jax.ShapeDtypeStruct((layer.num_heads,), jnp.float32),) if facts.get("sinks") else ()
    return q, KVCache(cache, cache), ints, *sinks


def _attend(
    implementation: AttentionImplementation,
    layer: AttentionLayer,
    q: Array,
    cache: KVCache,
    of_step: tuple[Array, ...],
    sinks: Array | None = None,
) -> Array:
    """The kernels alone, and no division of the work: that is plain JAX, and would take most of the compilers' time."""
    block_size = cache.k.shape[1]

    def build(of_step: tuple[Array, ...]) -> Any:
        common = CommonAttentionMetadata.make(*of_step, block_size=block_size)
        return implementation.build(common, GroupSpec(block_size, (layer,)))

    shapes = jax.eval_shape(build, of_step)
    built = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return implementation.attend(q, cache, built, layer, sinks)
