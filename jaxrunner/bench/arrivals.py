"""When requests come: all at once, at a fixed rate, at random, in bursts, or as a trace has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxrunner.arrival_trace import Arrival

Process = Literal["fixed", "poisson", "bursts"]


def arrival_times(
    count: int,
    rate: float,
    process: Process = "poisson",
    *,
    burstiness: float = 1.0,
    burst_size: int = 8,
    seed: int = 0,
) -> list[float]:
    """Seconds from the start at which each of ``count`` requests comes; the first at 0.

    Args:
        rate: requests per second on average; infinite: all at once.
        process: "fixed": evenly; "poisson": independently (with ``burstiness`` other than 1, gaps are gamma
            distributed with that shape, as in vLLM: below 1 burstier, above 1 more even); "bursts": ``burst_size``
            together, the bursts evenly.

    Raises:
        ValueError: a rate, burstiness or size that is not positive, or an unknown process.
    """
    if not rate > 0 or not burstiness > 0 or burst_size < 1:
        raise ValueError(
            f"rate and burstiness must be above 0 and burst_size at least 1, got {rate}, {burstiness}, {burst_size}"
        )
    if math.isinf(rate):
        return [0.0] * count
    if process == "fixed":
        return [i / rate for i in range(count)]
    if process == "bursts":
        return [i // burst_size * burst_size / rate for i in range(count)]
    if process != "poisson":
        raise ValueError(f"process must be 'fixed', 'poisson' or 'bursts', got {process!r}")
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), max(count - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def trace_times(arrivals: Sequence[Arrival], speedup: float = 1.0) -> list[float]:
    """A trace's own times, ``speedup`` times as fast."""
    if not speedup > 0:
        raise ValueError(f"speedup must be above 0, got {speedup}")
    return [a.time / speedup for a in arrivals]
