"""Kernels of a paged-attention step: slot mapping, cache write, attention. Knows nothing of models or scheduling."""

from pallas_kernels.head_norms import HeadNorms, rms_norm
from pallas_kernels.implementation import (
    AttentionImplementation,
    AttentionLayer,
    AttentionSupport,
    GroupSpec,
    StepAttention,
    choose_attention,
)
from pallas_kernels.metadata import CommonAttentionMetadata, KVCache, request_indices
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope import RopeTable, apply_rope, norm_and_rope, rope_and_write_kv_cache
from pallas_kernels.slot_mapping import PAD_SLOT_ID, local_key_lens, slot_mapping
from pallas_kernels.write_kv_cache import write_kv_cache

__all__ = [
    "PAD_SLOT_ID",
    "AttentionImplementation",
    "AttentionLayer",
    "AttentionSupport",
    "CommonAttentionMetadata",
    "GroupSpec",
    "HeadNorms",
    "KVCache",
    "RopeTable",
    "StepAttention",
    "apply_rope",
    "choose_attention",
    "local_key_lens",
    "norm_and_rope",
    "paged_attention",
    "request_indices",
    "rms_norm",
    "rope_and_write_kv_cache",
    "slot_mapping",
    "write_kv_cache",
]
