"""Paged attention as Pallas Triton kernels: every NVIDIA GPU from compute capability 8.0 on."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

import jax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from pallas_kernels import triton_backend as triton
from pallas_kernels.configurations import ASYNC_COPIES, TENSOR_CORES, WIDE_LOADS, KernelConfiguration
from pallas_kernels.gpus import current_device
from pallas_kernels.implementation import AttentionLayer, AttentionSupport, GroupSpec
from pallas_kernels.metadata import CommonAttentionMetadata, KVCache
from pallas_kernels.paged_attention.configurations import attention_configurations
from pallas_kernels.paged_attention.triton_kernel import Program, attend
from pallas_kernels.paged_attention.triton_work import MOST_PROGRAMS, Tiling, Work, divide

# What the division of work depends on, of a layer: (query heads a kv head, kv heads, window, head size).
Kind = tuple[int, int, int | None, int]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TritonMetadata:
    block_table: Int32[Array, "R W"]
    work: tuple[Work, ...]  # one per kind of layer
    kinds: tuple[Kind, ...] = field(metadata={"static": True})
    causal: bool = field(metadata={"static": True})


@dataclass(frozen=True)
class TritonAttention:
    """Attributes:
    interpret: runs on any platform, as plain JAX operations, a program after the other. For tests.
    most_programs: how far the keys of a step are divided, at most.
    """

    interpret: bool = False
    most_programs: int = MOST_PROGRAMS

    name = "triton"
    support = AttentionSupport.ALWAYS

    def refuses(self, layer: AttentionLayer, block_size: int, dtype: DTypeLike, platform: str) -> str | None:
        reason = (None if self.interpret else triton.refuses_device(platform)) or triton.refuses_dtype(dtype)
        if reason is not None:
            return reason
        if layer.head_dim % 8 or layer.head_dim > 256:
            return f"the head size must be a multiple of 8 and at most 256, not {layer.head_dim}"
        if layer.num_heads // layer.num_kv_heads > 64:
            return f"at most 64 query heads may share a kv head, not {layer.num_heads // layer.num_kv_heads}"
        if not layer.scale > 0:
            return f"the scale must be above 0, not {layer.scale}"
        return None

    def build(self, common: CommonAttentionMetadata, group: GroupSpec, common_prefix_len: int = 0) -> TritonMetadata:
        """The division of work, for each kind of layer in the group.

        Raises:
            ValueError: the group names no layers.
        """
        if not group.layers:
            raise ValueError("triton divides the work by what the layers are: GroupSpec.layers must name them")
        kinds = tuple(dict.fromkeys(_kind(layer) for layer in group.layers))
        work = []
        for heads, kv_heads, window, head_dim in kinds:
            plan = plan_for(heads, head_dim, current_device().capability)
            work.append(divide(common, heads, kv_heads, window, plan.small, plan.large, self.most_programs))
        return TritonMetadata(common.block_table, tuple(work), kinds, common.causal)

    def update_block_table(
        self, metadata: TritonMetadata, block_table: Int32[Array, "R W"], slot_mapping: Int32[Array, "T"]
    ) -> TritonMetadata:
        return dataclasses.replace(metadata, block_table=block_table)

    def attend(
        self,
        q: Float[Array, "T H D"],
        cache: KVCache,
        metadata: TritonMetadata,
        layer: AttentionLayer,
        sinks: Float[Array, "H"] | None = None,
    ) -> Float[Array, "T H D"]:
        """Raises:
        ValueError: a window without causality; a layer unlike those that `build` was told of.
        """
        if layer.window is not None and not metadata.causal:
            raise ValueError(f"a window ({layer.window}) needs causal attention")
        if _kind(layer) not in metadata.kinds:
            raise ValueError(f"build was not told of a layer like {layer}; it was told of {metadata.kinds}")
        work = metadata.work[metadata.kinds.index(_kind(layer))]
        heads, _, _, head_dim = _kind(layer)
        plan = plan_for(heads, head_dim, current_device().capability)
        # Where there are large tiles, one kernel has both kinds, and what it is compiled for suits the large ones.
        num_warps, num_stages = plan.with_large if work.num_large else plan.small_alone
        program = Program(layer, plan.small, plan.large, num_warps, num_stages, metadata.causal, self.interpret)
        return attend(program, q, cache, metadata.block_table, work, sinks)

    def configurations(self) -> Iterable[KernelConfiguration]:
        return attention_configurations(
            self,
            head_dims=(64, 80, 96, 128, 256),
            groups=(1, 3, 4, 6, 7, 8, 16, 32),
            block_sizes=(1, 8, 16, 32, 64, 128, 256),
            capabilities=triton.CAPABILITIES,
            needs=frozenset({TENSOR_CORES, ASYNC_COPIES, WIDE_LOADS}),
        )


def _kind(layer: AttentionLayer) -> Kind:
    return layer.num_heads // layer.num_kv_heads, layer.num_kv_heads, layer.window, layer.head_dim


@dataclass(frozen=True)
class Plan:
    """Attributes:
    with_large, small_alone: (warps, stages of the pipeline of loads) of a kernel with both kinds of tiles, and of one
        with small tiles alone.
    """

    small: Tiling
    large: Tiling
    with_large: tuple[int, int] = (8, 3)
    small_alone: tuple[int, int] = (4, 3)


def plan_for(group_size: int, head_dim: int, capability: tuple[int, int] | None) -> Plan:
    """What is compiled for a kind of layer on a GPU.

    A product has at least 16 rows, and every tile at least one token's heads. Fewer than three stages would leave the
    block table's entries out of the pipeline, and each block would wait for them. Registers bound the large tiles:
    compiled for sm_80 and sm_89, 128 rows with 64 keys of 128 spill with 8 warps, and with 32 keys they take 200
    registers; with keys of 64 it is 32 that spill and 64 that take 162. For sm_90a 64 keys of 128 take 198.
    """
    rows = triton.next_power_of_two(group_size)
    wide, hopper = head_dim > 128, capability is not None and capability >= (9, 0)
    large = Tiling(max(64 if wide else 128, rows), 64 if (hopper and not wide) or head_dim <= 64 else 32)
    return Plan(Tiling(max(16, rows), 64), large)
