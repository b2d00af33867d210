"""An implementation of paged attention by a Mosaic kernel, but for the kernel: what it takes, and a step's metadata."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from pallas_kernels.gpus import Device, current_device
from pallas_kernels.implementation import AttentionLayer, AttentionSupport, GroupSpec
from pallas_kernels.metadata import CommonAttentionMetadata, KVCache
from pallas_kernels.paged_attention.mosaic import toolchain
from pallas_kernels.paged_attention.mosaic.merge import merge
from pallas_kernels.paged_attention.mosaic.plan import Plan
from pallas_kernels.paged_attention.mosaic.work import Work, divide

GROUPS = (1, 2, 3, 4, 6, 7, 8, 16)
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "float16")

# What the division of work depends on, of a layer: (query heads a kv head, kv heads, head size, window, capped).
Kind = tuple[int, int, int, int | None, bool]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MosaicMetadata:
    block_table: Int32[Array, "R W"]
    work: tuple[Work, ...]  # one per kind of layer
    kinds: tuple[Kind, ...] = field(metadata={"static": True})


@dataclass(frozen=True)
class MosaicAttention(ABC):
    """Attributes:
    interpret: runs on any platform by JAX's interpreter of Mosaic kernels, which can look for races. For tests.
    stages, workers: instead of those that the plan would choose.
    """

    interpret: plgpu.InterpretGPUParams | None = None
    stages: int | None = None
    workers: int | None = None

    name: ClassVar[str]
    support: ClassVar[AttentionSupport] = AttentionSupport.ALWAYS
    # (q, cache, block_table, work, sinks, scale, soft_cap, interpret) -> (results of all whole tiles [T, Hkv, G, D],
    # what is to be merged into them, None with one worker).
    kernel: ClassVar[Callable[..., tuple[Array, Any]]]

    @abstractmethod
    def refuses_device(self, device: Device) -> str | None:
        """Why the kernel is not for this GPU."""

    @abstractmethod
    def plan(self, layer: AttentionLayer, num_tokens: int, num_rows: int, block_size: int, causal: bool) -> Plan:
        """What the kernel is compiled for, in a step of this shape."""

    @abstractmethod
    def store(self, dtype: DTypeLike) -> Callable[[Any, Any], None]:
        """How the merge copies a row that it has just written in shared memory to where it belongs."""

    def refuses(self, layer: AttentionLayer, block_size: int, dtype: DTypeLike, platform: str) -> str | None:
        if self.interpret is None:
            if platform != "gpu":
                return f"it needs an NVIDIA GPU, this is {platform}"
            reason = self.refuses_device(current_device()) or toolchain.refuses()
            if reason is not None:
                return reason
        group = layer.num_heads // layer.num_kv_heads
        for what, value, known in (
            ("query heads a kv head", group, GROUPS),
            ("the head size", layer.head_dim, HEAD_DIMS),
            ("the block size", block_size, BLOCK_SIZES),
            ("the dtype", jnp.dtype(dtype).name, DTYPES),
        ):
            if value not in known:
                return f"{what} must be one of {', '.join(map(str, known))}, not {value}"
        if not layer.scale > 0:
            return f"the scale must be above 0, not {layer.scale}"
        return None

    def build(self, common: CommonAttentionMetadata, group: GroupSpec, common_prefix_len: int = 0) -> MosaicMetadata:
        """The division of work, for each kind of layer in the group.

        Raises:
            ValueError: the group names no layers.
        """
        if not group.layers:
            raise ValueError(f"{self.name} divides the work by what the layers are: GroupSpec.layers must name them")
        num_tokens, num_rows = common.req_indices.shape[0], common.seq_lens.shape[0]
        layers = {_kind(layer): layer for layer in group.layers}
        work = tuple(
            divide(common, self.plan(layer, num_tokens, num_rows, common.block_size, common.causal))
            for layer in layers.values()
        )
        return MosaicMetadata(common.block_table, work, tuple(layers))

    def update_block_table(
        self, metadata: MosaicMetadata, block_table: Int32[Array, "R W"], slot_mapping: Int32[Array, "T"]
    ) -> MosaicMetadata:
        return dataclasses.replace(metadata, block_table=block_table)

    def attend(
        self,
        q: Float[Array, "T H D"],
        cache: KVCache,
        metadata: MosaicMetadata,
        layer: AttentionLayer,
        sinks: Float[Array, "H"] | None = None,
    ) -> Float[Array, "T H D"]:
        """Raises:
        ValueError: a window without causality; a layer unlike those that `build` was told of; q of another dtype than
            the cache's.
        """
        if _kind(layer) not in metadata.kinds:
            raise ValueError(f"build was not told of a layer like {layer}; it was told of {metadata.kinds}")
        work = metadata.work[metadata.kinds.index(_kind(layer))]
        if layer.window is not None and not work.plan.causal:
            raise ValueError(f"a window ({layer.window}) needs causal attention")
        if q.dtype != cache.k.dtype:
            raise ValueError(f"{self.name} needs queries of the cache's dtype, {cache.k.dtype}, not {q.dtype}")
        out, partials = self.kernel(
            q, cache, metadata.block_table, work, sinks, layer.scale, layer.soft_cap, self.interpret
        )
        if partials is not None:
            out = merge(out, partials, work, self.store(q.dtype), f"merge_attention_{self.name}", self.interpret)
        return out.reshape(q.shape)


def _kind(layer: AttentionLayer) -> Kind:
    group = layer.num_heads // layer.num_kv_heads
    return group, layer.num_kv_heads, layer.head_dim, layer.window, layer.soft_cap is not None
