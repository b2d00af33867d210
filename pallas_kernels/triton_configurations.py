"""What there is to compile of the Triton kernels beside attention."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import triton_backend as triton
from pallas_kernels.configurations import IN_PLACE, WIDE_LOADS, KernelConfiguration
from pallas_kernels.head_norms import HeadNorms
from pallas_kernels.metadata import KVCache

TOKENS = 256
# (query heads, kv heads, head size, blocks, dtype); the second cache has more than 2**31 elements.
SHAPES = (
    (32, 8, 128, 4096, "bfloat16"),
    (32, 8, 128, 2**18, "bfloat16"),
    (14, 2, 64, 4096, "bfloat16"),
    (32, 32, 80, 1024, "float16"),
    (24, 8, 96, 4096, "float16"),
    (8, 4, 256, 4096, "bfloat16"),
    (8, 1, 128, 4096, "bfloat16"),
)

# With norms of the heads, (query heads, kv heads, head size, 1 + weight): as Qwen3-8B, Qwen3-0.6B, Gemma 3 270M.
NORMED = ((32, 8, 128, False), (16, 8, 128, False), (4, 1, 256, True))


def of_write(write_kv_cache: Callable[..., Any]) -> Iterator[KernelConfiguration]:
    for index, (_, kv_heads, head_dim, blocks, dtype) in enumerate(SHAPES):
        k, _, cache, slots = _arguments(1, kv_heads, head_dim, blocks, dtype)
        yield KernelConfiguration(
            kernel="write_kv_cache",
            implementation="triton",
            config=f"h{kv_heads} d{head_dim} {blocks} blocks {dtype}",
            function=partial(write_kv_cache, implementation="triton"),
            args=(k, k, cache, slots),
            donate=(2,),
            capabilities=triton.CAPABILITIES,
            # Fewer elements are less than 16 bytes for each thread of one warp.
            needs=frozenset({IN_PLACE} | ({WIDE_LOADS} if kv_heads * head_dim >= 256 else set())),
            in_ci=index == 0,
        )


def of_rope_and_write(
    rope_and_write_kv_cache: Callable[..., Any], table: Callable[[Any, Any], Any]
) -> Iterator[KernelConfiguration]:
    def write(norms: HeadNorms | None, *args: Any) -> Any:
        return rope_and_write_kv_cache(*args, norms=norms, implementation="triton")

    shapes: list[tuple[Any, ...]] = [(*shape, None) for shape in SHAPES]
    shapes += [(*shape, 4096, "bfloat16", plus_one) for *shape, plus_one in NORMED]
    for heads, kv_heads, head_dim, blocks, dtype, plus_one in shapes:
        k, q, cache, slots = _arguments(heads, kv_heads, head_dim, blocks, dtype)
        half: Any = jax.ShapeDtypeStruct((TOKENS, head_dim // 2), jnp.float32)
        weight: Any = jax.ShapeDtypeStruct((head_dim,), dtype)
        norms = None if plus_one is None else HeadNorms(weight, weight, 1e-6, plus_one)
        name = f"q{heads} h{kv_heads} d{head_dim} {blocks} blocks {dtype}"
        yield KernelConfiguration(
            kernel="rope_and_write_kv_cache",
            implementation="triton",
            config=name if norms is None else f"{name} norms",
            function=write,
            args=(norms, q, k, k, table(half, half), cache, slots),
            donate=(5,),
            capabilities=triton.CAPABILITIES,
            needs=frozenset({WIDE_LOADS, IN_PLACE}),
            in_ci=norms is not None and heads == 32,
        )


def of_slot_mapping(slot_mapping: Callable[..., Any]) -> Iterator[KernelConfiguration]:
    for name, tokens, rows, options in (
        ("64 tokens", 64, 64, {}),
        ("8192 tokens of 1024 rows", 8192, 1024, {}),
        ("two ranks", 2048, 256, {"cp_world_size": 2, "cp_rank": 1, "cp_interleave": 4}),
    ):
        yield KernelConfiguration(
            kernel="slot_mapping",
            implementation="triton",
            config=name,
            function=partial(slot_mapping, block_size=16, implementation="triton", **options),
            args=tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [(rows + 1,), (tokens,), (rows, 512)]),
            capabilities=triton.CAPABILITIES,
            in_ci=not options and rows == 64,
        )


def _arguments(heads: int, kv_heads: int, head_dim: int, blocks: int, dtype: str) -> tuple[Any, Any, KVCache, Any]:
    """(k, q, cache, slots) as shapes."""
    k, q = (jax.ShapeDtypeStruct((TOKENS, count, head_dim), dtype) for count in (kv_heads, heads))
    cache: Any = jax.ShapeDtypeStruct((blocks, 16, kv_heads, head_dim), dtype)
    return k, q, KVCache(cache, cache), jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
