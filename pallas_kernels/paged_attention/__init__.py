"""Paged attention: the queries of a ragged batch over keys and values that lie in blocks of a cache."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.implementation import (
    AttentionImplementation,
    AttentionLayer,
    GroupSpec,
    choose_attention,
)
from pallas_kernels.metadata import CommonAttentionMetadata, KVCache
from pallas_kernels.paged_attention.mosaic_sm80 import MosaicSm80Attention
from pallas_kernels.paged_attention.mosaic_sm90 import MosaicSm90Attention
from pallas_kernels.paged_attention.reference import ReferenceAttention
from pallas_kernels.paged_attention.triton import TritonAttention

# Best first: "auto" takes the first that does not refuse. The kernel made for a GPU comes before one that runs on many,
# and the reference last. Ampere's comes after the one that it is to replace until a GPU has run both.
IMPLEMENTATIONS: tuple[AttentionImplementation, ...] = (
    MosaicSm90Attention(),
    TritonAttention(),
    MosaicSm80Attention(),
    ReferenceAttention(),
)


def paged_attention(
    q: Float[Array, "T H D"],
    cache: KVCache,
    metadata: CommonAttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    implementation: str = "auto",
) -> Float[Array, "T H D"]:
    """Attention of every token's query over the keys of its own request.

    For token i of a row with Q query tokens and K = seq_len keys, at position p = K - Q + i, head h, kv head
    h // (H / Hkv), the keys j <= p (with window W also j > p - W; without causality all j < K):

        s_j = scale * (q . k_j),  capped as  soft_cap * tanh(s_j / soft_cap)
        out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink_h))      (the last term only with sinks)

    The keys and values of the step's own tokens must be in the cache already: call `write_kv_cache` first.
    Padding tokens give zeros. Nothing of the cache outside a request's first seq_len keys, and of padding tokens,
    reaches a result, be it NaN. Accumulation is in float32; the result has q's dtype. A model calls this through
    `StepAttention`, which shares the work map between layers.

    Args:
        cache: k and v, [N, B, Hkv, D] each, of any floating-point dtype; B = metadata.block_size.
        sinks: a learned logit per query head that joins the softmax's denominator.
        implementation: "auto", or a name: "mosaic_sm90", "triton", "mosaic_sm80", "reference". The reference alone is
            differentiable.

    Raises:
        ValueError: shapes or dtypes that disagree; an implementation that is unknown or refuses the case.
    """
    layer = _checked_layer(q, cache, metadata, scale, window, soft_cap, sinks)
    platform = jax.default_backend()
    chosen, _ = choose_attention([layer], metadata.block_size, cache.k.dtype, platform, implementation)
    built = chosen.build(metadata, GroupSpec(metadata.block_size, (layer,)))
    return chosen.attend(q, cache, built, layer, sinks)


def _checked_layer(
    q: Float[Array, "T H D"],
    cache: KVCache,
    metadata: CommonAttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, "H"] | None,
) -> AttentionLayer:
    if q.ndim != 3 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q must be a floating-point array [tokens, heads, head size], not {q.dtype} {q.shape}")
    num_tokens, num_heads, head_dim = q.shape
    if cache.k.ndim != 4 or cache.k.shape != cache.v.shape or cache.k.shape[3] != head_dim:
        raise ValueError(
            f"both caches must be [blocks, block size, kv heads, {head_dim}] (q's head size), "
            f"not {cache.k.shape} and {cache.v.shape}"
        )
    if cache.k.shape[1] != metadata.block_size:
        raise ValueError(f"the cache has blocks of {cache.k.shape[1]}, the metadata of {metadata.block_size}")
    if metadata.req_indices.shape[0] != num_tokens:
        raise ValueError(f"q has {num_tokens} tokens, the metadata {metadata.req_indices.shape[0]}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks must have shape ({num_heads},), one per query head, not {sinks.shape}")
    return AttentionLayer("paged_attention", num_heads, cache.k.shape[2], head_dim, scale, window, soft_cap)
