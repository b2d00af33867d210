"""Slot mapping: where in the paged cache the key and value of each token of a step go.

A slot is block * block_size + offset. The formula is vLLM's (block tables, "compute slot mapping"), with a guard
that it lacks: a position outside the request's table gets no slot, rather than the neighbouring row's block.
"""

from collections.abc import Iterable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from pallas_kernels import triton_backend, triton_configurations, triton_slot_mapping
from pallas_kernels.configurations import KernelConfiguration
from pallas_kernels.implementation import Kernel, choose_kernel
from pallas_kernels.metadata import request_indices

PAD_SLOT_ID = -1  # a token that writes nothing


def slot_mapping(
    query_start_loc: Int32[Array, "R+1"],
    positions: Int32[Array, "T"],
    block_table: Int32[Array, "R W"],
    *,
    block_size: int,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    implementation: str = "auto",
) -> Int32[Array, "T"]:
    """The cache slot of every token, -1 where it has none.

    Under context parallelism cp_world_size ranks share a request: runs of cp_interleave tokens go round the ranks,
    and a table entry stands for block_size * cp_world_size positions, of which this rank keeps its own block_size:

        block = position // (block_size * world);  off = position % (block_size * world)
        mine  = (off // interleave) % world == rank
        slot  = table[row, block] * block_size + off // (world * interleave) * interleave + off % interleave

    No slot (-1): padding tokens, which start at the actual query_start_loc[-1]; tokens of other ranks; positions
    that are negative or past the row's table (W blocks). Slots are int32, so a cache of 2**31 slots is refused by
    `write_kv_cache`.

    Args:
        implementation: "auto", or a name: "reference", "triton".

    Raises:
        ValueError: a block size, rank, world size or interleave that makes no sense; an unknown implementation.
    """
    if block_size < 1 or cp_world_size < 1 or cp_interleave < 1:
        raise ValueError(
            "block_size, cp_world_size and cp_interleave must be at least 1, "
            f"not {block_size}, {cp_world_size} and {cp_interleave}"
        )
    if not 0 <= cp_rank < cp_world_size:
        raise ValueError(f"cp_rank must be in 0..{cp_world_size - 1} (cp_world_size {cp_world_size}), not {cp_rank}")
    if block_size % cp_interleave:
        raise ValueError(f"block_size {block_size} must be a multiple of cp_interleave {cp_interleave}")
    if query_start_loc.shape[0] != block_table.shape[0] + 1:
        raise ValueError(
            f"query_start_loc must have one entry more than block_table has rows ({block_table.shape[0]}), "
            f"not {query_start_loc.shape[0]}"
        )
    kernel, _ = choose_kernel("slot_mapping", IMPLEMENTATIONS, implementation)
    return kernel.function(query_start_loc, positions, block_table, block_size, cp_world_size, cp_rank, cp_interleave)


def _reference(
    query_start_loc: Int32[Array, "R+1"],
    positions: Int32[Array, "T"],
    block_table: Int32[Array, "R W"],
    block_size: int,
    world: int,
    rank: int,
    interleave: int,
) -> Int32[Array, "T"]:
    rows, width = block_table.shape
    row = request_indices(query_start_loc, positions.shape[0])
    column = positions // (block_size * world)
    offset = positions - column * (block_size * world)
    mine = (offset // interleave) % world == rank
    local_offset = offset // (world * interleave) * interleave + offset % interleave
    has_slot = (row < rows) & (positions >= 0) & (column < width) & mine
    # Clamped, so that what is masked away below never indexes out of the table.
    block = block_table[jnp.minimum(row, rows - 1), jnp.clip(column, 0, width - 1)]
    return jnp.where(has_slot, block * block_size + local_offset, PAD_SLOT_ID)


def _configurations() -> Iterable[KernelConfiguration]:
    return triton_configurations.of_slot_mapping(slot_mapping)


# The plain form first, on GPUs too: XLA fuses it with what makes positions and the table. The step of a Llama-3.1-8B of
# one layer, compiled for an H200 (256 tokens, 256 rows), has 28 launches with it and 30 with the kernel.
IMPLEMENTATIONS = (
    Kernel("reference", _reference),
    Kernel("triton", triton_slot_mapping.slot_mapping, triton_backend.refuses_device, _configurations),
)


def local_key_lens(
    seq_lens: Int32[Array, "R"], *, cp_world_size: int, cp_rank: int, cp_interleave: int = 1
) -> Int32[Array, "R"]:
    """How many of each sequence's keys a context-parallel rank holds, under the same interleave as `slot_mapping`.

    base = length // interleave // world * interleave
    local = base + clip(length - base * world - rank * interleave, 0, interleave)
    """
    base = seq_lens // cp_interleave // cp_world_size * cp_interleave
    rest = jnp.clip(seq_lens - base * cp_world_size - cp_rank * cp_interleave, 0, cp_interleave)
    return base + rest
