"""The embedded scheduler: which requests run how many tokens in the next step.

Continuous batching under a token budget. Every step serves the running requests first, in the order they
arrived, then admits waiting ones in the same order; long prompts are computed in chunks beside the decodes of
others. When blocks run out, the request that came last gives up its own and is computed again later. So the
oldest request always advances, and every request that fits the pools at all is finished at some time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from jaxrunner.kv_cache.manager import GroupBlocks, KVCacheManager
from jaxrunner.protocol import BlockIds, ModelRunnerOutput, SchedulerOutput
from jaxrunner.request import Request, RequestStatus
from jaxrunner.scheduler.config import SchedulerConfig
from jaxrunner.scheduler.plan import StepPlan

_RUNNING = RequestStatus.RUNNING
_FINISH_STATUS = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH,
    "abort": RequestStatus.FINISHED_ABORTED,
}


@dataclass(slots=True)
class RequestUpdate:
    """What a step brought a request.

    Attributes:
        new_token_ids: sampled tokens that count, a stopping one included.
        finish_reason: "stop" or "length" when this ended it, else None.
        stop_reason: the id out of ``stop_token_ids`` that ended it, else None.
    """

    req_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None


class Scheduler:
    """Drives the runner: ``schedule``, run the step, ``update_from_output``, again.

    Arguments:
        config: limits.
        manager: the blocks; this scheduler must be the only one to use it.

    Attributes:
        max_model_len: tokens a request may reach: the configured limit, or what the pools can hold for one
            request where that is less. A request that reaches it stops with reason "length".
        num_preemptions: since the start.
    """

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager) -> None:
        self.config = config
        self.manager = manager
        # The last token of a request is never fed in, so it needs no room.
        self.max_model_len = min(config.max_model_len, manager.config.max_request_tokens + 1)
        self.requests: dict[str, Request] = {}
        # Together, running then waiting, always in order of arrival: the last running one is the last that
        # came, and a preempted one goes back to the head of those waiting.
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.num_preemptions = 0
        self._finished_req_ids: set[str] = set()
        self._in_flight: StepPlan | None = None

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def has_requests(self) -> bool:
        """Whether ``schedule`` has anything to say: requests to run, or ends to tell the runner."""
        return bool(self.requests or self._finished_req_ids)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is taken, or it could never run: its prompt leaves no room for one output token
                within ``max_model_len``, or needs more blocks than there are.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is taken by an unfinished request")
        if request.status is not RequestStatus.WAITING or request.num_output_tokens:
            raise ValueError(f"{request!r} has been used already: make a new Request")
        prompt = request.num_prompt_tokens
        if prompt >= self.config.max_model_len:
            raise ValueError(
                f"request {request.request_id!r}: the prompt has {prompt} tokens, but max_model_len is "
                f"{self.config.max_model_len} and at least one output token must fit too. Shorten the prompt to at "
                f"most {self.max_model_len - 1} tokens or raise max_model_len."
            )
        if prompt >= self.max_model_len:
            config = self.manager.config
            raise ValueError(
                f"request {request.request_id!r}: the prompt has {prompt} tokens, but the KV cache of "
                f"{config.num_blocks} blocks (block 0 is not used) holds {config.max_request_tokens} tokens of one "
                f"request. Shorten the prompt to at most {self.max_model_len - 1} tokens or give it more blocks."
            )
        request.limit_length(self.max_model_len)
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. An output without tokens may still carry the ids of requests that finished.

        Raises:
            RuntimeError: the step planned before hasn't been through ``update_from_output`` yet.
        """
        if self._in_flight is not None and any(map(_is_running, self._in_flight.requests)):
            raise RuntimeError(
                "schedule() needs the last step's tokens first: pass them to update_from_output(), or end the step's "
                "requests with finish_requests() if it failed"
            )
        plan = StepPlan(self.config.max_num_batched_tokens)
        self._schedule_running(plan)
        if not plan.preempted:  # blocks are short then; and nobody is preempted and resumed in one step
            self._schedule_waiting(plan)
        if self.requests and not plan.requests:
            raise RuntimeError(
                f"nothing could be scheduled of {len(self.running)} running and {len(self.waiting)} waiting "
                f"requests with {self.manager.num_free_blocks} free blocks: this is a bug of the scheduler"
            )
        finished, self._finished_req_ids = self._finished_req_ids, set()
        self._in_flight = plan if plan.requests else None
        return plan.write(finished, self.manager.num_common_prefix_blocks(plan.requests))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        """Take in the tokens of a step: count, stop, and let computed blocks be found.

        Arguments:
            scheduler_output: what ``schedule`` returned last.
            model_runner_output: what the runner made of it. A row is empty exactly where a prompt isn't
                computed to its end yet. Rows of requests that were aborted meanwhile are ignored.
        Returns:
            One update for every request that got tokens.
        Raises:
            ValueError: not the output of the last ``schedule``, or rows missing, empty or filled where they
                must not be; nothing has changed then.
        """
        if not scheduler_output.total_num_scheduled_tokens:
            return []
        plan = self._in_flight
        if plan is None or plan.output is not scheduler_output:
            raise ValueError("update_from_output() takes each SchedulerOutput once, right after its step")
        steps = self._checked_rows(plan, model_runner_output)
        self._in_flight = None

        updates = []
        finished = []
        publish_interval = self.manager.publish_interval
        for request, count, tokens in steps:
            computed = request.num_computed_tokens + count
            request.num_computed_tokens = computed
            if tokens:
                tokens = request.append_output_tokens(tokens)
            if computed - request.num_published_tokens >= publish_interval:
                self.manager.cache_blocks(request)
            if not tokens:
                continue
            if request.status is _RUNNING:
                updates.append(RequestUpdate(request.request_id, tokens))
            else:
                finished.append(request)
                reason = request.status.finish_reason
                updates.append(RequestUpdate(request.request_id, tokens, reason, request.stop_reason))
        self._remove(finished, finished)
        return updates

    def finish_requests(self, request_ids: str | Iterable[str], reason: str = "abort") -> list[str]:
        """End requests from outside, at any time: also between ``schedule`` and ``update_from_output``.

        Arguments:
            request_ids: ids; those that aren't unfinished requests are passed over.
            reason: "abort", "stop" (as for a stop string) or "length".
        Returns:
            The ids of the requests that this ended.
        """
        if reason not in _FINISH_STATUS:
            raise ValueError(f"reason must be one of {sorted(_FINISH_STATUS)}, got {reason!r}")
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        ending = [self.requests[i] for i in dict.fromkeys(ids) if i in self.requests]
        known = [request for request in ending if request.status is not RequestStatus.WAITING]
        for request in ending:
            if request.status is not _RUNNING:
                self.waiting.remove(request)
            request.status = _FINISH_STATUS[reason]
        self._remove(ending, known)
        return [request.request_id for request in ending]

    def _schedule_running(self, plan: StepPlan) -> None:
        running = self.running
        counts = [len(request.all_token_ids) - request.num_computed_tokens for request in running]
        if sum(counts) > plan.budget or max(counts, default=0) > self.config.max_chunk:
            counts = self._clip(counts, plan.budget)
        growing = [
            i
            for i, (request, count) in enumerate(zip(running, counts, strict=False))
            if request.num_computed_tokens + count > request.num_block_tokens
        ]
        new_blocks: list[BlockIds | None] = [None] * len(counts)
        for i in growing:
            if i >= len(running):
                break  # gave up its blocks for one before it
            num_tokens = running[i].num_computed_tokens + counts[i]
            new_blocks[i] = self._allocate_or_preempt(running[i], num_tokens, plan)
        scheduled = min(len(running), len(counts))
        plan.set_running(running[:scheduled], counts[:scheduled], new_blocks[:scheduled])

    def _clip(self, counts: list[int], budget: int) -> list[int]:
        """Tokens per request within the budget and the chunk limit; those for which nothing is left fall away."""
        clipped = []
        for count in counts:
            count = min(count, self.config.max_chunk, budget)
            if not count:
                break
            clipped.append(count)
            budget -= count
        return clipped

    def _schedule_waiting(self, plan: StepPlan) -> None:
        config, manager = self.config, self.manager
        while self.waiting and plan.budget and len(self.running) < config.max_num_seqs:
            request = self.waiting[0]
            found, num_hit = manager.get_computed_blocks(request)
            # Room for the whole prompt at once, not only for this step's chunk: two prompts that fit one by one but
            # not together would otherwise take each other's blocks in turns. And a block to spare for every running
            # request, which will want its next one soon. In simulated crowded pools that cut the tokens computed
            # twice from 14-38% to 2% or less, for 1-11% more steps; where outputs are far longer than prompts, to half.
            if manager.allocate_slots(request, request.num_tokens, found, keep_free=len(self.running)) is None:
                break
            manager.stats.record(request, num_hit)
            request.num_computed_tokens = num_hit
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_hit
            num_new = min(request.num_tokens - num_hit, config.max_chunk, plan.budget)
            plan.add_started(request, num_new, manager.get_blocks(request))
            request.status = RequestStatus.RUNNING
            self.running.append(self.waiting.popleft())

    def _allocate_or_preempt(self, request: Request, num_tokens: int, plan: StepPlan) -> GroupBlocks | None:
        """Room for ``num_tokens`` tokens, taken from those that came last if need be; None when that's
        itself.
        """
        while True:
            new_blocks = self.manager.allocate_slots(request, num_tokens)
            if new_blocks is not None:
                return new_blocks
            victim = self.running.pop()
            self.manager.free(victim)
            victim.status = RequestStatus.PREEMPTED
            victim.num_computed_tokens = 0
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self.waiting.appendleft(victim)
            plan.preempted.add(victim.request_id)
            if victim is request:
                return None

    def _checked_rows(self, plan: StepPlan, runner_output: ModelRunnerOutput) -> list[tuple[Request, int, list[int]]]:
        """(request, scheduled tokens, sampled tokens) of every request of the step that is still alive."""
        index, sampled = runner_output.req_id_to_index, runner_output.sampled_token_ids
        try:
            rows = [
                (request, count, sampled[index[request.request_id]])
                for request, count in zip(plan.requests, plan.counts, strict=True)
                # Of the object, not of the id: an id may have been aborted and given to another request since.
                if request.status is _RUNNING
            ]
        except KeyError as error:
            raise ValueError(f"the runner's output lacks request {error}, which was scheduled") from None
        for request, count, tokens in rows:
            missing = len(request.all_token_ids) - request.num_computed_tokens - count
            if (missing > 0) is not (not tokens):
                raise ValueError(
                    f"the runner gave request {request.request_id!r} the tokens {tokens} in a step that left {missing} "
                    f"of its {request.num_tokens} tokens to compute: exactly a step that leaves none gives some"
                )
        return rows

    def _remove(self, finished: list[Request], known: list[Request]) -> None:
        """Forget finished requests, and let the runner be told of those it knows."""
        if not finished:
            return
        for request in finished:
            del self.requests[request.request_id]
            self.manager.free(request)
        self._finished_req_ids.update(request.request_id for request in known)
        self.running = [request for request in self.running if request.status is _RUNNING]


def _is_running(request: Request) -> bool:
    return request.status is _RUNNING
