"""Paged attention for Ampere and Ada (sm_80, 86, 87, 89) as Pallas Mosaic GPU kernels: what is to replace Triton there.

One kernel takes decoding, prefill, chunks over a cached prefix and any mix of them. The division of the step's work,
the softmax and the merge are those of the Hopper kernels (`mosaic`); its own are:

- `kernel`: a block is one warpgroup, with 64 or 128 rows of queries for one kv head; it goes through its share of the
  step.
- `ring`: it starts asynchronous copies (cp.async, 16 bytes a thread) of the pages that come next, several tiles of K
  and V ahead, and waits for those of the tile that it computes.
- `products`: both products by mma, from registers: keys and values by ldmatrix from swizzled rows, the weights as they
  come from the softmax. In tiles at an edge, values that don't count are replaced by zeros in registers.
- `rows`: queries in and results out, by runs of tokens, loads of 16 bytes a thread where they fill the warpgroup.

A tile's rows are token by token, a token's heads side by side, as they lie in memory. Each of the four warps has 16
rows of 64 and reads every key and value from shared memory: 16 * D bytes a key, of 128 a clock. With D = 128 on an A100
those are 16 clocks, in which HBM brings its SM less than half a key: decoding is bound by memory. In a long prefill the
tensor cores take 16 clocks for the products of those 64 rows, so both are to be busy all the time, and neither will be.
With heads of 64 such steps have tiles of 128 rows, for which keys and values are read half as often; a tile with few
tokens, as decodes in the same step are, is computed as one of 64. What must be moved, and what is besides, is as for
Hopper.
"""

from pallas_kernels.paged_attention.mosaic_sm80.attention import MosaicSm80Attention

__all__ = ["MosaicSm80Attention"]
