"""What the layers of a cache group keep per block, and how many blocks there are.

A group is a set of layers that share one block table. Layers with a window may stand in a full attention group: all
their blocks are kept, those behind the window too. Giving these back early would be a spec of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """A layer that keeps keys and values of every token: arrays [N, B, Hkv, D] each.

    Attributes:
        block_size: tokens per block (B).
        dtype: name of the caches' element type.

    Raises:
        ValueError: a size below 1 or an unknown dtype.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check_positive(block_size=self.block_size, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if self.dtype not in _ELEMENT_BYTES:
            raise ValueError(f"dtype must be one of {sorted(_ELEMENT_BYTES)}, got {self.dtype!r}")

    @property
    def dtype_bytes(self) -> int:
        return _ELEMENT_BYTES[self.dtype]

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer, keys and values together."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share a block table, by their index in the model."""

    layer_indices: tuple[int, ...]
    spec: FullAttentionSpec

    def __init__(self, layer_indices: Iterable[int], spec: FullAttentionSpec) -> None:
        object.__setattr__(self, "layer_indices", tuple(layer_indices))
        object.__setattr__(self, "spec", spec)
        if not self.layer_indices:
            raise ValueError("layer_indices is empty: a cache group needs at least one layer")

    @property
    def bytes_per_block(self) -> int:
        return len(self.layer_indices) * self.spec.page_size_bytes


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The caches of a model: groups, each with a pool of ``num_blocks`` blocks of its own.

    Attributes:
        num_blocks: blocks in every group's pool, the null block included (N).

    Raises:
        ValueError: fewer than 2 blocks, no group, or a layer in two groups.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    def __init__(self, num_blocks: int, groups: Iterable[KVCacheGroup]) -> None:
        object.__setattr__(self, "num_blocks", num_blocks)
        object.__setattr__(self, "groups", tuple(groups))
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 2:
            raise ValueError(
                f"num_blocks must be an integer of at least 2 (block 0 is never handed out), got {num_blocks!r}"
            )
        if not self.groups:
            raise ValueError("groups is empty: the caches need at least one group of layers")
        layers = [layer for group in self.groups for layer in group.layer_indices]
        twice = sorted({layer for layer in layers if layers.count(layer) > 1})
        if twice:
            raise ValueError(f"layers {twice} stand more than once in the cache groups; each belongs to one")

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one more block costs, over all groups and layers."""
        return sum(group.bytes_per_block for group in self.groups)

    @property
    def max_request_tokens(self) -> int:
        """Tokens whose keys and values the pools can hold when one request has them to itself."""
        return min((self.num_blocks - 1) * group.spec.block_size for group in self.groups)
