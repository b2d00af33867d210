"""A naive model of the persistent batch: dictionaries and lists, no request indices, no NumPy.

``NaiveBatch.apply`` merges a plan as the documents say it in words; ``view`` is then what a scheduled request must look
like in the step, and ``complaint`` (``naive_rules``) why a plan is impossible.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxrunner.protocol import SchedulerOutput
from jaxrunner.sampling_params import SamplingParams


@dataclass(frozen=True)
class Limits:
    """What an ``InputBatch`` is made for; ``InputBatch(**vars(limits))`` makes it."""

    max_num_reqs: int = 5
    max_model_len: int = 24
    max_num_batched_tokens: int = 40
    vocab_size: int = 50
    block_sizes: tuple[int, ...] = (4,)
    kernel_block_sizes: tuple[int, ...] | None = None
    num_blocks: int = 64
    num_speculative_tokens: int = 2
    eos_token_ids: tuple[int, ...] = (49,)
    seed: int = 3

    @property
    def kernel_sizes(self) -> tuple[int, ...]:
        return self.kernel_block_sizes or self.block_sizes

    @property
    def groups(self) -> range:
        return range(len(self.block_sizes))


@dataclass
class NaiveRequest:
    """``blocks``: manager ids per group, None while the request is preempted."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    blocks: list[list[int]] | None
    computed: int = 0
    drafts: list[int] = field(default_factory=list)


class View(NamedTuple):
    """A scheduled request in the step. ``blocks`` and ``slots`` are per group and in kernel blocks."""

    tokens: list[int]
    positions: list[int]
    seq_len: int
    discard: bool
    prefilling: bool
    num_logits: int
    blocks: list[list[int]]
    slots: list[list[int]]
    region: int  # 0 decode, 1 short extend, 2 long extend, 3 prefill; for a threshold


class NaiveBatch:
    """What the runner must know after each plan. ``rows`` is the order of the step."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests: dict[str, NaiveRequest] = {}
        self.rows: list[str | None] = []  # None: given up
        self.entered: set[str] = set()  # new or back since the last step that ran

    def apply(self, so: SchedulerOutput) -> None:
        cached = so.scheduled_cached_reqs
        for req_id in so.finished_req_ids:
            self.forget(req_id)
        for req_id in so.preempted_req_ids | cached.resumed_req_ids:
            if req_id in self.requests:
                self.requests[req_id].blocks, self.requests[req_id].computed = None, 0
                self._leave(req_id)
        for req_id in self.rows:
            if req_id is not None and req_id not in cached.req_ids:
                self._leave(req_id)
        for request in self.requests.values():
            request.drafts = []
        for data in so.scheduled_new_reqs:
            prefill = data.prompt_token_ids if data.prefill_token_ids is None else data.prefill_token_ids
            self.requests[data.req_id] = NaiveRequest(
                [int(t) for t in prefill],
                len(data.prompt_token_ids),
                data.sampling_params or SamplingParams(temperature=0.0),
                [list(ids) for ids in data.block_ids],
                data.num_computed_tokens,
            )
            self.entered.add(data.req_id)
            self._take_row(data.req_id)
        for i, req_id in enumerate(cached.req_ids):
            self._merge(so, i, self.requests[req_id])
            if req_id not in self.rows:
                self._take_row(req_id)
        self.condense()
        for req_id, drafts in so.scheduled_spec_decode_tokens.items():
            self.requests[req_id].drafts = list(drafts)

    def _merge(self, so: SchedulerOutput, i: int, request: NaiveRequest) -> None:
        cached = so.scheduled_cached_reqs
        req_id, brought = cached.req_ids[i], cached.new_block_ids[i]
        if request.blocks is None:
            request.tokens = [int(t) for t in cached.all_token_ids.get(req_id, request.tokens)]
            request.blocks = [[] for _ in self.limits.groups]
            self.entered.add(req_id)
        request.computed = cached.num_computed_tokens[i]
        if cached.new_token_ids:
            elsewhere = list(cached.new_token_ids[i])
            known = len(request.tokens) - request.computed  # so many of them are here already
            request.tokens += elsewhere[max(known, 0) :]
        if cached.num_output_tokens:
            del request.tokens[request.num_prompt + cached.num_output_tokens[i] :]
        for held, more in zip(request.blocks, brought or (), strict=bool(brought)):
            held += more

    def forget(self, req_id: str) -> None:
        """Finished or aborted, whatever it was."""
        self._leave(req_id)
        self.entered.discard(req_id)
        self.requests.pop(req_id, None)

    def condense(self) -> None:
        """The last row moves into the lowest hole until there is none."""
        while None in self.rows:
            last = self.rows.pop()
            if last is not None:
                self.rows[self.rows.index(None)] = last

    def _leave(self, req_id: str) -> None:
        self.entered.discard(req_id)
        if req_id in self.rows:
            self.rows[self.rows.index(req_id)] = None

    def _take_row(self, req_id: str) -> None:
        if None in self.rows:
            self.rows[self.rows.index(None)] = req_id
        else:
            self.rows.append(req_id)

    def holders(self) -> dict[str, NaiveRequest]:
        """Those that have a request index: running or merely unscheduled."""
        return {r: request for r, request in self.requests.items() if request.blocks is not None}

    def kernel_blocks(self, request: NaiveRequest, group: int) -> list[int]:
        """A request's blocks as the kernels address them."""
        ratio = self.limits.block_sizes[group] // self.limits.kernel_sizes[group]
        return [block * ratio + j for block in (request.blocks or [[]] * (group + 1))[group] for j in range(ratio)]

    def view(self, req_id: str, count: int, threshold: int = 1) -> View:
        """``req_id`` scheduled for ``count`` tokens."""
        request = self.requests[req_id]
        start, end = request.computed, request.computed + count
        positions, sequence = list(range(start, end)), request.tokens + request.drafts
        blocks, slots = [], []
        for group in self.limits.groups:
            size, held = self.limits.kernel_sizes[group], self.kernel_blocks(request, group)
            blocks.append(held[: -(-end // size)])
            slots.append([held[p // size] * size + p % size for p in positions])
        if start == 0:
            region = 3
        elif count > threshold:
            region = 2
        else:
            region = 0 if start >= request.num_prompt else 1
        return View(
            tokens=[sequence[p] for p in positions],
            positions=positions,
            seq_len=end,
            discard=end < len(request.tokens),
            prefilling=start < request.num_prompt,
            num_logits=1 + len(request.drafts),
            blocks=blocks,
            slots=slots,
            region=region,
        )
