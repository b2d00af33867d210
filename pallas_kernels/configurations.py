"""What there is to compile of the GPU kernels: every configuration that a step can pick, as shapes without memory.

An implementation lists its own, and `configurations` collects them from the lists that choices are made from; so an
implementation that can be chosen is one that `scripts/check_kernels.py` compiles for every GPU that it is for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# What the machine code of a configuration must have. Absent: it fails the check.
TENSOR_CORES = "tensor cores"  # mma; on sm_90 with at least 64 rows a tile wgmma, see WGMMA
WGMMA = "wgmma"  # on Hopper; elsewhere as TENSOR_CORES
TMA_LOADS = "TMA loads"  # bulk copies of pages
ASYNC_COPIES = "16-byte cp.async"  # or TMA
WIDE_LOADS = "16-byte loads"  # no loop over tokens or keys may load element by element
IN_PLACE = "in place"  # the donated arguments are aliased and nothing of their shape is copied


@dataclass(frozen=True)
class KernelConfiguration:
    """One kernel, one implementation, one set of static choices.

    Attributes:
        kernel: "paged_attention", "write_kv_cache", "slot_mapping", ...
        implementation: its name in the choice, such as "triton".
        config: what tells it from the others of the same kernel and implementation, such as
            "decode d128 g4 b16 bf16"; unique among them, with no tabs or line breaks.
        function: pure; it is jitted and lowered as it is, for a GPU, never run.
        args: its positional arguments, pytrees of `jax.ShapeDtypeStruct`.
        donate: positions of the arguments that are donated.
        capabilities: compute capabilities (major, minor) that it is for.
        needs: of the constants above.
        in_ci: CI compiles it; the whole matrix is for a person's time. All implementations together stay
            under 40 pairs of a configuration and a GPU.
    """

    kernel: str
    implementation: str
    config: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ((9, 0),)
    needs: frozenset[str] = frozenset()
    in_ci: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel}/{self.implementation}/{self.config}"


def kernel_tables() -> dict[str, Sequence[Any]]:
    """Every kernel, by name, with its implementations, best first: what choices are made from."""
    from pallas_kernels.paged_attention import IMPLEMENTATIONS as PAGED_ATTENTION  # they build on this module
    from pallas_kernels.rope import IMPLEMENTATIONS as ROPE_AND_WRITE_KV_CACHE
    from pallas_kernels.slot_mapping import IMPLEMENTATIONS as SLOT_MAPPING
    from pallas_kernels.write_kv_cache import IMPLEMENTATIONS as WRITE_KV_CACHE

    return {
        "paged_attention": PAGED_ATTENTION,
        "write_kv_cache": WRITE_KV_CACHE,
        "rope_and_write_kv_cache": ROPE_AND_WRITE_KV_CACHE,
        "slot_mapping": SLOT_MAPPING,
    }


def configurations() -> Iterator[KernelConfiguration]:
    """Those of every implementation of every kernel. An implementation without any has no GPU kernel of its own.

    Raises:
        ValueError: two have one name.
    """
    seen = set[str]()
    for table in kernel_tables().values():
        for implementation in table:
            for configuration in implementation.configurations():
                if configuration.name in seen:
                    raise ValueError(f"two kernel configurations are called {configuration.name!r}")
                seen.add(configuration.name)
                yield configuration
