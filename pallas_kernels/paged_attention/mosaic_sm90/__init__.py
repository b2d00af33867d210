"""Paged attention for Hopper (sm_90a) as Pallas Mosaic GPU kernels.

One kernel takes decoding, prefill, chunks over a cached prefix and any mix of them:

- `mosaic.work`: the step's queries are cut into tiles and the tiles' keys among the workers, once a step for all
  layers.
- `kernel`: a worker goes through its share. One warpgroup loads (`loader`): a bulk copy (TMA) for each page and kv
  head, into a ring of K and V tiles that runs ahead over the borders of pieces. One or two compute (`compute`): 64
  rows each, wgmma in both products (`products`), online softmax; tiles that every row sees whole go without masks.
- `mosaic.merge`: tiles that were divided among workers get their result.

What must be moved, for a step with K keys to read in all, D the head size, 2 bytes an element: 4 * K * Hkv * D bytes
of K and V, each once for every tile of queries that sees it, and q and out, 4 * T * H * D. What is moved besides: 32
bytes a tile, 4 for each page of each tile and kv head, and for a divided tile 4 * D * (pieces) bytes a row, written and
read once (from L2: they are few). Operations: 4 * D for each pair of a query head and a key that it sees.

At the H200's 4.8 TB/s and 989 TFLOP/s (targets, not measured): 64 requests of 2k keys, 32 heads on 8 of 128, are 537 MB
a layer, 112 us, to be done in 149 us (75 %); 64 of 8k 447 us, to be done in 526 us (85 %); a causal prefill of 4k,
137 GFLOP, 139 us, to be done in 289 us (475 TFLOP/s).
"""

from pallas_kernels.paged_attention.mosaic_sm90.attention import MosaicSm90Attention

__all__ = ["MosaicSm90Attention"]
