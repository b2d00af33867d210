"""Static choices of the Hopper kernel for one kind of layer: tile sizes, pipeline depth, number of workers.

A tile is a run of query tokens of one request for one kv head: its tokens times the group's heads are the rows of the
products, 64 rows for each compute warpgroup (the M of a wgmma), so every group size packs the tensor cores as well as
it can: G = 3 fills 63 rows with 21 tokens.

Shared memory of a block, 227 KiB at most, with D the head size and n the compute warpgroups:

    queries     n * 64 * D * 2          swizzled, for wgmma
    staging     n * 64 * min(D, 128) * 2    plain rows: queries on their way in, results on their way out
    K and V     stages * 2 * block_keys * D * 2

    D    n   block_keys   stages   bytes of K and V in flight   total
    64   1      128          6          192 KiB                 208 KiB
    64   2      128          6          192 KiB                 224 KiB
    128  1       64          6          192 KiB                 224 KiB
    128  2      128          2          128 KiB                 192 KiB
    256  1       64          2          128 KiB                 176 KiB
    256  2       64          2          128 KiB                 224 KiB

One block runs on an SM. What must be in flight to keep HBM busy is its bandwidth times its latency: 4.8 TB/s * 1 us
= 4.8 MB, 36 KiB an SM; all choices have three times that or more.
"""

from pallas_kernels.implementation import AttentionLayer
from pallas_kernels.paged_attention.mosaic.plan import ROWS, Plan

SHARED_BYTES = 232448  # that a block can have on sm_90
# Mosaic's scratch for reductions, barriers and alignment.
RESERVED_BYTES = 2048 + 1024
MAX_STAGES = 6


def make_plan(
    layer: AttentionLayer,
    num_tokens: int,
    num_rows: int,
    block_size: int,
    causal: bool,
    num_sms: int,
    stages: int | None = None,
    workers: int | None = None,
    warpgroups: int | None = None,
) -> Plan:
    """The plan of a layer in a step of this shape; the last three override what it would choose.

    One compute warpgroup where a step holds no more tokens than rows (decoding, bound by memory: more of the shared
    memory goes to the ring, and small tiles spread over more workers), else two, which take turns with the tensor
    cores. With a head size of 256 always one: compiled for sm_90a, two spill registers.
    """
    head_dim = layer.head_dim
    if warpgroups is None:
        warpgroups = 1 if num_tokens <= num_rows or head_dim == 256 else 2
    # A soft cap takes registers that 128 scores a row would need.
    wide = head_dim == 64 or (head_dim == 128 and warpgroups == 2 and layer.soft_cap is None)
    block_keys = 128 if wide else 64
    if stages is None:
        fixed = warpgroups * ROWS * (head_dim + min(head_dim, 128)) * 2
        stages = min(MAX_STAGES, (SHARED_BYTES - RESERVED_BYTES - fixed) // (2 * block_keys * head_dim * 2))
    return Plan(
        num_tokens=num_tokens,
        num_kv_heads=layer.num_kv_heads,
        group=layer.num_heads // layer.num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        window=layer.window,
        causal=causal,
        warpgroups=warpgroups,
        block_keys=block_keys,
        stages=stages,
        workers=max(1, num_sms // layer.num_kv_heads) if workers is None else workers,
    )
