"""The Triton kernels of paged attention: one program per unit of work and kv head, and the merge of split tiles.

What a unit moves, with G query heads to a kv head, D the head size, e bytes an element and n keys: n * 2 * D * e bytes
of the cache, each key and value once; rows * D * e of queries; as much of output, or rows * (D + 1) * 4 of a partial
result. What it computes: 4 * rows * D * n operations in the matrix products, of which 4 * tokens * G * D * n count, and
rows * n exponentials. So a decode (16 rows) does 16 operations for a byte of a bfloat16 cache, where an H200 does 206
in the time that it reads one: it is bound by reading. A large tile of 128 rows does 128, and reads from the L2 cache
what other tiles of the request read just now: it is bound by products.

Each key's block is looked up in the block table by the key's position, so a block may be smaller or larger than a
program's run of keys. Keys that some query of the tile doesn't see (the last ones, by causality, and the first ones,
by a window) go through a loop with masks; the others through one without. Masks apply to the loads themselves: what
lies in the cache there is not the request's, and 0 * NaN is NaN.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32

from pallas_kernels import triton_backend as triton
from pallas_kernels.implementation import AttentionLayer
from pallas_kernels.metadata import KVCache
from pallas_kernels.paged_attention.triton_work import (
    END,
    KEYS,
    LENGTH,
    MERGE_COUNT,
    MERGE_LENGTH,
    MERGE_SLOT,
    MERGE_TOKEN,
    POSITION,
    ROW,
    SLOT,
    START,
    TOKEN,
    Tiling,
    Work,
)

LOG2_E = math.log2(math.e)
# The maximum of no scores. Finite, so that differences of maxima are never inf - inf; scores that don't count are -inf.
NOTHING = -1e30
SLOTS_AT_A_TIME = 16  # partial results that a merge reads together


@dataclass(frozen=True)
class Program:
    """What is static in a kernel: the layer, the tilings, how a unit's loops are compiled."""

    layer: AttentionLayer
    small: Tiling
    large: Tiling
    num_warps: int
    num_stages: int
    causal: bool
    interpret: bool


def attend(
    program: Program,
    q: Float[Array, "T H D"],
    cache: KVCache,
    block_table: Int32[Array, "R W"],
    work: Work,
    sinks: Float[Array, "H"] | None,
) -> Float[Array, "T H D"]:
    """All units, then the merge of those tiles that were split."""
    layer = program.layer
    args = [work.units, block_table, q, *cache, *([] if sinks is None else [sinks.astype(jnp.float32)])]
    rows = program.small.rows // (layer.num_heads // layer.num_kv_heads) * (layer.num_heads // layer.num_kv_heads)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    partial_out = jax.ShapeDtypeStruct((work.num_slots, layer.num_kv_heads, rows, layer.head_dim), jnp.float32)
    partial_lse = jax.ShapeDtypeStruct((work.num_slots, layer.num_kv_heads, rows), jnp.float32)
    may_split = work.num_slots > 0
    kernel = partial(_paged_attention, program=program, num_large=work.num_large, has_sinks=sinks is not None)
    results = triton.call(
        kernel,
        args,
        [out, partial_out, partial_lse] if may_split else [out],
        grid=(layer.num_kv_heads, work.units.shape[0]),
        num_warps=program.num_warps,
        num_stages=program.num_stages,
        interpret=program.interpret,
    )
    if not may_split:
        return results[0]
    out, partial_out, partial_lse = results
    return triton.call(
        partial(_merge_paged_attention, program=program),
        [work.merges, partial_out, partial_lse, out],
        jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid=(layer.num_heads, work.merges.shape[0]),
        num_warps=4,
        num_stages=1,
        aliases={3: 0},
        interpret=program.interpret,
    )


def _paged_attention(*refs: Any, program: Program, num_large: int, has_sinks: bool) -> None:
    units_ref, table_ref, q_ref, k_ref, v_ref, *rest = refs
    sink_ref, rest = (rest[0], rest[1:]) if has_sinks else (None, rest)
    kv_head, index = triton.program_id(0), triton.program_id(1)
    attend_with = partial(_attend_unit, program, table_ref, q_ref, k_ref, v_ref, sink_ref, rest, units_ref, index)

    if num_large > 0:

        @triton.when(index < num_large)
        def _() -> None:
            attend_with(kv_head, program.large, may_split=False)

        @triton.when(index >= num_large)
        def _() -> None:
            attend_with(kv_head, program.small, may_split=len(rest) > 1)

    else:
        attend_with(kv_head, program.small, may_split=len(rest) > 1)


def _attend_unit(
    program: Program,
    table_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    sink_ref: Any,
    out_refs: Any,
    units_ref: Any,
    index: Int32[Array, ""],
    kv_head: Int32[Array, ""],
    tiling: Tiling,
    *,
    may_split: bool,
) -> None:
    unit = partial(_scalar, units_ref, index)
    length = unit(LENGTH)

    @triton.when(length > 0)
    def _() -> None:
        layer = program.layer
        group = layer.num_heads // layer.num_kv_heads
        start, end, num_keys, position = unit(START), unit(END), unit(KEYS), unit(POSITION)
        row = jnp.arange(tiling.rows, dtype=jnp.int32)
        used = row < length * group
        token = unit(TOKEN) + row // group
        head = kv_head * group + row % group
        dim = jnp.arange(triton.next_power_of_two(layer.head_dim), dtype=jnp.int32)
        place = token[:, None], head[:, None], dim[None, :]
        in_tile = used[:, None] & (dim < layer.head_dim)[None, :]
        q = triton.load(q_ref.at[place], mask=in_tile, other=0.0)

        first_block = jnp.int32(0)
        if layer.window is not None:
            first_block = jnp.maximum(position - (layer.window - 1), 0) // tiling.keys
        top, total = jnp.full((tiling.rows,), NOTHING, jnp.float32), jnp.zeros((tiling.rows,), jnp.float32)
        if sink_ref is not None:
            # A sink is a key that every query sees, with a value of 0. It comes with the first keys.
            sink = triton.load(sink_ref.at[head], mask=used, other=0.0) * LOG2_E
            with_sink = start == first_block
            top, total = jnp.where(with_sink, sink, top), jnp.where(with_sink, 1.0, total)
        state = (jnp.zeros((tiling.rows, dim.shape[0]), jnp.float32), top, total)

        step = partial(
            _attend_keys,
            program,
            tiling,
            (table_ref, unit(ROW)),
            (k_ref, v_ref),
            q=q,
            kv_head=kv_head,
            query_position=position + row // group,
            num_keys=num_keys,
            lowest_key=jnp.int32(0) if layer.window is None else position - (layer.window - 1),
        )
        # Blocks of keys that every query of the tile sees to the last.
        seen_start, seen_end = start, (position + 1 if program.causal else num_keys) // tiling.keys
        if layer.window is not None:
            seen_start = (position + length - layer.window + tiling.keys - 1) // tiling.keys
        seen_start = jnp.clip(seen_start, start, end)
        seen_end = jnp.clip(seen_end, seen_start, end)
        before = seen_start - start
        state = lax.fori_loop(seen_start, seen_end, partial(step, masked=False), state)

        def masked(i: Int32[Array, ""], state: Any) -> Any:
            return step(jnp.where(i < before, start + i, seen_end + i - before), state, masked=True)

        acc, top, total = lax.fori_loop(0, before + end - seen_end, masked, state)
        result = acc / jnp.maximum(total, 1e-30)[:, None]
        slot = unit(SLOT)

        @triton.when(slot < 0)
        def _() -> None:
            triton.store(out_refs[0].at[place], result.astype(out_refs[0].dtype), mask=in_tile)

        if may_split:
            _, partial_out, partial_lse = out_refs

            @triton.when(slot >= 0)
            def _() -> None:
                triton.store(partial_out.at[slot, kv_head, row[:, None], dim[None, :]], result, mask=in_tile)
                triton.store(partial_lse.at[slot, kv_head, row], top + jnp.log2(total), mask=used)


def _attend_keys(
    program: Program,
    tiling: Tiling,
    table: tuple[Any, Int32[Array, ""]],
    cache_refs: tuple[Any, Any],
    block: Int32[Array, ""],
    state: tuple[Float32[Array, "rows D"], Float32[Array, "rows"], Float32[Array, "rows"]],
    *,
    q: Float[Array, "rows D"],
    kv_head: Int32[Array, ""],
    query_position: Int32[Array, "rows"],
    num_keys: Int32[Array, ""],
    lowest_key: Int32[Array, ""],
    masked: bool,
) -> tuple[Float32[Array, "rows D"], Float32[Array, "rows"], Float32[Array, "rows"]]:
    """The softmax state (weighted values, maximum, sum of weights; exponents to base 2) with one block of keys more."""
    layer = program.layer
    acc, top, total = state
    key = block * tiling.keys + jnp.arange(tiling.keys, dtype=jnp.int32)
    in_range: Bool[Array, "keys"] | None = None
    if masked:
        in_range = key < num_keys
        if layer.window is not None:
            in_range &= key >= lowest_key
    keys, values = _read_keys(layer, tiling, table, cache_refs, block, key, in_range, kv_head)

    s = triton.dot(q, keys.T)
    if layer.soft_cap is None:
        to_exponent = layer.scale * LOG2_E
    else:
        s = triton.tanh(s * (layer.scale / layer.soft_cap), program.interpret)
        to_exponent = layer.soft_cap * LOG2_E
    if in_range is not None:
        seen = jnp.broadcast_to(in_range[None, :], s.shape)
        if program.causal:
            seen &= key[None, :] <= query_position[:, None]
        if layer.window is not None:
            seen &= key[None, :] > query_position[:, None] - layer.window
        s = jnp.where(seen, s, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(s, axis=1) * to_exponent)
    shrink = triton.exp2(top - new_top, program.interpret)
    weights = triton.exp2(s * to_exponent - new_top[:, None], program.interpret)
    total = total * shrink + jnp.sum(weights, axis=1)
    acc = acc * shrink[:, None] + triton.dot(weights.astype(values.dtype), values)
    return acc, new_top, total


def _read_keys(
    layer: AttentionLayer,
    tiling: Tiling,
    table: tuple[Any, Int32[Array, ""]],
    cache_refs: tuple[Any, Any],
    block: Int32[Array, ""],
    key: Int32[Array, "keys"],
    in_range: Bool[Array, "keys"] | None,
    kv_head: Int32[Array, ""],
) -> list[Float[Array, "keys D"]]:
    """Keys and values by position; zeros outside `in_range`, whatever lies there."""
    table_ref, row = table
    block_size = cache_refs[0].shape[1]
    head_dim, padded = layer.head_dim, triton.next_power_of_two(layer.head_dim)
    dim = jnp.arange(padded, dtype=jnp.int32)
    if block_size % tiling.keys == 0:  # all in one block of the cache
        first = block * tiling.keys
        page = table_ref[row, first // block_size]
        place = page, first % block_size + (key - first)[:, None], kv_head, dim[None, :]
    else:
        page = triton.load(table_ref.at[row, key // block_size], mask=in_range, other=None if in_range is None else 0)
        place = page[:, None], (key % block_size)[:, None], kv_head, dim[None, :]
    mask = None if in_range is None else in_range[:, None]
    if padded != head_dim:
        within = (dim < head_dim)[None, :]
        mask = within if mask is None else mask & within
    if mask is None:
        return [triton.load(ref.at[place]) for ref in cache_refs]
    mask = jnp.broadcast_to(mask, (tiling.keys, padded))
    return [triton.load(ref.at[place], mask=mask, other=0.0) for ref in cache_refs]


def _merge_paged_attention(
    merges_ref: Any, partial_ref: Any, lse_ref: Any, _: Any, out_ref: Any, *, program: Program
) -> None:
    """One program per split tile and query head. It reads (D + 1) * 4 bytes a part and token, and writes D * e a token.

    The parts' results are means of values, each for its own keys: the whole is their mean weighted by exp(lse).
    """
    layer, interpret = program.layer, program.interpret
    group = layer.num_heads // layer.num_kv_heads
    head = triton.program_id(0)
    merge = partial(_scalar, merges_ref, triton.program_id(1))
    first_slot, count, first_token = merge(MERGE_SLOT), merge(MERGE_COUNT), merge(MERGE_TOKEN)
    dim = jnp.arange(triton.next_power_of_two(layer.head_dim), dtype=jnp.int32)
    within = dim < layer.head_dim
    lane = jnp.arange(SLOTS_AT_A_TIME, dtype=jnp.int32)

    def one_token(i: Int32[Array, ""], _: None) -> None:
        row = i * group + head % group

        def some_parts(j: Int32[Array, ""], state: Any) -> Any:
            acc, top, total = state
            part = j * SLOTS_AT_A_TIME + lane
            there = part < count
            place = first_slot + part, head // group, row
            lse = triton.load(lse_ref.at[place], mask=there, other=-jnp.inf)
            mask = there[:, None] & within[None, :]
            part_place = place[0][:, None], head // group, row, dim[None, :]
            result = triton.load(partial_ref.at[part_place], mask=mask, other=0.0)
            new_top = jnp.maximum(top, jnp.max(lse))
            shrink = triton.exp2(top - new_top, interpret)
            weights = triton.exp2(lse - new_top, interpret)
            acc = acc * shrink + jnp.sum(weights[:, None] * result, axis=0)
            return acc, new_top, total * shrink + jnp.sum(weights)

        empty = jnp.zeros(dim.shape, jnp.float32), jnp.float32(NOTHING), jnp.float32(0)
        rounds = (count + SLOTS_AT_A_TIME - 1) // SLOTS_AT_A_TIME
        acc, _top, total = lax.fori_loop(0, rounds, some_parts, empty)
        out = (acc / total).astype(out_ref.dtype)
        triton.store(out_ref.at[first_token + i, head, dim], out, mask=within)

    lax.fori_loop(0, merge(MERGE_LENGTH), one_token, None)


def _scalar(ref: Any, row: Int32[Array, ""], column: int) -> Int32[Array, ""]:
    return ref[row, column]
