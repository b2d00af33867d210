"""Slot mapping as a Triton kernel: by itself one launch, where the plain form is part of what XLA fuses around it.

It reads a position and a table entry a token and writes a slot, 12 bytes, besides the rows' boundaries, which every
program compares with all of its tokens: 4 * R bytes and R * TOKENS comparisons a program.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int32

from pallas_kernels import triton_backend as triton

TOKENS, ROWS = 128, 32  # of a program; of a comparison


def slot_mapping(
    query_start_loc: Int32[Array, "R+1"],
    positions: Int32[Array, "T"],
    block_table: Int32[Array, "R W"],
    block_size: int,
    world: int,
    rank: int,
    interleave: int,
    interpret: bool = False,
) -> Int32[Array, "T"]:
    kernel = partial(_slot_mapping, block_size=block_size, world=world, rank=rank, interleave=interleave)
    return triton.call(
        kernel,
        [query_start_loc, positions, block_table],
        jax.ShapeDtypeStruct(positions.shape, jnp.int32),
        grid=(-(-positions.shape[0] // TOKENS),),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )


def _slot_mapping(
    start_ref: Any,
    position_ref: Any,
    table_ref: Any,
    out_ref: Any,
    *,
    block_size: int,
    world: int,
    rank: int,
    interleave: int,
) -> None:
    num_rows, width = table_ref.shape
    token = triton.program_id(0) * TOKENS + jnp.arange(TOKENS, dtype=jnp.int32)
    there = token < position_ref.shape[0]

    def ended(i: Int32[Array, ""], count: Int32[Array, "tokens"]) -> Int32[Array, "tokens"]:
        """How many requests end at or before each token: the number of its own row."""
        row = i * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        end = triton.load(start_ref.at[row + 1], mask=row < num_rows, other=jnp.iinfo(jnp.int32).max)
        return count + jnp.sum((end[None, :] <= token[:, None]).astype(jnp.int32), axis=1)

    row = lax.fori_loop(0, -(-num_rows // ROWS), ended, jnp.zeros((TOKENS,), jnp.int32))
    position = triton.load(position_ref.at[token], mask=there, other=-1)
    column = position // (block_size * world)
    offset = position - column * (block_size * world)
    mine = (offset // interleave) % world == rank
    has_slot = (position >= 0) & (row < num_rows) & (column < width) & mine
    block = triton.load(table_ref.at[row, column], mask=has_slot, other=0)
    slot = block * block_size + offset // (world * interleave) * interleave + offset % interleave
    triton.store(out_ref.at[token], jnp.where(has_slot, slot, -1), mask=there)
