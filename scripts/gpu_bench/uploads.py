"""Ways to bring a step's buffer to the device, compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxrunner.shapes import StepShapes
from scripts.gpu_bench.timing import seconds_of


def uploads(tiny: bool) -> Iterator[dict[str, Any]]:
    """A row per size and way: seconds until a program has run on what was uploaded."""
    device = jax.devices()[0]
    pinned, there = SingleDeviceSharding(device, memory_kind="pinned_host"), SingleDeviceSharding(device)
    program = jax.jit(lambda x: x[:1] + 1)
    for tokens, reqs in ((8, 4),) if tiny else ((256, 256), (8192, 1024)):
        layout = StepShapes(tokens, reqs, token_buckets=(tokens,)).layouts[tokens]
        buffer = np.zeros(layout.size, np.int32)
        ways: dict[str, tuple[Callable[[Any], Any], Any]] = {
            "nothing uploaded": (program, jax.device_put(buffer, device)),
            "NumPy argument": (program, buffer),
            "device_put": (lambda x: program(jax.device_put(x, device)), buffer),
            "through pinned host memory": (lambda x: program(jax.device_put(jax.device_put(x, pinned), there)), buffer),
        }
        for name, (way, argument) in ways.items():
            row = {"upload": name, "bytes": buffer.nbytes, "step": f"{tokens} tokens, {reqs} rows"}
            try:
                yield row | {"seconds": seconds_of(way, argument, for_seconds=0.2)}
            except Exception as error:  # not every device has such memory
                yield row | {"failed": f"{type(error).__name__}: {error}"[:300]}
