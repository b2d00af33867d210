"""The yardstick: what reading a scheduler's plan costs, and the bare vector work of a steady decode step.

It is no lower bound, since lists can be read faster than here; it scales with the machine and its load, so that
a ratio to it can be compared between machines and hours.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import numpy as np

from scripts.host_bench.workload import TraceConfig, trace


def readings(num_reqs: int) -> dict[str, Callable[[], object]]:
    """Five ways into the plan of a steady step of ``num_reqs`` requests, and a decode's vector work."""
    *_, step = trace(TraceConfig("steady", num_reqs, warmup_steps=1, measured_steps=3))
    plan, cached = step.scheduler_output, step.scheduler_output.scheduled_cached_reqs
    ids, scheduled = cached.req_ids, plan.num_scheduled_tokens
    row = {req_id: i for i, req_id in enumerate(ids)}

    n, table_width, size = num_reqs, 512, 16
    tokens = np.zeros((1024, 8192), np.int32)
    table = np.zeros((1024, table_width), np.int32)
    starts = np.zeros(1025, np.int32)
    positions, gathered, slots = (np.zeros(8192, np.int32) for _ in range(3))
    computed, count = np.array(cached.num_computed_tokens, np.int32), np.arange(8192, dtype=np.int32)
    ones = np.ones(n, np.int32)

    def vector_work() -> None:
        np.cumsum(ones, out=starts[1 : n + 1])
        positions[:n] = computed
        gathered[:n] = tokens[count[:n], computed]
        blocks = table[count[:n], computed >> 4]
        np.multiply(blocks, size, out=slots[:n])
        slots[:n] += computed & (size - 1)

    return {
        "count of each request": lambda: np.fromiter(map(scheduled.__getitem__, ids), np.int32, n),
        "computed tokens": lambda: np.array(cached.num_computed_tokens, np.int32),
        "who has new blocks": lambda: [i for i, blocks in enumerate(cached.new_block_ids) if blocks is not None],
        "row of each request": lambda: np.fromiter(map(row.__getitem__, ids), np.int32, n),
        "same requests": lambda: scheduled.keys() == row.keys(),
        "vector work": vector_work,
    }


class Yardstick:
    """Samples of the yardstick, taken between measured steps: a shared machine changes speed by the second."""

    def __init__(self, num_reqs: int) -> None:
        self._work = list(readings(num_reqs).values())

    def sample(self, repeats: int = 7, warm: int = 3) -> float:
        """Microseconds: the sum of each reading's median time now, after ``warm`` untimed calls."""
        return sum(_median_us(call, repeats, warm) for call in self._work)


def _median_us(call: Callable[[], object], repeats: int, warm: int) -> float:
    for _ in range(warm):
        call()
    times = []
    for _ in range(repeats):
        start = perf_counter_ns()
        call()
        times.append(perf_counter_ns() - start)
    return float(np.median(times)) / 1e3
