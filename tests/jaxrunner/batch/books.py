"""The books of a scheduler, and a batch that follows its plans under the eyes of the naive model.

A plan runs everyone as far as the budget allows. What shall be different is wished for before ``step``: a request that
is skipped, preempted, cut into chunks, given drafts. Methods that name a request take a number and pick one of those
that it can be done to; where there is none, nothing happens. So every sequence of calls is a possible schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

import numpy as np

from jaxrunner.batch import (
    BufferRing,
    InputBatch,
    StepInputs,
    prepare_inputs,
    record_sampled,
    record_tokens,
    update_states,
)
from jaxrunner.invariants import check_invariants
from jaxrunner.protocol import NewRequestData, SchedulerOutput
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.shapes import StepShapes
from tests.jaxrunner.batch.naive import Limits, NaiveBatch
from tests.jaxrunner.batch.naive_checks import Checker, same

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.5, top_k=7, top_p=0.9),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[4, 5]),
    SamplingParams(temperature=2.0, min_p=0.25),
)


class Books:
    """Plans as a scheduler makes them, from its own counts."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits = limits or Limits()
        self.naive = NaiveBatch(limits)
        self.running: dict[str, int] = {}  # has an index -> computed tokens
        self.preempted: list[str] = []
        self.blocks: dict[str, list[list[int]]] = {}
        self.elsewhere: dict[str, list[int]] = {}  # tokens another stage sampled, not told yet
        self.free = [list(range(limits.num_blocks - 1, 0, -1)) for _ in limits.groups]
        self.used: list[Counter[int]] = [Counter() for _ in limits.groups]
        self.names = 0
        self.forget_wishes()

    def forget_wishes(self) -> None:
        self.wishes: dict[str, dict[str, Any]] = defaultdict(dict)
        self.finishing: set[str] = set()
        self.preempting: dict[str, bool] = {}  # whether to resume in the same step
        self.resuming: dict[str, bool] = {}  # whether to send the tokens
        self.submitting: list[dict[str, Any]] = []

    # ------------------------------------------------------------------ wishes
    def pick(self, which: int, among: Sequence[str]) -> str | None:
        return among[which % len(among)] if among else None

    def known(self, req_id: str) -> int:
        """Tokens the scheduler counts."""
        return len(self.naive.requests[req_id].tokens) + len(self.elsewhere.get(req_id, ()))

    def submit(self, prompt: int = 3, params: int = 0, hit: int = 0, chunk: int = 99, like: int | None = None) -> None:
        """A new request of ``prompt`` tokens, of which ``hit`` blocks are cached; ``like`` another one in its first
        tokens, whose computed blocks it then shares.
        """
        self.submitting.append({"prompt": prompt, "params": params, "hit": hit, "chunk": chunk, "like": like})

    def finish(self, which: int) -> None:
        req_id = self.pick(which, [*self.running, *self.preempted])
        if req_id is not None:
            self.finishing.add(req_id)

    def resubmit(self, which: int, prompt: int = 3, restart: bool = False) -> None:
        """Aborted, and in the same step a new request of its id; with its old tokens if it ``restart``s."""
        req_id = self.pick(which, [*self.running, *self.preempted])
        if req_id is not None and req_id not in self.finishing:
            self.finishing.add(req_id)
            again = {"prompt": prompt, "params": which, "hit": 0, "chunk": 99, "like": None, "req_id": req_id}
            self.submitting.insert(0, again | {"restart": restart})

    def preempt(self, which: int, resume: bool = False) -> None:
        """It loses its blocks; and has others in the same step if it shall ``resume``."""
        req_id = self.pick(which, list(self.running))
        if req_id is not None:
            self.preempting[req_id] = resume

    def resume(self, which: int, tokens: bool = False) -> None:
        """A preempted one comes back, and the plan has its tokens if ``tokens``."""
        req_id = self.pick(which, self.preempted)
        if req_id is not None:
            self.resuming[req_id] = tokens

    def wish(self, which: int, **wishes: Any) -> None:
        """For a running one: skip=True, chunk=n, drafts=[..], accept=n, ahead=n blocks, drop=n outputs, lose=True (its
        sample does not arrive), elsewhere=True (another stage has it).
        """
        req_id = self.pick(which, list(self.running))
        if req_id is not None:
            self.wishes[req_id] |= wishes

    # ------------------------------------------------------------------ the plan
    def plan(self) -> SchedulerOutput:
        so = SchedulerOutput()
        full = {r for r in [*self.running, *self.preempted] if self.known(r) >= self.limits.max_model_len}
        so.finished_req_ids = self.finishing | full
        old = {r: self.naive.requests[r].tokens for r in so.finished_req_ids & self.naive.requests.keys()}
        for req_id in so.finished_req_ids:
            self.gone(req_id)
        for req_id, again in self.preempting.items():
            if req_id in self.running:
                if not again:
                    so.preempted_req_ids.add(req_id)
                else:
                    self.resuming[req_id] = False
                self._release(req_id)
                del self.running[req_id]
                self.preempted.append(req_id)
        self._budget = self.limits.max_num_batched_tokens
        self._steady = list(self.running)  # their blocks have what is computed; those of who enters now have not
        for req_id in self._steady:
            if self._budget and not self.wishes[req_id].get("skip"):
                self._schedule(so, req_id, self.running[req_id])
        for req_id, tokens in self.resuming.items():
            if req_id in self.preempted and self._budget and len(self.running) < self.limits.max_num_reqs:
                self.preempted.remove(req_id)
                self.running[req_id] = computed = self._share(req_id, self._tokens(req_id))
                if tokens or self.elsewhere.get(req_id):
                    so.scheduled_cached_reqs.all_token_ids[req_id] = self._tokens(req_id)  # type: ignore[index]
                    self.elsewhere.pop(req_id, None)
                so.scheduled_cached_reqs.resumed_req_ids.add(req_id)
                self._schedule(so, req_id, computed)
        # Who was resumed in the step of its preemption and found no place is merely preempted.
        so.preempted_req_ids |= {r for r in self.preempting if r in self.preempted}
        for new in self.submitting:
            if self._budget and len(self.running) < self.limits.max_num_reqs:
                self._submit(so, new, old)
        so.total_num_scheduled_tokens = sum(so.num_scheduled_tokens.values())
        return so

    def gone(self, req_id: str) -> None:
        """Finished: nothing of it is kept."""
        self._release(req_id)
        self.running.pop(req_id, None)
        self.elsewhere.pop(req_id, None)
        if req_id in self.preempted:
            self.preempted.remove(req_id)

    def _tokens(self, req_id: str) -> list[int]:
        return self.naive.requests[req_id].tokens + self.elsewhere.get(req_id, [])

    def _schedule(self, so: SchedulerOutput, req_id: str, computed: int) -> None:
        wishes, cached, request = self.wishes[req_id], so.scheduled_cached_reqs, self.naive.requests[req_id]
        told, resumed = self.elsewhere.pop(req_id, []), req_id in cached.resumed_req_ids
        tokens = request.tokens + told
        if resumed:
            tokens = list(cached.all_token_ids.get(req_id, tokens))
        known = len(tokens)
        if not resumed and not told:
            dropped = min(wishes.get("drop", 0), known - request.num_prompt, known - 1 - self._shared_until(req_id))
            known -= max(dropped, 0)
            self.running[req_id] = computed = min(computed, known - 1)
        left = known - computed
        count = max(min(left, self._budget, wishes.get("chunk", left)), 1)
        drafts = wishes.get("drafts", [])[: max(min(self._budget - count, self.limits.max_model_len - 1 - known), 0)]
        drafts = drafts[: self.limits.num_speculative_tokens] if count == left else []
        if drafts:
            so.scheduled_spec_decode_tokens[req_id] = drafts
            count += len(drafts)
        cached.req_ids.append(req_id)
        cached.num_computed_tokens.append(computed)
        cached.num_output_tokens.append(known - request.num_prompt)
        cached.new_token_ids.append(tokens[computed:] if told else [])
        shared = [list(ids) for ids in self.blocks.get(req_id, ())] if resumed else None
        brought = self._grow(req_id, computed + count, wishes.get("ahead", 0), shared)
        cached.new_block_ids.append(brought if any(brought) else None)
        self._count(so, req_id, count)

    def _count(self, so: SchedulerOutput, req_id: str, count: int) -> None:
        so.num_scheduled_tokens[req_id] = count
        self._budget -= count

    def _submit(self, so: SchedulerOutput, new: dict[str, Any], old: dict[str, list[int]]) -> None:
        req_id = new.get("req_id")
        if req_id is None:
            self.names += 1
            req_id = f"r{self.names}"
        prompt = [(self.names * 11 + 3 * i) % self.limits.vocab_size for i in range(new["prompt"])]
        prefill = None
        if new.get("restart") and 0 < len(old.get(req_id, ())) < self.limits.max_model_len:
            prefill = list(old[req_id])
            prompt = prefill[: (len(prefill) + 1) // 2]
        holder = self.pick(new["like"], self._steady) if new["like"] is not None else None
        if holder is not None:
            start = self._boundary(holder)
            prompt = self.naive.requests[holder].tokens[:start] + prompt[: self.limits.max_model_len - 1 - start]
        tokens = prompt if prefill is None else prefill
        computed = self._share(req_id, tokens) if holder is not None else 0
        brought = [list(ids) for ids in self.blocks.get(req_id, ())] or None
        if not computed:
            computed = min(new["hit"], (len(tokens) - 1) // self._unit()) * self._unit()
        count = min(len(tokens) - computed, self._budget, new["chunk"])
        params = PARAMS[new["params"] % len(PARAMS)]
        blocks = self._grow(req_id, computed + count, 0, brought)
        data = NewRequestData(req_id, prompt, blocks, computed, params, prefill_token_ids=prefill)
        so.scheduled_new_reqs.append(data)
        self.running[req_id] = computed
        self._count(so, req_id, count)

    # ------------------------------------------------------------------ blocks
    def _unit(self) -> int:
        """Tokens that are whole blocks in every group."""
        return lcm(*self.limits.block_sizes)

    def _boundary(self, holder: str) -> int:
        """Tokens of ``holder`` that others may share: whole blocks, computed before this step."""
        return self.running[holder] // self._unit() * self._unit()

    def _share(self, req_id: str, tokens: Sequence[int]) -> int:
        """Takes the blocks of whoever has computed the most of ``tokens``' beginning; how many tokens that are."""
        best, most = None, 0
        for holder in self._steady:
            theirs, until = self.naive.requests[holder].tokens, self._boundary(holder)
            until = min(until, (len(tokens) - 1) // self._unit() * self._unit())
            while theirs[:until] != list(tokens[:until]):
                until -= self._unit()
            if until > most:
                best, most = holder, until
        self.blocks[req_id] = [[] for _ in self.limits.groups]
        for group, size in enumerate(self.limits.block_sizes):
            ids = self.blocks[best][group][: most // size] if best is not None else []
            self.blocks[req_id][group] += ids
            self.used[group].update(ids)
        return most

    def _shared_until(self, req_id: str) -> int:
        """Tokens of ``req_id`` that lie in blocks which others hold too."""
        until = 0
        for group, size in enumerate(self.limits.block_sizes):
            shared = [i for i, block in enumerate(self.blocks[req_id][group]) if self.used[group][block] > 1]
            until = max([until, *((i + 1) * size for i in shared)])
        return until

    def _grow(self, req_id: str, end: int, ahead: int, brought: list[list[int]] | None) -> tuple[list[int], ...]:
        """Blocks for ``end`` tokens and some ``ahead``; what the plan brings: the new ones behind ``brought``."""
        held = self.blocks.setdefault(req_id, [[] for _ in self.limits.groups])
        out = []
        for group, size in enumerate(self.limits.block_sizes):
            most = -(-self.limits.max_model_len // size)
            more = max(min(-(-end // size) + ahead, most) - len(held[group]), 0)
            ids = [self.free[group].pop() for _ in range(more)]
            held[group] += ids
            self.used[group].update(ids)
            out.append((brought[group] if brought else []) + ids)
        return tuple(out)

    def _release(self, req_id: str) -> None:
        for group, ids in enumerate(self.blocks.pop(req_id, ())):
            for block in reversed(ids):
                self.used[group][block] -= 1
                if not self.used[group][block]:
                    self.free[group].append(block)


class Driver(Books):
    """The books, and the batch that gets every plan; each step is compared with the naive model in full.

    Args:
        note: told every plan, and what came of it.
    """

    def __init__(self, limits: Limits | None = None, note: Callable[[str], object] = lambda text: None) -> None:
        super().__init__(limits)
        self.note, self.steps = note, 0
        limits = self.limits
        self.batch = InputBatch(**vars(limits))
        self.shapes = StepShapes(
            limits.max_num_batched_tokens,
            limits.max_num_reqs,
            num_speculative_tokens=limits.num_speculative_tokens,
            num_groups=len(limits.block_sizes),
            min_block_size=min(limits.kernel_sizes),
        )
        self.checker = Checker(self.batch, self.naive)
        # Two buffers that every step writes anew: nothing of a larger step may be left in them.
        self.buffers = BufferRing(max(layout.size for layout in self.shapes.layouts.values()), depth=2)

    def forget_wishes(self) -> None:
        super().forget_wishes()
        self.threshold: int | None = None
        self.swaps: list[tuple[int, int]] = []
        self.check = True

    def without_validation(self) -> None:
        """The next step is taken as it is."""
        self.check = False

    def reorder(self, threshold: int) -> None:
        """Decodes of at most ``threshold`` tokens come first in the next step."""
        self.threshold = threshold

    def swap_in_step(self, a: int, b: int) -> None:
        """Two rows of the next step change places before it is prepared."""
        self.swaps.append((a, b))

    def swap_now(self, a: int, b: int) -> None:
        """Two rows change places between steps."""
        if None not in self.naive.rows:
            self._swap(a, b)
            self.checker.check_batch(drafts=False)

    def abort_now(self, which: int, condense: bool = True) -> None:
        """A request is removed between steps, without a plan."""
        req_id = self.pick(which, [*self.running, *self.preempted])
        if req_id is None:
            return
        self.batch.remove_request(req_id)
        self.naive.forget(req_id)
        self.gone(req_id)
        if condense:
            self.batch.condense()
            self.naive.condense()
            self.checker.check_batch(drafts=False)

    def _swap(self, a: int, b: int) -> None:
        rows = self.naive.rows
        if rows:
            a, b = a % len(rows), b % len(rows)
            self.batch.swap_states(a, b)
            rows[a], rows[b] = rows[b], rows[a]

    def step(self) -> None:
        self.execute(self.plan())

    def execute(self, so: SchedulerOutput) -> None:
        """Everything a step is, compared after each part of it. ``so`` is the plan last made, or one like it."""
        wishes, threshold, swaps, check = self.wishes, self.threshold, self.swaps, self.check
        self.forget_wishes()
        self.steps += 1
        self.note(f"step {self.steps}: {describe(so)}" + (f", threshold {threshold}" if threshold else ""))
        self.naive.apply(so)
        update_states(self.batch, so, check=check, reorder_threshold=threshold)
        if threshold is not None:
            self.checker.check_order(so, threshold)
        for a, b in swaps:
            self._swap(a, b)
        self.checker.check_batch()
        if not so.num_scheduled_tokens:
            return
        inputs = prepare_inputs(self.batch, so, self.shapes, buffers=self.buffers)
        check_invariants(self.batch, so, inputs)
        views = self.checker.check_step(so, inputs)
        sampled = np.full((inputs.num_reqs, max(v.num_logits for v in views.values())), -1, np.int32)
        for row, req_id in enumerate(inputs.req_ids):
            tokens = self._outcome(req_id, views[req_id], wishes[req_id])
            sampled[row, : len(tokens)] = tokens
        self._record(inputs, sampled)

    def _outcome(self, req_id: str, view: Any, wishes: dict[str, Any]) -> list[int]:
        """What a request gets from the step, booked; the tokens that the runner is to record."""
        if not view.discard and wishes.get("lose"):
            return []  # and the step is run again
        self.running[req_id] = view.seq_len
        if view.discard:
            return []
        count = min(wishes.get("accept", 9), view.num_logits)
        base = len(self.naive.requests[req_id].tokens) * 7 + self.steps
        tokens = [(base + 5 * j) % self.limits.vocab_size for j in range(count)]
        self.running[req_id] -= view.num_logits - count  # rejected drafts
        if wishes.get("elsewhere") and view.num_logits == 1:
            self.elsewhere[req_id] = tokens
            return []
        return tokens

    def _record(self, inputs: StepInputs, sampled: np.ndarray) -> None:
        lists = [[t for t in row if t >= 0] for row in sampled.tolist()]
        if self.steps % 2:
            same("recorded", record_sampled(self.batch, sampled), lists)
        else:
            flat = record_tokens(self.batch, sampled)
            same("recorded, flat", flat.token_ids, [t for tokens in lists for t in tokens])
            same("offsets", flat.offsets, [sum(map(len, lists[:row])) for row in range(len(lists) + 1)])
            same("recorded, as lists", flat.lists(), lists)
        for req_id, tokens in zip(inputs.req_ids, lists, strict=True):
            request = self.naive.requests[req_id]
            if tokens:
                request.tokens += tokens
        self.note(f"    recorded {dict(zip(inputs.req_ids, lists, strict=True))}")
        self.checker.check_batch(drafts=False)


def describe(so: SchedulerOutput) -> str:
    """A plan in a line."""
    cached, out = so.scheduled_cached_reqs, []
    for what, ids in (("finished", so.finished_req_ids), ("preempted", so.preempted_req_ids)):
        out += [f"{what} {' '.join(sorted(ids))}"] if ids else []
    for data in so.scheduled_new_reqs:
        count = so.num_scheduled_tokens.get(data.req_id)
        n = len(data.prefill_token_ids if data.prefill_token_ids is not None else data.prompt_token_ids)
        out.append(f"new {data.req_id} {data.num_computed_tokens}+{count} of {n} tokens, blocks {data.block_ids}")
    for req_id, computed, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
        kind = "resumed " if req_id in cached.resumed_req_ids else ""
        drafts = so.scheduled_spec_decode_tokens.get(req_id)
        more = (f", blocks {blocks}" if blocks else "") + (f", drafts {drafts}" if drafts else "")
        out.append(f"{kind}{req_id} {computed}+{so.num_scheduled_tokens.get(req_id)}{more}")
    return "; ".join(out) or "nothing"
