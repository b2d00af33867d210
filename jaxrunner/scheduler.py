"""The embedded scheduler: which requests run how many tokens in the next step.

Continuous batching under a token budget. Every step serves the running requests first, in the order they arrived, then
admits waiting ones in the same order; long prompts are computed in chunks beside the decodes of others. When blocks run
out, the request that came last gives up its own and is computed again later. So the oldest request always advances, and
every request that fits the pools at all is finished at some time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxrunner.kv_cache.manager import KVCacheManager
from jaxrunner.protocol import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from jaxrunner.request import Request, RequestStatus

_FINISH_STATUS = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH,
    "abort": RequestStatus.FINISHED_ABORTED,
}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a request.

    Attributes:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens per step, the token budget.
        max_model_len: tokens of one request, prompt and output.
        long_prefill_token_threshold: tokens per step of one request at most, so that a long prompt leaves room for
            others. 0: no such limit.
        policy: the order of service; "fcfs" (first come, first served) is the only one.

    Raises:
        ValueError: a value out of range; names it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        lows = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "max_model_len": 2,  # a prompt of one token and its successor
            "long_prefill_token_threshold": 0,
        }
        for name, low in lows.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.policy != "fcfs":
            raise ValueError(f"policy must be 'fcfs', got {self.policy!r}")


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


@dataclass(slots=True)
class _Plan:
    """A step while it's being put together."""

    token_budget: int
    requests: list[Request] = field(default_factory=list)  # in the order of output.num_scheduled_tokens
    output: SchedulerOutput = field(default_factory=SchedulerOutput)


class Scheduler:
    """Drives the runner: ``schedule``, run the step, ``update_from_output``, again.

    Arguments:
        config: limits.
        manager: the blocks; this scheduler must be the only one to use it.

    Attributes:
        max_model_len: tokens a request may reach: the configured limit, or what the pools can hold for one request where
            that is less. A request that reaches it stops with reason "length".
        num_preemptions: since the start.
    """

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager) -> None:
        self.config = config
        self.manager = manager
        # The last token of a request is never fed in, so it needs no room.
        self.max_model_len = min(config.max_model_len, manager.config.max_request_tokens + 1)
        self.requests: dict[str, Request] = {}
        # Together, running then waiting, always in order of arrival: the last running one is the last that came, and
        # a preempted one goes back to the head of those waiting.
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.num_preemptions = 0
        self._finished_req_ids: set[str] = set()
        self._in_flight: _Plan | None = None

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def has_requests(self) -> bool:
        """Whether ``schedule`` has anything to say: requests to run, or ends to tell the runner."""
        return bool(self.requests or self._finished_req_ids)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is taken, or it could never run: its prompt leaves no room for one output token within
                ``max_model_len``, or needs more blocks than there are.
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
        if self._in_flight is not None:
            raise RuntimeError("schedule() was called again before update_from_output() took the last step's tokens")
        plan = _Plan(self.config.max_num_batched_tokens)
        output = plan.output
        self._schedule_running(plan)
        if not output.preempted_req_ids:  # otherwise blocks are short, and would be taken again at once
            self._schedule_waiting(plan)

        output.total_num_scheduled_tokens = self.config.max_num_batched_tokens - plan.token_budget
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        if plan.requests:
            output.num_common_prefix_blocks = self.manager.num_common_prefix_blocks(plan.requests[0])
            self._in_flight = plan
        else:
            output.num_common_prefix_blocks = [0] * self.manager.num_groups
            if self.requests:
                raise RuntimeError(
                    f"nothing could be scheduled of {len(self.running)} running and {len(self.waiting)} waiting "
                    f"requests with {self.manager.num_free_blocks} free blocks: this is a bug of the scheduler"
                )
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        """Take in the tokens of a step: count, stop, and let computed blocks be found.

        Arguments:
            scheduler_output: what ``schedule`` returned last.
            model_runner_output: what the runner made of it. A row is empty exactly where a prompt isn't computed to its
                end yet. Rows of requests that were aborted meanwhile are ignored.
        Returns:
            One update for every request that got tokens.
        Raises:
            ValueError: not the output of the last ``schedule``, or rows missing, empty or filled where they must not be;
                nothing has changed then.
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
        running = RequestStatus.RUNNING
        cache_blocks = self.manager.cache_blocks
        for request, num_scheduled, tokens in steps:
            request.num_computed_tokens += num_scheduled
            if not tokens:
                cache_blocks(request)
                continue
            tokens = request.append_output_tokens(tokens)
            cache_blocks(request)
            if request.status is running:
                updates.append(RequestUpdate(request.request_id, tokens))
            else:
                finished.append(request)
                reason = request.status.finish_reason
                updates.append(RequestUpdate(request.request_id, tokens, reason, request.stop_reason))
        self._remove(finished)
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
            request.status = _FINISH_STATUS[reason]
        self._remove(ending, known)
        return [request.request_id for request in ending]

    def _schedule_running(self, plan: _Plan) -> None:
        cached = plan.output.scheduled_cached_reqs
        num_scheduled = plan.output.num_scheduled_tokens
        threshold = self.config.long_prefill_token_threshold or self.config.max_num_batched_tokens
        budget = plan.token_budget
        i = 0
        while i < len(self.running) and budget:
            request = self.running[i]
            computed = request.num_computed_tokens
            num_new = min(len(request.all_token_ids) - computed, threshold, budget)
            new_blocks = None
            if computed + num_new > request.num_block_tokens:
                new_blocks = self._allocate_or_preempt(request, computed + num_new, plan)
                if new_blocks is None:
                    break  # it was the last that came, and gave up itself
            budget -= num_new
            num_scheduled[request.request_id] = num_new
            plan.requests.append(request)
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(new_blocks)
            cached.num_computed_tokens.append(computed)
            cached.num_output_tokens.append(len(request.output_token_ids))
            cached.new_token_ids.append([])
            i += 1
        plan.token_budget = budget
