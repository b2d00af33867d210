"""The books of an imagined scheduler: its requests, their blocks, and the plan of the step it is making."""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxrunner.protocol import NewRequestData, SchedulerOutput
from jaxrunner.sampling_params import SamplingParams


class Live:
    """A request as its scheduler sees it.

    Attributes:
        length: tokens it has, prompt and outputs. ``computed`` of them have keys and values.
        quota: outputs after which it leaves.
    """

    __slots__ = ("blocks", "computed", "num_outputs", "num_prompt", "prompt", "quota", "req_id")

    def __init__(self, req_id: str, prompt: list[int], quota: int) -> None:
        self.req_id, self.prompt, self.quota = req_id, prompt, quota
        self.num_prompt, self.num_outputs, self.computed = len(prompt), 0, 0
        self.blocks: list[int] = []

    @property
    def length(self) -> int:
        return self.num_prompt + self.num_outputs


class Books:
    """Keeps requests and blocks consistent while ``advance``, ``admit``, ... build a step; ``close`` ends it.

    One cache group. Block 0, the null block, is never handed out; blocks that come free are handed out last.
    """

    def __init__(self, seed: int, block_size: int, num_blocks: int, vocab_size: int, acceptance: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.block_size, self.vocab_size, self.acceptance = block_size, vocab_size, acceptance
        pool = 1 + np.arange(num_blocks)
        self.rng.shuffle(pool)
        self.free: deque[int] = deque(pool.tolist())
        self.running: list[Live] = []
        self.waiting: deque[tuple[int, Live]] = deque()  # preempted, with the step they come back in
        self.index = 0
        self.names = 0
        self.plan, self.sampled = SchedulerOutput(), dict[str, list[int]]()

    def tokens(self, n: int) -> list[int]:
        return self.rng.integers(0, self.vocab_size, n).tolist()

    def make(self, length: int, quota: int) -> Live:
        """A request that waits, with a prompt of ``length`` tokens."""
        live = Live(f"req-{self.names:06d}", self.tokens(length), quota)
        self.names += 1
        return live

    def pick(self, count: int) -> list[Live]:
        chosen = self.rng.choice(len(self.running), size=count, replace=False)
        return [self.running[i] for i in sorted(chosen.tolist())]

    def admit(self, live: Live, cached: int, count: int) -> None:
        """A waiting request is scheduled for ``count`` tokens behind ``cached`` ones that the prefix cache had."""
        live.computed = cached
        blocks = self._grow(live, cached + count)
        self.running.append(live)
        params = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, max_tokens=4096)
        self.plan.scheduled_new_reqs.append(NewRequestData(live.req_id, live.prompt, (blocks,), cached, params))
        live.prompt = []  # the plan's alone: whoever reads it may let it go
        self._schedule(live, count, 0)

    def advance(self, live: Live, count: int, drafts: int = 0) -> None:
        """A running request is scheduled for ``count`` tokens, ``drafts`` of them drafted."""
        self._cached(live, self._grow(live, live.computed + count))
        self._schedule(live, count, drafts)

    def preempt(self, live: Live, until: int) -> None:
        self.running.remove(live)
        self._release(live)
        self.waiting.append((until, live))
        self.plan.preempted_req_ids.add(live.req_id)

    def resume(self, live: Live) -> None:
        """A preempted request comes back with other blocks; the prefix cache has all but up to a block's tokens."""
        live.computed = (live.length - 1) // self.block_size * self.block_size
        self.running.append(live)
        self.plan.scheduled_cached_reqs.resumed_req_ids.add(live.req_id)
        self._cached(live, self._grow(live, live.length))
        self._schedule(live, live.length - live.computed, 0)

    def finish(self, live: Live) -> None:
        self.running.remove(live)
        self._release(live)
        self.plan.finished_req_ids.add(live.req_id)

    def close(self) -> tuple[SchedulerOutput, dict[str, list[int]]]:
        """The step's plan and what its requests sample; the next step begins."""
        done = self.plan, self.sampled
        for live in self.running:
            live.num_outputs += len(self.sampled.get(live.req_id, ()))
        self.index += 1
        self.plan, self.sampled = SchedulerOutput(), {}
        return done

    def _cached(self, live: Live, more: list[int]) -> None:
        cached = self.plan.scheduled_cached_reqs
        cached.req_ids.append(live.req_id)
        cached.new_block_ids.append((more,) if more else None)
        cached.num_computed_tokens.append(live.computed)
        cached.num_output_tokens.append(live.num_outputs)

    def _schedule(self, live: Live, count: int, drafts: int) -> None:
        self.plan.num_scheduled_tokens[live.req_id] = count
        self.plan.total_num_scheduled_tokens += count
        if live.computed + count - drafts < live.length:  # a chunk that doesn't reach the last token samples nothing
            live.computed += count
            self.sampled[live.req_id] = []
            return
        kept, drafted = 0, list[int]()
        if drafts:
            self.plan.scheduled_spec_decode_tokens[live.req_id] = drafted = self.tokens(drafts)
            while kept < drafts and self.rng.random() < self.acceptance:
                kept += 1
        self.sampled[live.req_id] = drafted[:kept] + self.tokens(1)
        live.computed += count - drafts + kept

    def _grow(self, live: Live, upto: int) -> list[int]:
        more = [self.free.popleft() for _ in range(-(-upto // self.block_size) - len(live.blocks))]
        live.blocks += more
        return more

    def _release(self, live: Live) -> None:
        self.free.extend(reversed(live.blocks))
        live.blocks = []
