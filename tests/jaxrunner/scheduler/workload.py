"""A scheduler with a fake runner behind it, and everything that must hold after each step."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrunner.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheManager
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.request import Request
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.scheduler import RequestUpdate, Scheduler, SchedulerConfig
from tests.jaxrunner.scheduler.fake_runner import FakeRunner, expected_output

EOS = frozenset({7})


class Workload:
    """Arguments as of SchedulerConfig and KVCacheConfig, with one small layer per group."""

    def __init__(
        self,
        num_blocks: int,
        block_sizes: tuple[int, ...] = (4,),
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 1000,
        max_model_len: int = 1000,
        threshold: int = 0,
        caching: bool = True,
        tokens_per_step: int = 1,
        policy: str = "fcfs",
        partial: int = 0,
        long_partial: int = 0,
    ) -> None:
        groups = [KVCacheGroup([i], FullAttentionSpec(size, 1, 8)) for i, size in enumerate(block_sizes)]
        self.block_sizes = block_sizes
        self.manager = KVCacheManager(KVCacheConfig(num_blocks, groups), enable_prefix_caching=caching)
        self.config = SchedulerConfig(
            max_num_seqs, max_num_batched_tokens, max_model_len, threshold, policy, partial, long_partial
        )
        self.scheduler = Scheduler(self.config, self.manager)
        self.limit = min(max_model_len, self.manager.config.max_request_tokens + 1)
        self.salts: dict[str, str | None] = {}
        self.runner = FakeRunner(block_sizes, self.salts, tokens_per_step)
        self.alive: dict[str, Request] = {}
        self.arrived: list[Request] = []  # by object, because ids come back
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}

    def add(
        self,
        name: str,
        prompt: list[int],
        salt: str | None = None,
        priority: int = 0,
        leader: Request | None = None,
        **params,
    ) -> Request:
        request = Request(name, prompt, SamplingParams(**params), EOS, None, priority, salt, leader)
        self.scheduler.add_request(request)
        self.alive[name], self.outputs[name], self.salts[name] = request, [], salt
        self.arrived.append(request)
        return request

    def add_sequences(self, names: Sequence[str], prompt: list[int], **options) -> None:
        """Sequences of one prompt: the first leads."""
        leader = self.add(names[0], prompt, **options)
        for name in names[1:]:
            self.add(name, prompt, leader=leader, **options)

    def abort(self, name: str) -> None:
        ended = self.scheduler.finish_requests([name, "unknown"])
        assert ended == ([name] if name in self.alive else [])
        self.alive.pop(name, None)

    def reset_prefix_cache(self) -> None:
        self.manager.reset_prefix_cache()
        self.runner.weights += 1

    @property
    def in_order(self) -> bool:
        """Whether first come is first served without exception."""
        leads = any(request.leader is not None for request in self.alive.values())
        return self.config.policy == "fcfs" and not leads and not self.config.max_long_partial_prefills

    def schedule(self) -> SchedulerOutput:
        oldest = next((r for r in self.arrived if self.alive.get(r.request_id) is r), None)
        first = next(iter(self.scheduler.running), None)
        output = self.scheduler.schedule()
        assert output.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        if self.config.long_prefill_token_threshold:
            assert all(n <= self.config.long_prefill_token_threshold for n in output.num_scheduled_tokens.values())
        # Nobody starves: the first of those that run advances in every step, and if none runs somebody starts.
        if self.in_order:
            first = oldest
        assert first is None or output.num_scheduled_tokens[first.request_id] >= 1
        assert not self.alive or output.num_scheduled_tokens
        self._check_partial_prefills(output)
        return output

    def _check_partial_prefills(self, output: SchedulerOutput) -> None:
        if self.runner.tokens_per_step > 1:
            return  # a decode of several tokens can be cut too, and that is no prompt
        requests = self.scheduler.requests
        remaining = {i: requests[i].num_tokens - requests[i].num_computed_tokens for i in output.num_scheduled_tokens}
        partial = [n for i, n in remaining.items() if output.num_scheduled_tokens[i] < n]
        config = self.config
        if config.max_num_partial_prefills:
            assert len(partial) <= config.max_num_partial_prefills
        if config.max_long_partial_prefills:
            long = [n for n in partial if n > config.long_prefill_token_threshold]
            assert len(long) <= config.max_long_partial_prefills

    def step(self, abort_between: Sequence[str] = (), reset_between: bool = False) -> SchedulerOutput:
        output = self.schedule()
        told = self.runner.step(output)
        for name in abort_between:
            free = self.manager.num_free_blocks
            self.abort(name)
            if name in output.num_scheduled_tokens:
                assert self.manager.num_free_blocks == free  # the step may still write into its blocks
            self.manager.check_accounting()
        if reset_between:
            self.reset_prefix_cache()
        self.take(self.scheduler.update_from_output(output, told))
        self.check()
        return output

    def run(self) -> None:
        """To the end: all finish, and all blocks come back."""
        while self.scheduler.has_requests():
            self.step()
        assert not self.alive and not self.runner.requests
        assert all(pool.num_free == pool.num_blocks - 1 for pool in self.manager.pools)

    def take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self.outputs[update.req_id] += update.new_token_ids
            if update.finish_reason:
                self.finish_reasons[update.req_id] = update.finish_reason
                self._check_finished(self.alive.pop(update.req_id))

    def _check_finished(self, request: Request) -> None:
        """The tokens are those of the request alone in the world, and so is the reason to stop."""
        params, limit = request.sampling_params, self.limit
        if params.max_tokens is not None:
            limit = min(limit, request.num_prompt_tokens + params.max_tokens)
        stopping = frozenset() if params.ignore_eos else EOS
        prompt, salt = request.prompt_token_ids, request.cache_salt
        right = expected_output(prompt, salt, stopping, params.min_tokens, limit)
        assert self.outputs[request.request_id] == request.output_token_ids == right
        stopped = right[-1] in stopping and len(right) > params.min_tokens
        reason = "stop" if stopped else "length"
        assert self.finish_reasons[request.request_id] == request.status.finish_reason == reason

    def check(self) -> None:
        """What holds whenever no step is under way."""
        self.manager.check_accounting()
        self._check_shared_blocks()
        served = [request.order for request in self.scheduler.running]
        assert served == sorted(served)
        if self.in_order:  # those that came last are preempted
            served += [request.order for request in self.scheduler.waiting]
            assert served == sorted(served)

    def _check_shared_blocks(self) -> None:
        """A block has two owners only where both have computed it, at the same place."""
        uses: dict[tuple[int, int], list[tuple[Request, int]]] = {}
        for request in self.scheduler.running:
            for group, held in enumerate(self.manager.get_blocks(request)):
                for i, block in enumerate(held):
                    assert block != 0
                    uses.setdefault((group, block), []).append((request, i))
        for (group, _), owners in uses.items():
            if len(owners) > 1:
                assert len({i for _, i in owners}) == 1
                for request, i in owners:
                    assert (i + 1) * self.block_sizes[group] <= request.num_computed_tokens
