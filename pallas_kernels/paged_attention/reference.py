"""The reference implementation: plain jax.numpy, differentiable, for any platform. It is the specification."""

from collections.abc import Iterable

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from pallas_kernels.configurations import KernelConfiguration
from pallas_kernels.implementation import AttentionLayer, AttentionSupport, GroupSpec
from pallas_kernels.metadata import CommonAttentionMetadata, KVCache
from pallas_kernels.paged_attention.blockwise import ReferenceMetadata, build
from pallas_kernels.paged_attention.gradient import attention


class ReferenceAttention:
    """Attention blocked over keys, in float32 whatever the cache's dtype.

    It reads the cache only where a query of the step sees a key: blocks outside a window are skipped, trip counts
    follow from the step's real lengths, and no array has a dimension of all keys.
    """

    name = "reference"
    support = AttentionSupport.ALWAYS

    def refuses(self, layer: AttentionLayer, block_size: int, dtype: DTypeLike, platform: str) -> str | None:
        """It takes every layer on every platform, but computes with floating-point caches alone."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return f"the cache must be of a floating-point dtype, not {jnp.dtype(dtype)}"
        return None

    def build(self, common: CommonAttentionMetadata, group: GroupSpec, common_prefix_len: int = 0) -> ReferenceMetadata:
        return build(common)

    def update_block_table(
        self, metadata: ReferenceMetadata, block_table: Int32[Array, "R W"], slot_mapping: Int32[Array, "T"]
    ) -> ReferenceMetadata:
        return metadata.replace_tables(block_table, slot_mapping)

    def attend(
        self,
        q: Float[Array, "T H D"],
        cache: KVCache,
        metadata: ReferenceMetadata,
        layer: AttentionLayer,
        sinks: Float[Array, "H"] | None = None,
    ) -> Float[Array, "T H D"]:
        if layer.window is not None and not metadata.common.causal:
            raise ValueError(f"a window ({layer.window}) needs causal attention")
        return attention(layer, q, cache, sinks, metadata)

    def configurations(self) -> Iterable[KernelConfiguration]:
        return ()
