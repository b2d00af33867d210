"""The Hopper kernels as an implementation of paged attention."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from pallas_kernels.configurations import TMA_LOADS, WGMMA, KernelConfiguration
from pallas_kernels.gpus import current_device
from pallas_kernels.implementation import AttentionLayer, AttentionSupport, GroupSpec
from pallas_kernels.metadata import CommonAttentionMetadata, KVCache
from pallas_kernels.paged_attention.configurations import attention_configurations
from pallas_kernels.paged_attention.mosaic_sm90 import kernel, toolchain
from pallas_kernels.paged_attention.mosaic_sm90.merge import merge
from pallas_kernels.paged_attention.mosaic_sm90.plan import make_plan
from pallas_kernels.paged_attention.mosaic_sm90.work import Work, divide

CAPABILITY = (9, 0)
GROUPS = (1, 2, 3, 4, 6, 7, 8, 16)
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "float16")
NUM_SMS = 132  # of a Hopper GPU whose data sheet isn't known

# What the division of work depends on, of a layer: (query heads a kv head, kv heads, head size, window, capped).
Kind = tuple[int, int, int, int | None, bool]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MosaicMetadata:
    block_table: Int32[Array, "R W"]
    work: tuple[Work, ...]  # one per kind of layer
    kinds: tuple[Kind, ...] = field(metadata={"static": True})


@dataclass(frozen=True)
class MosaicSm90Attention:
    """Attributes:
    interpret: runs on any platform by JAX's interpreter of Mosaic kernels, which can look for races. For tests.
    stages, workers, warpgroups: instead of those that `make_plan` would choose.
    """

    interpret: plgpu.InterpretGPUParams | None = None
    stages: int | None = None
    workers: int | None = None
    warpgroups: int | None = None

    name = "mosaic_sm90"
    support = AttentionSupport.ALWAYS

    def refuses(self, layer: AttentionLayer, block_size: int, dtype: DTypeLike, platform: str) -> str | None:
        if self.interpret is None:
            if platform != "gpu":
                return f"it needs an NVIDIA GPU, this is {platform}"
            device = current_device()
            if device.capability != CAPABILITY:
                return f"it needs a GPU of compute capability 9.0 (Hopper), not {device.kind} ({device.capability})"
            reason = toolchain.refuses()
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
        gpu = current_device().gpu
        num_tokens, num_rows = common.req_indices.shape[0], common.seq_lens.shape[0]
        layers = {_kind(layer): layer for layer in group.layers}
        work = []
        for layer in layers.values():
            plan = make_plan(
                layer,
                num_tokens,
                num_rows,
                common.block_size,
                common.causal,
                NUM_SMS if gpu is None else gpu.num_sms,
                self.stages,
                self.workers,
                self.warpgroups,
            )
            work.append(divide(common, plan))
        return MosaicMetadata(common.block_table, tuple(work), tuple(layers))

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
        out, partials = kernel.attention(
            q, cache, metadata.block_table, work, sinks, layer.scale, layer.soft_cap, self.interpret
        )
        if partials is not None:
            out = merge(out, partials, work, self.interpret)
        return out.reshape(q.shape)

    def configurations(self) -> Iterable[KernelConfiguration]:
        return attention_configurations(
            self,
            head_dims=HEAD_DIMS,
            groups=GROUPS,
            block_sizes=BLOCK_SIZES,
            capabilities=(CAPABILITY,),
            needs=frozenset({WGMMA, TMA_LOADS}),
        )


def _kind(layer: AttentionLayer) -> Kind:
    group = layer.num_heads // layer.num_kv_heads
    return group, layer.num_kv_heads, layer.head_dim, layer.window, layer.soft_cap is not None
