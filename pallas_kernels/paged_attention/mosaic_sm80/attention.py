"""The Ampere and Ada kernels as an implementation of paged attention."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.typing import DTypeLike

from pallas_kernels.configurations import ASYNC_COPIES, TENSOR_CORES, WIDE_LOADS, KernelConfiguration
from pallas_kernels.gpus import Device, current_device, dotted
from pallas_kernels.implementation import AttentionLayer
from pallas_kernels.paged_attention.configurations import attention_configurations
from pallas_kernels.paged_attention.mosaic.attention import BLOCK_SIZES, GROUPS, HEAD_DIMS, MosaicAttention
from pallas_kernels.paged_attention.mosaic.plan import Plan
from pallas_kernels.paged_attention.mosaic_sm80 import products
from pallas_kernels.paged_attention.mosaic_sm80.kernel import attention
from pallas_kernels.paged_attention.mosaic_sm80.plan import PROCESSORS, Processor, make_plan
from pallas_kernels.paged_attention.mosaic_sm80.rows import copy_row


@dataclass(frozen=True)
class MosaicSm80Attention(MosaicAttention):
    name: ClassVar[str] = "mosaic_sm80"
    kernel = staticmethod(attention)

    def refuses_device(self, device: Device) -> str | None:
        if device.capability in PROCESSORS:
            return None
        return (
            f"it needs a GPU of compute capability 8.x (Ampere, Ada), not {device.kind} ({dotted(device.capability)})"
        )

    def plan(self, layer: AttentionLayer, num_tokens: int, num_rows: int, block_size: int, causal: bool) -> Plan:
        device = current_device()
        processor = PROCESSORS[(8, 0) if device.capability not in PROCESSORS else device.capability]
        if device.gpu is not None:
            processor = Processor(device.gpu.num_sms, processor.shared_bytes)
        return make_plan(layer, num_tokens, num_rows, block_size, causal, processor, self.stages, self.workers)

    def store(self, dtype: DTypeLike) -> Callable[[Any, Any], None]:
        device = products.Device(dtype, self.interpret is not None)

        def store(source: Any, to: Any) -> None:
            device.meet()
            copy_row(source, to)
            device.meet()

        return store

    def configurations(self) -> Iterable[KernelConfiguration]:
        """Those of mixed steps, and with heads of 64 of decodes: with others, what is compiled is the same."""
        configurations = attention_configurations(
            self,
            head_dims=HEAD_DIMS,
            groups=GROUPS,
            block_sizes=BLOCK_SIZES,
            capabilities=((8, 0), (8, 9)),
            needs=frozenset({TENSOR_CORES, ASYNC_COPIES, WIDE_LOADS}),
        )
        return (each for each in configurations if each.config.startswith("mixed") or " d64 " in each.config)
