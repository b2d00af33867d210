"""The cache write as Triton kernels: by itself, and with norms and rotation of queries and keys in the same pass.

A token's key and value are Hkv * D elements each, and the write moves them once in and once out: 4 * Hkv * D * e bytes
a token with elements of e bytes, 8 KiB for 8 heads of 128 in bfloat16, which an H200 does in 1.7 ns. The rotation
besides reads and writes the queries, 2 * H * D * e bytes, and in each program of a token D * 4 bytes of cosines and
sines. All go in vectors of 16 bytes where heads are multiples of 8 elements (halves of heads, for the rotation). Below
a thousand tokens what counts is that it is one launch: rotating in plain JAX takes three more, norms of the heads as
many again, and each of them reads and writes queries and keys once more.

Block and offset of a slot are separate indices, whose products with the strides are made in 64 bits for a cache past
2**32 bytes.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from pallas_kernels import triton_backend as triton
from pallas_kernels.head_norms import HeadNorms
from pallas_kernels.metadata import KVCache

HEADS_PER_PROGRAM = 8  # of queries; 16 take registers that heads of 96 don't leave


def write(
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    cache: KVCache,
    slot_mapping: Int32[Array, "T"],
    interpret: bool = False,
) -> KVCache:
    """One program per token."""
    num_tokens = slot_mapping.shape[0]
    out = triton.call(
        _write_kv_cache,
        [slot_mapping, k, v, *cache],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache],
        grid=(num_tokens,),
        num_warps=_num_warps(*k.shape[1:]),
        num_stages=1,
        aliases={3: 0, 4: 1},
        interpret=interpret,
    )
    return KVCache(*out)


def rotate_and_write(
    q: Float[Array, "T H D"],
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    cos: Float32[Array, "T half_D"],
    sin: Float32[Array, "T half_D"],
    cache: KVCache,
    slot_mapping: Int32[Array, "T"],
    norms: HeadNorms | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T H D"], KVCache]:
    """Programs of a token: its query heads, some at a time, and its key and value."""
    num_tokens, num_heads, _ = q.shape
    # Where the three are slices of one product, as in a model, XLA takes the product itself for this.
    qkv = jnp.concatenate([q, k, v], axis=1)
    parts = -(-num_heads // HEADS_PER_PROGRAM)
    weights = [] if norms is None else [norms.q, norms.k]
    norm = None if norms is None else _Norm(norms.eps, norms.plus_one)
    rotated, *out = triton.call(
        partial(_rope_and_write_kv_cache, num_heads=num_heads, norm=norm),
        [slot_mapping, qkv, cos, sin, *cache, *weights],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *cache)],
        grid=(parts + 1, num_tokens),
        num_warps=_num_warps(k.shape[1], k.shape[2] // 2),
        num_stages=1,
        aliases={4: 1, 5: 2},
        interpret=interpret,
    )
    return rotated, KVCache(*out)


class _Norm(NamedTuple):
    """Of query and key heads, as `HeadNorms` without its arrays."""

    eps: float
    plus_one: bool


def _num_warps(num_heads: int, size: int) -> int:
    """As many as have 8 elements, 16 bytes, for each of their threads, but 1 to 4."""
    elements = triton.next_power_of_two(num_heads) * triton.next_power_of_two(size)
    return min(max(elements // (8 * 32), 1), 4)


def _write_kv_cache(slot_ref: Any, k_ref: Any, v_ref: Any, _k: Any, _v: Any, k_cache: Any, v_cache: Any) -> None:
    token = triton.program_id(0)
    place = _place(slot_ref, token, k_cache)

    @triton.when(place[0] >= 0)
    def _() -> None:
        head, dim, there = _heads_of(k_cache.shape[2], k_cache.shape[3])
        for source, target in ((k_ref, k_cache), (v_ref, v_cache)):
            new = triton.load(source.at[token, head, dim], mask=there, other=0.0)
            triton.store(target.at[*place, head, dim], new.astype(target.dtype), mask=there)


def _rope_and_write_kv_cache(
    slot_ref: Any,
    qkv_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    _k: Any,
    _v: Any,
    *refs: Any,
    num_heads: int,
    norm: _Norm | None,
) -> None:
    *weights, q_out, k_cache, v_cache = refs
    part, token = triton.program_id(0), triton.program_id(1)
    num_kv_heads, head_dim = k_cache.shape[2:]
    half = head_dim // 2

    def rotated(first_head: Int32[Array, ""] | int, count: int, limit: int, what: int) -> tuple[Any, ...]:
        """(head, dimension, which are there, first halves, second halves) of heads from first_head, below limit.

        They are normalised first by what'th weights, queries' or keys'.
        """
        head, dim, there = _heads_of(count, half)
        head = head + first_head
        there = there & (head < limit)
        halves = [
            triton.load(qkv_ref.at[token, head, dim + shift], mask=there, other=0.0).astype(jnp.float32)
            for shift in (0, half)
        ]
        if norm is not None:
            square = sum(jnp.sum(x * x, axis=1, keepdims=True) for x in halves)
            scale = jax.lax.rsqrt(square / head_dim + norm.eps)
            for i, shift in enumerate((0, half)):
                weight = triton.load(weights[what].at[dim + shift], mask=dim < half, other=0.0).astype(jnp.float32)
                normed = halves[i] * scale * (1 + weight if norm.plus_one else weight)
                # Rounded as the norm of plain JAX is.
                halves[i] = normed.astype(qkv_ref.dtype).astype(jnp.float32)
        cos, sin = (triton.load(ref.at[token, dim], mask=dim < half, other=0.0) for ref in (cos_ref, sin_ref))
        first, second = halves
        return head, dim, there, first * cos - second * sin, second * cos + first * sin

    @triton.when(part * HEADS_PER_PROGRAM < num_heads)
    def _() -> None:
        count = min(HEADS_PER_PROGRAM, num_heads)
        head, dim, there, first, second = rotated(part * HEADS_PER_PROGRAM, count, num_heads, 0)
        triton.store(q_out.at[token, head, dim], first.astype(q_out.dtype), mask=there)
        triton.store(q_out.at[token, head, dim + half], second.astype(q_out.dtype), mask=there)

    @triton.when(part * HEADS_PER_PROGRAM >= num_heads)
    def _() -> None:
        place = _place(slot_ref, token, k_cache)

        @triton.when(place[0] >= 0)
        def _() -> None:
            head, dim, there, *halves = rotated(num_heads, num_kv_heads, num_heads + num_kv_heads, 1)
            # Rounded as the rotated keys of plain JAX are, before they become the cache's.
            first, second = (x.astype(qkv_ref.dtype).astype(k_cache.dtype) for x in halves)
            triton.store(k_cache.at[*place, head - num_heads, dim], first, mask=there)
            triton.store(k_cache.at[*place, head - num_heads, dim + half], second, mask=there)
            head, dim, there = _heads_of(num_kv_heads, head_dim)
            new = triton.load(qkv_ref.at[token, head + num_heads + num_kv_heads, dim], mask=there, other=0.0)
            triton.store(v_cache.at[*place, head, dim], new.astype(v_cache.dtype), mask=there)


def _place(slot_ref: Any, token: Int32[Array, ""], cache: Any) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """(block, offset) of a token's slot; a negative block if it has none."""
    num_blocks, block_size = cache.shape[:2]
    slot = slot_ref[token]
    block = jnp.where((slot >= 0) & (slot < num_blocks * block_size), slot // block_size, -1)
    return block, slot % block_size


def _heads_of(num_heads: int, size: int) -> tuple[Int32[Array, "heads 1"], Int32[Array, "1 size"], Any]:
    """(head, dimension, which of their pairs are there), each padded to a power of two."""
    head = jnp.arange(triton.next_power_of_two(num_heads), dtype=jnp.int32)[:, None]
    dim = jnp.arange(triton.next_power_of_two(size), dtype=jnp.int32)[None, :]
    return head, dim, (head < num_heads) & (dim < size)
