"""A step while it's being put together: the scheduler's choices, then written down as the protocol's differences."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrunner.kv_cache.manager import GroupBlocks
from jaxrunner.protocol import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput
from jaxrunner.request import Request


class StepPlan:
    """Who runs how many tokens, column by column: a loop over requests costs more than one over a column.

    Attributes:
        budget: tokens that may still be scheduled.
        requests, counts: requests that go on and then those that start or resume, and their tokens in this step. Kept
            as objects, because an id may change hands between schedule and update.
        preempted: ids of those that lost their blocks.
        output: the protocol's form, once ``write`` has been called.
    """

    __slots__ = ("budget", "requests", "counts", "preempted", "output", "_new_blocks", "_started_blocks", "_copies")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.requests: list[Request] = []
        self.counts: list[int] = []
        self.preempted: set[str] = set()
        self.output: SchedulerOutput | None = None
        self._new_blocks: list[BlockIds | None] = []
        self._started_blocks: list[BlockIds] = []
        self._copies: list[list[tuple[int, int]]] = []

    def set_running(self, requests: list[Request], counts: list[int], new_blocks: list[BlockIds | None]) -> None:
        """The requests that go on, with the blocks each was given in this step. Before any ``add_started``."""
        self.requests, self.counts, self._new_blocks = requests, counts, new_blocks
        self.budget -= sum(counts)

    def add_started(self, request: Request, count: int, blocks: GroupBlocks) -> None:
        """A request that starts, or starts again after a preemption, with all its blocks."""
        self.requests.append(request)
        self.counts.append(count)
        self.budget -= count
        # Copies: the manager's lists grow, and so may the runner's.
        self._started_blocks.append(tuple(list(held) for held in blocks))

    def add_copies(self, sources: Sequence[int | None], new_blocks: GroupBlocks) -> None:
        """Per group, the block that the first of a started request's new blocks begins as a copy of, if any."""
        for group, (source, new) in enumerate(zip(sources, new_blocks, strict=False)):
            if source is not None:
                self._copies = self._copies or [[] for _ in new_blocks]
                self._copies[group].append((source, new[0]))

    def write(self, finished_req_ids: set[str], num_common_prefix_blocks: list[int]) -> SchedulerOutput:
        """Write the plan down; ``output`` is then set. The order is the protocol's: all that the runner knows first."""
        going_on = len(self._new_blocks)
        requests = self.requests[:going_on]
        counts = self.counts[:going_on]
        new_block_ids = self._new_blocks
        all_token_ids: dict[str, list[int]] = {}
        new, new_requests, new_counts = [], [], []
        started = zip(self.requests[going_on:], self.counts[going_on:], self._started_blocks, strict=True)
        for request, count, block_ids in started:
            if request.num_preemptions:  # the runner knows it
                requests.append(request)
                counts.append(count)
                new_block_ids.append(block_ids)
                all_token_ids[request.request_id] = list(request.all_token_ids)
            else:
                new.append(_new_request_data(request, block_ids))
                new_requests.append(request)
                new_counts.append(count)
        self.requests, self.counts = requests + new_requests, counts + new_counts
        ids = [request.request_id for request in self.requests]
        cached = CachedRequestData(
            req_ids=ids[: len(requests)],
            resumed_req_ids=set(all_token_ids),
            new_block_ids=new_block_ids,
            num_computed_tokens=[request.num_computed_tokens for request in requests],
            num_output_tokens=[len(request.output_token_ids) for request in requests],
            all_token_ids=all_token_ids,
        )
        self.output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict(zip(ids, self.counts, strict=True)),
            total_num_scheduled_tokens=sum(self.counts),
            finished_req_ids=finished_req_ids,
            preempted_req_ids=self.preempted,
            num_common_prefix_blocks=num_common_prefix_blocks,
            block_copies=self._copies,
        )
        return self.output


def _new_request_data(request: Request, block_ids: BlockIds) -> NewRequestData:
    return NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        block_ids=block_ids,
        num_computed_tokens=request.num_computed_tokens,
        sampling_params=request.sampling_params,
        pooling_params=request.pooling_params,
    )
