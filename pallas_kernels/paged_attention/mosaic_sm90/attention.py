"""The Hopper kernels as an implementation of paged attention."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int32

from pallas_kernels.configurations import TMA_LOADS, WGMMA, KernelConfiguration
from pallas_kernels.gpus import Device, current_device
from pallas_kernels.implementation import AttentionLayer
from pallas_kernels.metadata import KVCache
from pallas_kernels.paged_attention.configurations import attention_configurations
from pallas_kernels.paged_attention.mosaic.attention import BLOCK_SIZES, GROUPS, HEAD_DIMS, MosaicAttention
from pallas_kernels.paged_attention.mosaic.merge import merge
from pallas_kernels.paged_attention.mosaic.plan import Plan
from pallas_kernels.paged_attention.mosaic.work import Work
from pallas_kernels.paged_attention.mosaic_sm90 import kernel
from pallas_kernels.paged_attention.mosaic_sm90.plan import make_plan

CAPABILITY = (9, 0)
NUM_SMS = 132  # of a Hopper GPU whose data sheet isn't known


@dataclass(frozen=True)
class MosaicSm90Attention(MosaicAttention):
    """Attributes:
    warpgroups: instead of those that `make_plan` would choose.
    """

    warpgroups: int | None = None

    name: ClassVar[str] = "mosaic_sm90"

    def refuses_device(self, device: Device) -> str | None:
        if device.capability == CAPABILITY:
            return None
        return f"it needs a GPU of compute capability 9.0 (Hopper), not {device.kind} ({device.capability})"

    def plan(self, layer: AttentionLayer, num_tokens: int, num_rows: int, block_size: int, causal: bool) -> Plan:
        gpu = current_device().gpu
        num_sms = NUM_SMS if gpu is None else gpu.num_sms
        overrides = self.stages, self.workers, self.warpgroups
        return make_plan(layer, num_tokens, num_rows, block_size, causal, num_sms, *overrides)

    def run(
        self,
        q: Float[Array, "T H D"],
        cache: KVCache,
        block_table: Int32[Array, "R W"],
        work: Work,
        layer: AttentionLayer,
        sinks: Float[Array, "H"] | None,
    ) -> Float[Array, "T Hkv G D"]:
        out, partials = kernel.attention(
            q, cache, block_table, work, sinks, layer.scale, layer.soft_cap, self.interpret
        )
        if partials is None:
            return out
        return merge(out, partials, work, _store, f"merge_attention_{self.name}", self.interpret)

    def configurations(self) -> Iterable[KernelConfiguration]:
        return attention_configurations(
            self,
            head_dims=HEAD_DIMS,
            groups=GROUPS,
            block_sizes=BLOCK_SIZES,
            capabilities=(CAPABILITY,),
            needs=frozenset({WGMMA, TMA_LOADS}),
        )


def _store(source: Any, to: Any) -> None:
    """A bulk copy of what was just written to shared memory."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(source, to)
    plgpu.wait_smem_to_gmem(0)
