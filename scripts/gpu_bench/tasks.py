"""What `bench_gpu.py` can be told to do, without importing what does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Limits(NamedTuple):
    """Seconds that must be left of the budget to begin, and that a task may take at most."""

    needed: float
    most: float


# In order of value. "device" always comes first: it says what there is.
PARTS = {
    "device": Limits(0, 60),
    "numerics": Limits(25, 90),
    "ceilings": Limits(15, 40),
    "attention": Limits(25, 90),
    "writes": Limits(15, 40),
    "torch": Limits(40, 70),
    "uploads": Limits(10, 30),
    "step": Limits(80, 200),
    "text": Limits(40, 120),
}


@dataclass(frozen=True)
class Task:
    """What one process does.

    Attributes:
        part: of PARTS.
        group: of the part: an implementation of attention, "kernels beside attention", or all of it ("").
        tiny: sizes for a CPU.
        attention: the implementation that steps and texts are asked to have.
        model: that writes texts.
        torch_python: of an environment with PyTorch.
        ceilings: what was measured of this device, by name.
        seconds: that it has.
    """

    part: str
    group: str = ""
    tiny: bool = False
    attention: str = "auto"
    model: str = ""
    torch_python: str | None = None
    ceilings: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 60.0


BESIDE_ATTENTION = "kernels beside attention"


def groups(part: str, implementations: Mapping[str, str | None]) -> list[str]:
    """What of a part has a process of its own: a kernel that breaks something takes only its own group along.

    Args:
        implementations: of attention, with the reason why this device can't have it, or None.
    """
    takes = [name for name, refusal in implementations.items() if refusal is None]
    if part == "numerics":
        return [BESIDE_ATTENTION, *takes]
    return takes if part == "attention" else [""]
