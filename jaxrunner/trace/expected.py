"""What the scheduler's plans say each request is: dictionaries and lists, one request at a time, no addresses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxrunner.trace.encode import Geometry


class PlanError(Exception):
    """A plan that contradicts what went before. ``req_id`` is whose entry it is; ``symptom`` names the likely cause."""

    def __init__(self, req_id: str | None, field: str, got: Any, expected: Any, symptom: str) -> None:
        super().__init__(field)
        self.req_id, self.field, self.got, self.expected, self.symptom = req_id, field, got, expected, symptom


@dataclass(slots=True)
class Known:
    """A request as told so far. ``blocks`` are kernel block ids per cache group; empty while preempted."""

    req_id: str
    tokens: list[int]
    num_prompt: int
    computed: int
    blocks: list[list[int]]
    scheduled: int = 0
    drafts: list[int] = field(default_factory=list)
    lost_blocks: list[list[int]] = field(default_factory=list)  # those it had before it was preempted last
    reached: int = 0  # computed + scheduled of its last step

    @property
    def seq_len(self) -> int:
        return self.computed + self.scheduled


class Expected:
    """Follows the plans of a trace.

    Attributes:
        requests: all that the runner should know, by id.
    """

    def __init__(self, geometry: Geometry) -> None:
        manager, kernel = geometry.manager_block_sizes, geometry.block_sizes
        self._ratios = [m // k for m, k in zip(manager, kernel, strict=True)]
        self._block_sizes = kernel
        self.requests: dict[str, Known] = {}
        self._holders: list[Counter[int]] = [Counter() for _ in kernel]

    def reset(self) -> None:
        """The runner forgot all requests."""
        self.requests.clear()
        for holders in self._holders:
            holders.clear()

    def take_plan(self, plan: dict[str, Any]) -> dict[str, Known]:
        """Merges a plan's differences; the scheduled requests by id, in the plan's order.

        Raises:
            PlanError: the plan contradicts itself or what went before.
        """
        for req_id in plan["finished_req_ids"]:
            known = self.requests.pop(req_id, None)
            if known is not None:
                self._drop_blocks(known)
        for req_id in plan["preempted_req_ids"]:
            if req_id in self.requests:
                self._preempt(self.requests[req_id])
        self._take_cached(plan["cached"])
        for data in plan["new"]:
            self._take_new(data)
        scheduled = {}
        for req_id, count in plan["num_scheduled_tokens"].items():
            known_or_none = self.requests.get(req_id)
            if known_or_none is None:
                raise PlanError(req_id, "scheduled request", "unknown", "a known request", "plan_contradiction")
            scheduled[req_id] = known_or_none
            known_or_none.scheduled = count
            known_or_none.drafts = plan["scheduled_spec_decode_tokens"].get(req_id, [])
            known_or_none.reached = known_or_none.seq_len
        told, total = plan["total_num_scheduled_tokens"], sum(plan["num_scheduled_tokens"].values())
        if told != total:
            raise PlanError(None, "total_num_scheduled_tokens", told, total, "plan_contradiction")
        return scheduled

    def written_blocks(self, known: Known) -> Iterator[tuple[int, int, int]]:
        """(group, block, first position) of every block that the request's step writes.

        Raises:
            PlanError: it has no block there.
        """
        for group, size in enumerate(self._block_sizes):
            blocks = known.blocks[group] if group < len(known.blocks) else []
            for logical in range(known.computed // size, (known.seq_len - 1) // size + 1):
                if logical >= len(blocks):
                    held = f"{len(blocks)} blocks of {size}, cache group {group}"
                    raise PlanError(known.req_id, "blocks for the step", held, f"room for {known.seq_len} tokens",
                                    "plan_contradiction")  # fmt: skip
                yield group, blocks[logical], max(logical * size, known.computed)

    def holders(self, group: int, block: int) -> int:
        """How many requests hold a block."""
        return self._holders[group][block]

    def holding(self, group: int, block: int) -> list[str]:
        """Which requests hold a block."""
        return [r for r, known in self.requests.items() if known.blocks and block in known.blocks[group]]

    def holding_of_pool(self, group: int, block: int) -> list[str]:
        """Which requests hold a block, by its number in the pool, which a kernel may address in parts."""
        return self.holding(group, block * self._ratios[group])

    def _take_new(self, data: dict[str, Any]) -> None:
        req_id = data["req_id"]
        if req_id in self.requests:
            raise PlanError(req_id, "new request", "an id in use", "an id that is not in use", "plan_contradiction")
        prefill = data["prompt_token_ids"] if data["prefill_token_ids"] is None else data["prefill_token_ids"]
        computed = data["num_computed_tokens"]
        known = Known(req_id, list(prefill), len(data["prompt_token_ids"]), computed, [], reached=computed)
        self.requests[req_id] = known
        self._give_blocks(known, data["block_ids"])

    def _take_cached(self, cached: dict[str, Any]) -> None:
        resumed = set(cached["resumed_req_ids"])
        for i, req_id in enumerate(cached["req_ids"]):
            known = self.requests.get(req_id)
            if known is None:
                raise PlanError(req_id, "cached request", "unknown", "a known request", "plan_contradiction")
            computed, blocks = cached["num_computed_tokens"][i], cached["new_block_ids"][i]
            if req_id in resumed:
                self._preempt(known)
                known.tokens = list(cached["all_token_ids"].get(req_id, known.tokens))
            elif not known.blocks:
                raise PlanError(req_id, "cached request", "preempted, not resumed", "resumed", "plan_contradiction")
            elif not known.computed <= computed <= known.reached:
                raise PlanError(req_id, "num_computed_tokens", computed, f"{known.computed} to {known.reached}",
                                "count_jumped")  # fmt: skip
            if blocks is not None:
                self._give_blocks(known, blocks)
            known.computed = computed
            if i < len(cached["new_token_ids"]) and cached["new_token_ids"][i]:
                tokens = cached["new_token_ids"][i]
                missing = computed + len(tokens) - len(known.tokens)
                known.tokens += tokens[len(tokens) - missing :] if missing > 0 else []
            if i < len(cached["num_output_tokens"]):
                del known.tokens[known.num_prompt + cached["num_output_tokens"][i] :]

    def _give_blocks(self, known: Known, block_ids: list[list[int]]) -> None:
        if not known.blocks:
            known.blocks = [[] for _ in self._block_sizes]
        for group, (ids, ratio) in enumerate(zip(block_ids, self._ratios, strict=True)):
            kernel = [i * ratio + j for i in ids for j in range(ratio)]
            known.blocks[group] += kernel
            self._holders[group].update(kernel)

    def _preempt(self, known: Known) -> None:
        if known.blocks:
            self._drop_blocks(known)
            known.lost_blocks = known.blocks
        known.blocks, known.computed, known.reached = [], 0, 0

    def _drop_blocks(self, known: Known) -> None:
        for holders, blocks in zip(self._holders, known.blocks, strict=False):
            holders.subtract(blocks)
