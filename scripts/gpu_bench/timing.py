"""How long device programs take, and the ceilings that this device reaches today."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp


def seconds_of(call: Callable[..., Any], *args: Any, at_least: int = 5, for_seconds: float = 0.5) -> float:
    """Median time of `call(*args)` once it is warm, until its results are there."""
    jax.block_until_ready(call(*args))
    times: list[float] = []
    end = time.perf_counter() + for_seconds
    while len(times) < at_least or (time.perf_counter() < end and len(times) < 200):
        start = time.perf_counter()
        jax.block_until_ready(call(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def ceilings(tiny: bool) -> Iterator[dict[str, Any]]:
    """Memory read and copied, and bfloat16 products, as fast as XLA's own programs do them here."""
    numbers = (1 << 16) if tiny else (1 << 31)  # bfloat16: 4 GB
    x = jnp.ones((numbers // 1024, 1024), jnp.bfloat16)
    read = jax.jit(lambda x: jnp.max(x))
    yield {"ceiling": "memory read", "bytes_per_s": 2 * numbers / seconds_of(read, x)}
    copied = jax.jit(lambda x: -x)
    yield {"ceiling": "memory copied", "bytes_per_s": 4 * numbers / seconds_of(copied, x)}
    del x
    n = 64 if tiny else 8192
    a, b = jnp.ones((n, n), jnp.bfloat16) * 0.5, jnp.ones((n, n), jnp.bfloat16)
    # Several in one program, each from the last: what starting a program costs doesn't count.
    repeat = 2 if tiny else 8

    @jax.jit
    def products(a: jax.Array, b: jax.Array) -> jax.Array:
        for _ in range(repeat):
            a = (a @ b) * jnp.bfloat16(1 / n)
        return a

    yield {"ceiling": "bfloat16 products", "flops_per_s": repeat * 2 * n**3 / seconds_of(products, a, b)}
