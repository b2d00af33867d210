"""The attention kernel for Hopper: bulk copies of pages, wgmma in both products, one warpgroup that only loads."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Float

from pallas_kernels.metadata import KVCache
from pallas_kernels.paged_attention.mosaic.merge import Partials, compiler_params, partial_shapes
from pallas_kernels.paged_attention.mosaic.pieces import Piece, each_piece, share
from pallas_kernels.paged_attention.mosaic.plan import ROWS, Plan
from pallas_kernels.paged_attention.mosaic.softmax import first_maximum
from pallas_kernels.paged_attention.mosaic.work import Work
from pallas_kernels.paged_attention.mosaic_sm90.compute import (
    KEPT,
    VECTOR,
    Buffers,
    attend,
    head_of_row,
    keep,
    load_queries,
    pass_tiles,
    store_results,
)
from pallas_kernels.paged_attention.mosaic_sm90.loader import drain, load_piece

# Of a thread, for two warpgroups that compute and one that loads; a block has 65536.
REGISTERS = 224, 64


def attention(
    q: Float[Array, "T H D"],
    cache: KVCache,
    block_table: Array,
    work: Work,
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

        @pl.when(warpgroup < plan.warpgroups)
        def _compute() -> None:
            if plan.warpgroups == 2:
                plgpu.set_max_registers(REGISTERS[0], action="increase")
            # A single one is told so: addresses that might depend on it would take registers.
            mine = warpgroup if plan.warpgroups > 1 else jnp.int32(0)
            buffers = Buffers(
                queries.at[mine],
                staging.at[mine],
                staging_f32.at[mine],
                log_sums.at[mine],
                kept.at[mine],
                keys,
                values,
                queries_here.at[mine],
                *barriers,
            )

            def one(piece: Piece, count: Array) -> None:
                rows = share(piece, mine, plan)

                @pl.when(rows.length > 0)
                def _() -> None:
                    keep(piece, rows, buffers, plan)
                    load_queries(q, head, piece, rows, buffers, plan)
                    initial = first_maximum(sink, head, head_of_row(plan), piece, plan.group, VECTOR)
                    state = attend(
                        piece,
                        rows,
                        mine,
                        initial,
                        count,
                        buffers,
                        plan,
                        scale,
                        soft_cap,
                        dtype,
                        interpret is not None,
                    )
                    store_results(state, worker, head, mine, out, partials, buffers, plan)

                if plan.warpgroups > 1:

                    @pl.when(rows.length == 0)
                    def _() -> None:
                        pass_tiles(piece, count, buffers, plan)

            each_piece(tiles, cuts, worker, one)

        @pl.when(warpgroup == plan.warpgroups)
        def _load() -> None:
            if plan.warpgroups == 2:
                plgpu.set_max_registers(REGISTERS[1], action="decrease")
            buffers = Buffers(None, None, None, None, None, keys, values, None, *barriers)

            def one(piece: Piece, count: Array) -> None:
                load_piece(k, v, table, head, piece, count, buffers, values_raw, plan)

            drain(each_piece(tiles, cuts, worker, one), buffers, plan)

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
        plgpu.SMEM((n, len(KEPT)), jnp.int32),
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
