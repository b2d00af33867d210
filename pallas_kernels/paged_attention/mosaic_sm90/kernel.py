"""The attention kernel for Hopper: bulk copies of pages, wgmma in both products, one warpgroup that only loads."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Float, Float32

from pallas_kernels.metadata import KVCache
from pallas_kernels.paged_attention.mosaic_sm90 import work as w
from pallas_kernels.paged_attention.mosaic_sm90.compute import (
    Buffers,
    Piece,
    attend,
    first_maximum,
    keep,
    load_queries,
    pass_tiles,
    share,
    store_results,
)
from pallas_kernels.paged_attention.mosaic_sm90.loader import drain, load_piece
from pallas_kernels.paged_attention.mosaic_sm90.plan import ROWS, Plan

# Of a thread, for two warpgroups that compute and one that loads; a block has 65536.
REGISTERS = 224, 64


class Partials(NamedTuple):
    """What the pieces of divided tiles left: their results, normalised, and log2 of their sums of exponentials.

    By kind of piece (0: the first of its tile, named by the cut that ends it; 1: a later one, named by the cut that
    begins it), cut, kv head and token of the tile; `rows` in the order of the warpgroups' registers.
    """

    out: Float32[Array, "2 cuts Hkv tokens Gp D"]
    log_sums: Float32[Array, "2 cuts Hkv warpgroups 64"]


def attention(
    q: Float[Array, "T H D"],
    cache: KVCache,
    block_table: Array,
    work: w.Work,
    sinks: Array | None,
    scale: float,
    soft_cap: float | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Float[Array, "T Hkv G*D"], Partials | None]:
    """Results of all whole tiles, and what is to be merged into them (None with one worker)."""
    plan = work.plan
    num_tokens, heads, group, head_dim = plan.num_tokens, plan.num_kv_heads, plan.group, plan.head_dim
    dtype = q.dtype
    divided = plan.workers > 1
    inputs: list[Any] = [q.reshape(num_tokens, heads, group, head_dim), *cache, block_table, work.tiles, work.cuts]
    if sinks is not None:
        inputs.append(sinks.astype(jnp.float32).reshape(heads, group))
    outputs = [jax.ShapeDtypeStruct((num_tokens, heads, group, head_dim), dtype)]
    if divided:
        outputs += partial_shapes(plan)

    def body(*refs: Any) -> None:
        q, k, v, table, tiles, cuts, *rest = refs
        sink = rest.pop(0) if sinks is not None else None
        out = rest.pop(0)
        partials = Partials(rest.pop(0), rest.pop(0)) if divided else None
        queries, (staging, staging_f32), log_sums, kept, keys, values, queries_here, *barriers, values_raw = rest
        worker, head, warpgroup = (lax.axis_index(name) for name in ("worker", "head", "warpgroup"))

        def each_piece(do: Callable[[Piece, Array], None]) -> Array:
            """Calls do(piece, K/V tiles before it) for this worker's pieces; returns the number of K/V tiles."""

            def one(t: Array, count: Array) -> Array:
                piece = piece_of(t)
                following = count + piece.end - piece.begin
                do(piece, count)
                return following

            stop = cuts[worker + 1, w.CUT_TILE] + (cuts[worker + 1, w.CUT_OFFSET] > 0).astype(jnp.int32)
            return lax.fori_loop(cuts[worker, w.CUT_TILE], stop, one, jnp.int32(0))

        def piece_of(t: Array) -> Piece:
            # Read anew whenever needed: only few registers are left in the loops over keys.
            first_tile, first_offset = cuts[worker, w.CUT_TILE], cuts[worker, w.CUT_OFFSET]
            last_tile, last_offset = cuts[worker + 1, w.CUT_TILE], cuts[worker + 1, w.CUT_OFFSET]
            row, token, length, position, first_key, num_keys, kv_tiles, zero = (
                tiles[t, column]
                for column in (w.ROW, w.TOKEN, w.LENGTH, w.POSITION, w.FIRST_KEY, w.NUM_KEYS, w.KV_TILES, w.ZERO)
            )
            begin = jnp.where(t == first_tile, first_offset, 0)
            end = jnp.where(t == last_tile, last_offset, kv_tiles)
            return Piece(row, token, length, position, first_key, num_keys, kv_tiles, begin, end, zero)

        @pl.when(warpgroup < plan.warpgroups)
        def _compute() -> None:
            if plan.warpgroups == 2:
                plgpu.set_max_registers(REGISTERS[0], action="increase")
            buffers = Buffers(
                queries.at[warpgroup],
                staging.at[warpgroup],
                staging_f32.at[warpgroup],
                log_sums.at[warpgroup],
                kept.at[warpgroup],
                keys,
                values,
                queries_here.at[warpgroup],
                *barriers,
            )

            def one(piece: Piece, count: Array) -> None:
                rows = share(piece, warpgroup, plan)

                @pl.when(rows.length > 0)
                def _() -> None:
                    keep(piece, rows, buffers)
                    load_queries(q, head, rows, buffers, plan)
                    initial = first_maximum(sink, head, piece, plan)
                    state = attend(
                        piece,
                        rows,
                        warpgroup,
                        initial,
                        count,
                        buffers,
                        plan,
                        scale,
                        soft_cap,
                        dtype,
                        interpret is not None,
                    )
                    store_results(state, worker, head, warpgroup, out, partials, buffers, plan)

                if plan.warpgroups > 1:

                    @pl.when(rows.length == 0)
                    def _() -> None:
                        pass_tiles(piece, count, buffers, plan)

            each_piece(one)

        @pl.when(warpgroup == plan.warpgroups)
        def _load() -> None:
            if plan.warpgroups == 2:
                plgpu.set_max_registers(REGISTERS[1], action="decrease")
            buffers = Buffers(None, None, None, None, None, keys, values, None, *barriers)

            def one(piece: Piece, count: Array) -> None:
                load_piece(k, v, table, head, piece, count, buffers, values_raw, plan)

            drain(each_piece(one), buffers, plan)

    results = plgpu.kernel(
        body,
        out_type=tuple(outputs),
        scratch_types=_scratch(plan, dtype),
        grid=(plan.workers, heads),
        grid_names=("worker", "head"),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention_mosaic_sm90",
        compiler_params=compiler_params(),
        interpret=interpret,
    )(*inputs)
    return results[0], Partials(*results[1:]) if divided else None


def compiler_params() -> plgpu.CompilerParams:
    """With the layout of every register array as the kernels name it: JAX 0.12's inference of layouts does not know
    plain rows in shared memory."""
    return plgpu.CompilerParams(
        approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
    )


def partial_shapes(plan: Plan) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Of the fields of `Partials`."""
    group = plan.group + (plan.group * plan.head_dim % 128 != 0)  # what is loaded at once fills a warpgroup
    places = 2, plan.workers + 1, plan.num_kv_heads
    return (
        jax.ShapeDtypeStruct((*places, plan.tokens_per_tile, group, plan.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((*places, plan.warpgroups, ROWS), jnp.float32),
    )


def _scratch(plan: Plan, dtype: DTypeLike) -> list[Any]:
    swizzled: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    n, stages = plan.warpgroups, plan.stages
    ring = plgpu.SMEM((stages, plan.block_keys, plan.head_dim), dtype, transforms=swizzled)
    here = plgpu.Barrier(num_arrivals=plan.copies, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=n, num_barriers=stages)
    return [
        plgpu.SMEM((n, ROWS, plan.head_dim), dtype, transforms=swizzled),
        plgpu.RefUnion(plgpu.SMEM((n, ROWS, plan.staged), dtype), plgpu.SMEM((n, ROWS, plan.staged // 2), jnp.float32)),
        plgpu.SMEM((n, ROWS), jnp.float32),
        plgpu.SMEM((n, 5), jnp.int32),
        ring,
        ring,
        plgpu.Barrier(num_arrivals=plan.group, num_barriers=n),
        here,
        here,
        free,
        free,
        plgpu.Barrier(num_arrivals=n),
        plgpu.Barrier(num_arrivals=plan.copies),
    ]
