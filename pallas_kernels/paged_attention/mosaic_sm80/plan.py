"""Static choices of the Ampere and Ada kernel for one kind of layer: tile sizes, pipeline depth, number of workers.

One warpgroup of 64 or 128 rows to a block, and two blocks to an SM where its shared memory holds them, so that one
computes while the other waits: 2 * 128 threads leave each 255 registers.

Shared memory of a block, with D the head size:

    staging     rows * 64 * 4           plain rows: queries on their way in, results on their way out
    queries     64 * D * 2              swizzled, for heads of 256; the others' queries are in registers
    K and V     stages * 2 * block_keys * D * 2

    D    rows   GPU        block_keys   stages   K and V    all blocks' total, of an SM's
    64    128   A100           32          4     32 KiB     2 * 64 of 164 KiB
    64     64   A100           64          4     64 KiB     2 * 80
    128    64   A100           32          4     64 KiB     2 * 80
    256    64   A100           16          2     32 KiB     2 * 80
    64    128   sm_86, 89      32          2     16 KiB     2 * 48 of 100 KiB
    64     64   sm_86, 89      64          2     32 KiB     2 * 48
    128    64   sm_86, 89      32          2     32 KiB     2 * 48
    256    64   sm_86, 89      16          3     48 KiB         96

While a tile is computed the others of the ring are under way. What must be, to keep memory busy, is its bandwidth times
its latency: 2 TB/s * 1 us = 19 KiB an SM of an A100, 300 GB/s * 1 us = 5 KiB of an L4.
"""

from dataclasses import dataclass

from pallas_kernels.implementation import AttentionLayer
from pallas_kernels.paged_attention.mosaic.plan import ROWS, Plan

RESERVED_BYTES = 1024  # of each block's: the driver's
SMALL_BYTES = 512  # Mosaic's own, and alignment
MAX_STAGES = 4
# Of a tile of 64 rows, at most, by head size; half as many of one of 128. Compiled for sm_80, twice as many spill.
KEYS = {64: 64, 128: 32, 256: 16}
FEWEST_KEYS = 16


@dataclass(frozen=True)
class Processor:
    """Attributes:
    num_sms: streaming multiprocessors.
    shared_bytes: of one of them.
    """

    num_sms: int
    shared_bytes: int


# By compute capability, from the CUDA programming guide; the number of SMs of the largest such GPU.
PROCESSORS = {
    (8, 0): Processor(108, 164 << 10),
    (8, 6): Processor(84, 100 << 10),
    (8, 7): Processor(16, 164 << 10),
    (8, 9): Processor(142, 100 << 10),
}


def queries_in_registers(head_dim: int) -> bool:
    return head_dim <= 128


def make_plan(
    layer: AttentionLayer,
    num_tokens: int,
    num_rows: int,
    block_size: int,
    causal: bool,
    processor: Processor,
    stages: int | None = None,
    workers: int | None = None,
) -> Plan:
    """The plan of a layer in a step of this shape; the last two override what it would choose.

    A step with more tokens than rows, and heads of 64, has tiles of 128 rows. With larger heads those spill registers,
    compiled for sm_80 (heads of 128, 32 keys: 96 bytes); with 16 keys the queries, then in shared memory, are read so
    often that nothing is gained.
    """
    head_dim = layer.head_dim
    rows = 2 * ROWS if num_tokens > num_rows and head_dim == 64 else ROWS
    fixed = RESERVED_BYTES + SMALL_BYTES + rows * 64 * 4
    if not queries_in_registers(head_dim):
        fixed += rows * head_dim * 2
    blocks = 2 if _ring(FEWEST_KEYS, head_dim, 2) <= processor.shared_bytes // 2 - fixed else 1
    room = processor.shared_bytes // blocks - fixed
    block_keys = KEYS[head_dim] * ROWS // rows
    while _ring(block_keys, head_dim, 2) > room:
        block_keys //= 2
    if stages is None:
        stages = max(n for n in range(2, MAX_STAGES + 1) if _ring(block_keys, head_dim, n) <= room)
    return Plan(
        num_tokens=num_tokens,
        num_kv_heads=layer.num_kv_heads,
        group=layer.num_heads // layer.num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        window=layer.window,
        causal=causal,
        warpgroups=1,
        block_keys=block_keys,
        stages=stages,
        workers=max(1, blocks * processor.num_sms // layer.num_kv_heads) if workers is None else workers,
        by_token=True,
        rows=rows,
    )


def _ring(block_keys: int, head_dim: int, stages: int) -> int:
    """Bytes of K and V."""
    return stages * 2 * block_keys * head_dim * 2
