"""The Hopper kernels as an implementation of paged attention."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.configurations import TMA_LOADS, WGMMA, KernelConfiguration
from pallas_kernels.gpus import Device, current_device, dotted
from pallas_kernels.implementation import AttentionLayer
from pallas_kernels.paged_attention.configurations import attention_configurations
from pallas_kernels.paged_attention.mosaic.attention import BLOCK_SIZES, GROUPS, HEAD_DIMS, MosaicAttention
from pallas_kernels.paged_attention.mosaic.plan import Plan
from pallas_kernels.paged_attention.mosaic_sm90.kernel import attention
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
    kernel = staticmethod(attention)

    def refuses_device(self, device: Device) -> str | None:
        if device.capability == CAPABILITY:
            return None
        return f"it needs a GPU of compute capability 9.0 (Hopper), not {device.kind} ({dotted(device.capability)})"

    def plan(self, layer: AttentionLayer, num_tokens: int, num_rows: int, block_size: int, causal: bool) -> Plan:
        gpu = current_device().gpu
        num_sms = NUM_SMS if gpu is None else gpu.num_sms
        overrides = self.stages, self.workers, self.warpgroups
        return make_plan(layer, num_tokens, num_rows, block_size, causal, num_sms, *overrides)

    def store(self, dtype: DTypeLike) -> Callable[[Any, Any], None]:
        return _store

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
