"""Merging the pieces of divided tiles: a second launch, of which all blocks but those of divided tiles end at once.

A block has one divided tile and kv head; its warpgroups take turns with the tile's tokens. With results o_i of the
pieces and L_i the log2 of their sums of exponentials, the tile's result is

    sum_i 2^(L_i - max L) o_i / sum_i 2^(L_i - max L)

It moves the pieces' results (float32, G * D for each token and piece) and nothing else; the pieces are at most two
for each worker of the attention kernel, whatever the lengths.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Float32, Int32

from pallas_kernels.paged_attention.mosaic import work as w
from pallas_kernels.paged_attention.mosaic.plan import Plan
from pallas_kernels.paged_attention.softmax import MASKED

WARPGROUPS = 8
THREADS = 128  # of a warpgroup
AT_ONCE = 4  # pieces
MOST = 512  # elements


class Partials(NamedTuple):
    """What the pieces of divided tiles left: their results, normalised, and log2 of their sums of exponentials.

    By kind of piece (0: the first of its tile, named by the cut that ends it; 1: a later one, named by the cut that
    begins it), cut, kv head and token of the tile; `rows` in the order of the warpgroups' registers.
    """

    out: Float32[Array, "2 cuts Hkv tokens Gp D"]
    log_sums: Float32[Array, "2 cuts Hkv warpgroups rows"]


def compiler_params(*, unsafe_no_auto_barriers: bool = False) -> plgpu.CompilerParams:
    """With the layout of every register array as the kernels name it: JAX 0.12's inference of layouts does not know
    plain rows in shared memory.

    Args:
        unsafe_no_auto_barriers: the kernel itself says where its warps must wait for one another.
    """
    return plgpu.CompilerParams(
        approx_math=True,
        reduction_scratch_bytes=0,
        unsafe_no_auto_barriers=unsafe_no_auto_barriers,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )


def partial_shapes(plan: Plan) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Of the fields of `Partials`."""
    group = plan.group + (plan.group * plan.head_dim % 128 != 0)  # what is loaded at once fills a warpgroup
    places = 2, plan.workers + 1, plan.num_kv_heads
    return (
        jax.ShapeDtypeStruct((*places, plan.tokens_per_tile, group, plan.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((*places, plan.warpgroups, plan.rows), jnp.float32),
    )


def merge(
    out: Float[Array, "T Hkv G D"],
    partials: Partials,
    work: w.Work,
    store: Callable[[Any, Any], None],
    name: str,
    interpret: plgpu.InterpretGPUParams | None,
) -> Float[Array, "T Hkv G D"]:
    """`out` with the divided tiles' tokens filled in, in place.

    Args:
        store: copies the G * D numbers of a token from shared memory, just written by the same warpgroup, to `out`;
            is done with the former when it returns.
        name: of the launch.
    """
    plan = work.plan
    cuts_per_head, heads = plan.workers + 1, plan.num_kv_heads
    size = partials.out.shape[-2] * plan.head_dim  # a multiple of THREADS
    flat = partials.out.reshape(2, cuts_per_head, heads, plan.tokens_per_tile, size)
    layout = _vector_layout(size // plan.head_dim, plan.head_dim)
    at_once = layout.size // plan.head_dim  # heads
    result = jax.new_ref(out.reshape(plan.num_tokens, heads, plan.group * plan.head_dim))

    def body(pieces: Any, log_sums: Any, tiles: Any, cuts: Any, result: Any, staging: Any) -> None:
        cut, head, warpgroup = lax.axis_index("cut") + 1, lax.axis_index("head"), lax.axis_index("warpgroup")
        later = cuts[cut, w.CUT_MERGES]

        @pl.when(later > 0)
        def _() -> None:
            tile = cuts[cut, w.CUT_TILE]
            first, length = tiles[tile, w.TOKEN], tiles[tile, w.LENGTH]

            @pl.loop(0, lax.div(length - warpgroup + (WARPGROUPS - 1), jnp.int32(WARPGROUPS)))
            def _(turn: Array) -> None:
                token = turn * WARPGROUPS + warpgroup
                place = _place(token, first, plan)

                # Unrolled, its parts would keep each other's addresses in registers.
                @pl.loop(0, size // layout.size)
                def _(part: Array) -> None:
                    elements, first_head = pl.ds(part * layout.size, layout.size), part * at_once

                    def piece(kind: Any, c: Array) -> Array:
                        return plgpu.load(pieces.at[kind, c, head, token, elements], layout=layout.layout)

                    def log_sum(kind: Any, c: Array, g: int) -> Array:
                        of_group = jnp.minimum(first_head + g, plan.group - 1)  # past it is what fills a warpgroup
                        return log_sums[kind, c, head, place.warpgroup, plan.row_of(place.token, of_group)]

                    merged = _merge_token(piece, log_sum, cut, later, at_once, plan, layout)
                    staging[warpgroup, elements] = merged.astype(out.dtype)

                store(staging.at[warpgroup, pl.ds(0, plan.group * plan.head_dim)], result.at[first + token, head])

    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[plgpu.SMEM((WARPGROUPS, size), out.dtype)],
        grid=(plan.workers - 1, heads),
        grid_names=("cut", "head"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=compiler_params(),
        interpret=interpret,
    )(flat, partials.log_sums, work.tiles, work.cuts, result)
    return jax.freeze(result).reshape(out.shape)


class _Vector(NamedTuple):
    """How many elements are merged at once, and their layout."""

    size: int
    layout: Any


def _vector_layout(heads: int, head_dim: int) -> _Vector:
    """As many heads as divide those there are and make no more than MOST elements, and at least one a thread."""
    sizes = [n * head_dim for n in range(1, heads + 1) if heads % n == 0]
    size = max((s for s in sizes if s <= MOST and s % THREADS == 0), default=heads * head_dim)
    a_thread = size // THREADS
    return _Vector(size, plgpu.Layout.WG_STRIDED((size,), vec_size=min(4, a_thread & -a_thread)))


class _Place(NamedTuple):
    """Where the attention kernel had a tile's token: warpgroup, and which of its box's tokens."""

    warpgroup: Int32[Array, ""]
    token: Int32[Array, ""]


def _place(token: Int32[Array, ""], first: Int32[Array, ""], plan: Plan) -> _Place:
    warpgroup = lax.div(token, jnp.int32(plan.tokens_per_warpgroup))
    first_of_warpgroup = first + warpgroup * plan.tokens_per_warpgroup
    return _Place(warpgroup, first + token - jnp.minimum(first_of_warpgroup, plan.num_tokens - plan.box))


def _merge_token(
    piece: Callable[[Any, Array], Array],
    log_sum: Callable[[Any, Array, int], Array],
    cut: Int32[Array, ""],
    later: Int32[Array, ""],
    heads: int,
    plan: Plan,
    layout: _Vector,
) -> Float32[Array, "size"]:
    """Some heads of one token: a running weighted mean, every number of it as often as its head has elements."""
    element = plgpu.broadcasted_iota(jnp.int32, (layout.size,), 0, layout=layout.layout)
    head_of_element = element >> int(math.log2(plan.head_dim))

    def log_sums(kind: int, c: Array, counts: Any = True) -> Array:
        vector = plgpu.layout_cast(jnp.full((layout.size,), MASKED, jnp.float32), layout.layout)
        for g in range(heads):
            vector = jnp.where(head_of_element == g, jnp.where(counts, log_sum(kind, c, g), MASKED), vector)
        return vector

    def more(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # Several at once, so that their loads are under way together.
        at_once = []
        for j in range(AT_ONCE):
            index = i * AT_ONCE + j
            c = cut + jnp.minimum(index, later - 1)
            at_once.append((piece(1, c), log_sums(1, c, index < later)))
        acc, m, total = state
        for o, log in at_once:
            m_new = jnp.maximum(m, log)
            shrink, weight = jnp.exp2(m - m_new), jnp.exp2(log - m_new)
            acc, m, total = acc * shrink + o * weight, m_new, total * shrink + weight
        return acc, m, total

    ones = plgpu.layout_cast(jnp.ones((layout.size,), jnp.float32), layout.layout)
    state = piece(0, cut), log_sums(0, cut), ones
    acc, _, total = lax.fori_loop(0, lax.div(later + (AT_ONCE - 1), jnp.int32(AT_ONCE)), more, state)
    return acc / total
