"""The least a step takes in NumPy: the reads and writes that its plan cannot do without, and nothing else.

No order of rows, no condensing, no check, no sampling parameters, no bookkeeping of what was surplus, no cache groups,
no rotating buffers, no outputs: every request keeps a slot of its own, and slots are handed out from a list. What the
host path takes above this is the price of what it does besides, and of its Python lines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from time import perf_counter_ns

import numpy as np

from jaxrunner.protocol import SchedulerOutput
from scripts.host_bench.floor import Yardstick
from scripts.host_bench.replay import Replay, in_blocks
from scripts.host_bench.workload import TraceConfig, trace


class BareWork:
    """Tokens, counts and blocks by slot, and one buffer that a step's fields are written to.

    Attributes:
        slots: of every request, [max_num_reqs] at most.
        buffer: int32: the step's tokens, then of each request slot, start of its query, computed tokens, length.
    """

    def __init__(self, config: TraceConfig) -> None:
        width = -(-config.max_model_len // config.block_size)
        self.slots: dict[str, int] = {}
        self.tokens = np.zeros((config.max_num_reqs, config.max_model_len), np.int32)
        self.table = np.zeros((config.max_num_reqs, width), np.int32)
        self.buffer = np.zeros(config.max_num_batched_tokens + 4 * config.max_num_reqs, np.int32)
        self._free = list(range(config.max_num_reqs))
        self._num_blocks = np.zeros(config.max_num_reqs, np.int64)
        self._computed = np.zeros(config.max_num_reqs, np.int32)
        self._count = np.arange(config.max_num_batched_tokens, dtype=np.int32)

    def step(self, plan: SchedulerOutput) -> None:
        slots, cached, new = self.slots, plan.scheduled_cached_reqs, plan.scheduled_new_reqs
        self._free += [slots.pop(req_id) for req_id in plan.finished_req_ids]
        for request in new:
            slot = slots[request.req_id] = self._free.pop()
            prompt, blocks = request.prompt_token_ids, request.block_ids[0]
            if prompt is not None:
                self.tokens[slot, : len(prompt)] = prompt
            self.table[slot, : len(blocks)] = blocks
            self._num_blocks[slot] = len(blocks)
        ids = [*cached.req_ids, *(request.req_id for request in new)] if new else cached.req_ids
        n, scheduled = len(ids), plan.num_scheduled_tokens
        counts = np.fromiter(map(scheduled.__getitem__, ids), np.int32, n)
        slot_of = np.fromiter(map(slots.__getitem__, ids), np.int32, n)
        computed = np.array([*cached.num_computed_tokens, *(r.num_computed_tokens for r in new)], np.int32)
        grown = [(i, blocks[0]) for i, blocks in enumerate(cached.new_block_ids) if blocks is not None]
        if grown:
            for req_id in cached.resumed_req_ids:
                self._num_blocks[slots[req_id]] = 0
            grew = slot_of[[i for i, _ in grown]]
            self._num_blocks[grew] += _put(self.table, grew, self._num_blocks[grew], [blocks for _, blocks in grown])
        if drafts := plan.scheduled_spec_decode_tokens:
            self._computed[slot_of] = computed
            drafted = np.fromiter(map(slots.__getitem__, drafts), np.int32, len(drafts))
            _put(self.tokens, drafted, self._computed[drafted] + 1, drafts.values())
        starts = np.cumsum(counts, dtype=np.int32)
        total = int(starts[-1])
        starts -= counts
        rows = np.repeat(self._count[:n], counts)
        positions = computed[rows] + self._count[:total] - starts[rows]
        self.buffer[:total] = self.tokens[slot_of[rows], positions]
        fields = self.buffer[total : total + 4 * n].reshape(4, n)
        fields[0], fields[1], fields[2] = slot_of, starts, computed
        np.add(computed, counts, out=fields[3])


def _put(table: np.ndarray, rows: np.ndarray, starts: np.ndarray, lists: Collection[Sequence[int]]) -> list[int]:
    """Writes each list into its row of the table, from its start on; returns how long they are."""
    lengths = list(map(len, lists))
    shift = starts - np.cumsum(lengths) + lengths
    columns = np.repeat(shift, lengths) + np.arange(sum(lengths))
    table[np.repeat(rows, lengths), columns] = list(chain.from_iterable(lists))
    return lengths


def time_bare(
    config: TraceConfig,
    yardstick: Yardstick,
    clock: Callable[[], int] = perf_counter_ns,
    on_step: Callable[[], object] = lambda: None,
) -> Replay:
    """The phase "bare" of each measured step. Sampled tokens are not taken in: that is no part of it."""
    work, times, floor = BareWork(config), list[int](), list[float]()
    for steps in in_blocks(trace(config)):
        if steps[0].measured:
            floor.append(yardstick.sample())
        for step in steps:
            start = clock()
            work.step(step.scheduler_output)
            if step.measured:
                times.append(clock() - start)
            on_step()
    return Replay({"bare": np.array(times) / 1e3}, np.array(floor))
