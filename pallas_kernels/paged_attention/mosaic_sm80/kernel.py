"""The attention kernel for Ampere and Ada: asynchronous copies of pages, mma in both products."""

from dataclasses import replace
from functools import partial
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
from pallas_kernels.paged_attention.mosaic_sm80.compute import (
    Buffers,
    attend,
    head_of_row,
    load_queries,
    store_results,
)
from pallas_kernels.paged_attention.mosaic_sm80.plan import queries_in_registers
from pallas_kernels.paged_attention.mosaic_sm80.products import COLUMNS, Device
from pallas_kernels.paged_attention.mosaic_sm80.ring import Ring


def attention(
    q: Float[Array, "T H D"],
    cache: KVCache,
    block_table: Array,
    work: Work,
    sinks: Array | None,
    scale: float,
    soft_cap: float | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Float[Array, "T Hkv G D"], Partials | None]:
    """Results of all whole tiles, and what is to be merged into them (None with one worker)."""
    plan = work.plan
    num_tokens, heads, group, head_dim = plan.num_tokens, plan.num_kv_heads, plan.group, plan.head_dim
    device = Device(q.dtype, interpret is not None)
    divided = plan.workers > 1
    pages = [x.reshape(*x.shape[:2], heads * head_dim) for x in cache]
    inputs: list[Any] = [q.reshape(num_tokens, heads, group, head_dim), *pages, block_table, work.tiles, work.cuts]
    if sinks is not None:
        inputs.append(sinks.astype(jnp.float32).reshape(heads, group))
    outputs = [jax.ShapeDtypeStruct((num_tokens, heads, group, head_dim), q.dtype)]
    if divided:
        outputs += partial_shapes(plan)

    def body(*refs: Any) -> None:
        q, k, v, table, tiles, cuts, *rest = refs
        sink = rest.pop(0) if sinks is not None else None
        out = rest.pop(0)
        partials = Partials(rest.pop(0), rest.pop(0)) if divided else None
        (staging, staging_f32), keys, values, *rest = rest
        queries = None if queries_in_registers(head_dim) else rest.pop(0)
        here = rest.pop(0) if rest else None
        worker, head = lax.axis_index("worker"), lax.axis_index("head")
        ring = Ring(k, v, table, head, keys, values, here, device, plan)

        def one(piece: Piece, _: Array) -> None:
            rows = share(piece, jnp.int32(0), plan)
            device.meet()  # the piece before this one has done with shared memory
            pages = ring.begin(piece)

            def compute(plan: Plan) -> None:
                first = pl.ds(0, plan.rows)
                buffers = Buffers(queries, staging.at[first], staging_f32.at[first])
                own = load_queries(q, head, rows, buffers, device, plan)
                initial = first_maximum(sink, head, head_of_row(device, plan), piece, plan.group, device.vector)
                state = attend(piece, rows, own, initial, ring, pages, scale, soft_cap, plan)
                store_results(state, piece, rows, worker, head, out, partials, buffers, device, plan)

            if plan.rows == ROWS:
                return compute(plan)
            # What fits into half a tile, as a request that decodes does, takes no more time than it must.
            half = replace(plan, rows=ROWS)
            fits = rows.shift + rows.length <= half.tokens_per_tile
            pl.when(fits)(partial(compute, half))
            pl.when(~fits)(partial(compute, plan))

        each_piece(tiles, cuts, worker, one)

    results = plgpu.kernel(
        body,
        out_type=tuple(outputs),
        scratch_types=_scratch(plan, q.dtype, device.interpreted),
        grid=(plan.workers, heads),
        grid_names=("worker", "head"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="paged_attention_mosaic_sm80",
        compiler_params=compiler_params(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*inputs)
    return results[0], Partials(*results[1:]) if divided else None


def _scratch(plan: Plan, dtype: DTypeLike, interpreted: bool) -> list[Any]:
    # Rows of 64 bytes, so placed that the eight rows of a matrix are in different banks.
    swizzled: Any = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(COLUMNS * 2))  # type: ignore[abstract]
    ring = plgpu.SMEM((plan.stages, plan.block_keys, plan.head_dim), dtype, transforms=swizzled)
    rows = plan.rows
    scratch: list[Any] = [
        plgpu.RefUnion(plgpu.SMEM((rows, plan.staged), dtype), plgpu.SMEM((rows, 64), jnp.float32)),
        ring,
        ring,
    ]
    if not queries_in_registers(plan.head_dim):
        scratch.append(plgpu.SMEM((rows, plan.head_dim), dtype, transforms=swizzled))
    if interpreted:
        scratch.append(plgpu.Barrier(num_arrivals=2 * plan.copies, num_barriers=plan.stages))
    return scratch
