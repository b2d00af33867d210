"""The GPU that a program is being compiled for: what kernels choose tiles and refuse cases by.

Not always the one in the machine: programs are also compiled for GPUs that are elsewhere (`scripts/check_kernels.py`),
and then the mesh in context tells.
"""

import re
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Gpu:
    """Facts of a GPU model, from NVIDIA's data sheets and the CUDA programming guide's table of capabilities.

    Attributes:
        kind: its name, as JAX's `device_kind` has it.
        capability: compute capability (major, minor): (9, 0) is Hopper, (8, 0) A100, (8, 9) Ada, (10, 0) B200.
        num_sms: streaming multiprocessors.
        shared_bytes: shared memory that one block can have.
        memory_bytes_per_s, bf16_flops_per_s: peaks of HBM and of the dense tensor cores.
        memory_bytes, l2_bytes: sizes.
    """

    kind: str
    capability: tuple[int, int]
    num_sms: int
    shared_bytes: int
    memory_bytes_per_s: float
    bf16_flops_per_s: float
    memory_bytes: int
    l2_bytes: int

    @property
    def arch(self) -> str:
        """ptxas's name, with the features of the architecture itself (wgmma, tcgen05) where it has any."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


GPUS: dict[str, Gpu] = {
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 232448, 4.8e12, 989e12, 141 * 10**9, 50 << 20),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 3.35e12, 989e12, 80 * 10**9, 50 << 20),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 2.039e12, 312e12, 80 * 10**9, 40 << 20),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 101376, 300e9, 121e12, 24 * 10**9, 48 << 20),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 232448, 8e12, 2250e12, 180 * 10**9, 126 << 20),
}

# What else a driver may call a GPU of a known capability; the first that matches.
_CAPABILITIES = (
    (r"\b(B200|GB200|B100)\b", (10, 0)),
    (r"\b(H100|H200|H800|H20|GH200)\b", (9, 0)),
    (r"\b(L4|L40|L40S|L20|RTX 40\d\d|RTX \d+ Ada)\b", (8, 9)),
    (r"\b(A10|A10G|A40|A16|A2|RTX 30\d\d|RTX A\d+)\b", (8, 6)),
    (r"\b(A100|A800|A30)\b", (8, 0)),
)


@dataclass(frozen=True)
class Device:
    """What a program is compiled for.

    Attributes:
        platform: "cpu", "gpu" (NVIDIA), ..., as `jax.default_backend()` names it.
        kind: JAX's `device_kind`.
        capability: compute capability; None where there is none or it isn't known.
    """

    platform: str
    kind: str
    capability: tuple[int, int] | None = None

    @property
    def gpu(self) -> Gpu | None:
        """Its data sheet; None if there is none here."""
        return next((gpu for gpu in GPUS.values() if gpu.kind == self.kind), None)


def dotted(numbers: tuple[int, ...] | None) -> str:
    """A capability or a version as it is written: (9, 0) is 9.0."""
    return "unknown" if numbers is None else ".".join(map(str, numbers))


def current_device() -> Device:
    """The device of the mesh in context (`jax.set_mesh`), also inside `jax.jit`; else the default one."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Device(abstract.platform, abstract.device_kind, capability_of(abstract.device_kind))
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    parsed = tuple(int(part) for part in str(capability).split(".")) if capability else ()
    return Device(device.platform, device.device_kind, (parsed[0], parsed[1]) if len(parsed) == 2 else None)


def capability_of(kind: str) -> tuple[int, int] | None:
    """Compute capability of a GPU that JAX calls `kind`; None if it isn't known here."""
    for gpu in GPUS.values():
        if gpu.kind == kind:
            return gpu.capability
    return next((capability for pattern, capability in _CAPABILITIES if re.search(pattern, kind)), None)
