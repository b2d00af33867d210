"""The engine: requests in, steps, outputs. Scheduler and runner below it, whole requests with their text above."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxrunner.config import RunnerConfig
from jaxrunner.detokenizer import TextDecoder
from jaxrunner.kv_cache.manager import KVCacheManager
from jaxrunner.kv_cache.spec import KVCacheConfig
from jaxrunner.outputs import CompletionOutput, Prompt, RequestMetrics, RequestOutput, SequenceDelta
from jaxrunner.protocol import ModelRunnerOutput, SchedulerOutput
from jaxrunner.request import Request
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.scheduler import Policy, RequestUpdate, Scheduler, SchedulerConfig
from jaxrunner.sequence_text import SequenceText


class Runner(Protocol):
    """What the engine needs of a ModelRunner."""

    config: RunnerConfig

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput: ...

    def reset(self) -> None: ...


@dataclass(slots=True)
class StepResult:
    """What a step brought.

    Attributes:
        deltas: one for every sequence that got tokens.
        finished: requests whose last sequence ended in this step.
    """

    deltas: list[SequenceDelta]
    finished: list[RequestOutput]


@dataclass(slots=True)
class _Sequence:
    """One of the sequences of a request: the scheduler's request, its text, and where its output goes."""

    parent: RequestOutput
    output: CompletionOutput
    request: Request
    text: SequenceText


class Engine:
    """Runs requests step by step: ``add_request``, ``step`` until ``has_unfinished_requests`` is False.

    Prompts must have passed ``InputProcessor``. Not safe for use by several threads at once.

    Args:
        kv_cache_config: the blocks that the runner has.
        tokenizer: None serves requests with ``detokenize=False`` only.
        eos_token_ids: every id that ends a text.

    Attributes:
        scheduler: the current one; a failed step replaces it.
    """

    def __init__(
        self,
        runner: Runner,
        kv_cache_config: KVCacheConfig,
        tokenizer: TextDecoder | None = None,
        *,
        eos_token_ids: tuple[int, ...] = (),
        enable_prefix_caching: bool = True,
        long_prefill_token_threshold: int = 0,
        max_num_partial_prefills: int = 0,
        max_long_partial_prefills: int = 0,
        scheduling_policy: Policy = "fcfs",
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._kv_cache_config = kv_cache_config
        self._enable_prefix_caching = enable_prefix_caching
        self._scheduler_config = SchedulerConfig(
            max_num_seqs=runner.config.max_num_reqs,
            max_num_batched_tokens=runner.config.max_num_batched_tokens,
            max_model_len=runner.config.max_model_len,
            long_prefill_token_threshold=long_prefill_token_threshold,
            policy=scheduling_policy,
            max_num_partial_prefills=max_num_partial_prefills,
            max_long_partial_prefills=max_long_partial_prefills,
        )
        self._sequences: dict[str, _Sequence] = {}
        self._unfinished: dict[str, list[str]] = {}  # request id -> ids of its sequences that still run
        self.scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        manager = KVCacheManager(self._kv_cache_config, self._enable_prefix_caching)
        return Scheduler(self._scheduler_config, manager)

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def add_request(self, request_id: str, prompt: Prompt, priority: int = 0) -> None:
        """Queues a request, as ``params.n`` sequences: the first computes the prompt, the others branch off.

        Args:
            priority: lower values are served first; only with the scheduling policy "priority".

        Raises:
            ValueError: the id is taken, a priority without that policy, or a prompt that can never run.
        """
        if priority and self._scheduler_config.policy != "priority":
            raise ValueError(f"priority is {priority}, but the scheduling policy is 'fcfs': set it to 'priority'")
        if request_id in self._unfinished:
            raise ValueError(f"request id {request_id!r} is taken by an unfinished request")
        output = RequestOutput(request_id, prompt.text, prompt.token_ids, [], False, metrics=RequestMetrics())
        ids = self._unfinished[request_id] = []
        leader = None
        try:
            for index, (sequence_id, params) in enumerate(fan_out(request_id, prompt.params)):
                request = Request(
                    sequence_id,
                    prompt.token_ids,
                    params,
                    self.eos_token_ids,
                    priority=priority,
                    cache_salt=prompt.cache_salt,
                    leader=leader,
                )
                leader = leader or request
                completion = CompletionOutput(index, "", [])
                sequence = _Sequence(output, completion, request, SequenceText(self.tokenizer, params))
                self.scheduler.add_request(request)
                self._sequences[sequence_id] = sequence
                ids.append(sequence_id)
                output.outputs.append(completion)
        except ValueError:
            self.abort([request_id])
            raise

    def step(self) -> StepResult:
        """Plans a step, runs it, and takes in its tokens.

        Whatever it raises, a KeyboardInterrupt included, ends all requests: none of them can be relied on any more.
        The engine itself goes on, as if new (``reset``).
        """
        try:
            plan = self.scheduler.schedule()
            output = self.runner.execute_model(plan)
            return self._take(self.scheduler.update_from_output(plan, output))
        except BaseException:
            self.reset()
            raise

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Ends requests; those that aren't unfinished are passed over. Returns what they had so far."""
        aborted = []
        for request_id in request_ids:
            for sequence_id in list(self._unfinished.get(request_id, ())):
                sequence = self._sequences[sequence_id]
                aborted += self._finish(sequence_id, sequence, "abort", None)
            self._unfinished.pop(request_id, None)
        return aborted

    def reset(self) -> None:
        """Forgets all requests and the prefix cache, in the scheduler and in the runner."""
        self._sequences.clear()
        self._unfinished.clear()
        self.scheduler = self._new_scheduler()
        self.runner.reset()

    def _take(self, updates: list[RequestUpdate]) -> StepResult:
        result = StepResult([], [])
        now = time.monotonic()
        for update in updates:
            sequence = self._sequences[update.req_id]
            text, reason = sequence.text, update.finish_reason
            stop_reason: int | str | None = update.stop_reason
            taken = text.append(update.new_token_ids, ends_with_stop_token=reason == "stop")
            tokens = update.new_token_ids[:taken]
            if text.stop_reason is not None:
                reason, stop_reason = "stop", text.stop_reason
            sequence.output.token_ids.extend(tokens)
            sequence.output.text = text.text
            metrics = sequence.parent.metrics
            if metrics is not None and metrics.first_token_time is None:
                metrics.first_token_time = now
            delta = text.take_delta(finished=reason is not None)
            parent = sequence.parent
            result.deltas.append(
                SequenceDelta(parent.request_id, sequence.output.index, delta, tokens, reason, stop_reason)
            )
            if reason is not None:
                result.finished += self._finish(update.req_id, sequence, reason, stop_reason)
        return result

    def _finish(self, sequence_id: str, sequence: _Sequence, reason: str, stop_reason: Any) -> list[RequestOutput]:
        """Closes a sequence; its request, in a list, if that was the last one."""
        # A stop string and an abort the scheduler does not know of yet; to all others it says nothing.
        self.scheduler.finish_requests(sequence_id, reason)
        del self._sequences[sequence_id]
        sequence.output.finish_reason, sequence.output.stop_reason = reason, stop_reason
        parent = sequence.parent
        if parent.metrics is not None:
            parent.metrics.num_preemptions += sequence.request.num_preemptions
        if sequence.output.index == 0:
            parent.num_cached_tokens = sequence.request.num_cached_tokens
        running = self._unfinished[parent.request_id]
        running.remove(sequence_id)
        if running:
            return []
        del self._unfinished[parent.request_id]
        parent.finished = True
        if parent.metrics is not None:
            parent.metrics.finished_time = time.monotonic()
        return [parent]


def fan_out(request_id: str, params: SamplingParams) -> list[tuple[str, SamplingParams]]:
    """The sequences of a request, as (id, parameters): sequence i is seeded with ``seed + i``, so that they differ.

    Without a seed their ids make them differ. The prompt is the same for all, so only the first reports on it.
    """
    if params.n == 1:
        return [(request_id, params)]
    sequences = []
    for i in range(params.n):
        seed = None if params.seed is None else (params.seed + i) % 2**64
        prompt_logprobs = None if i else params.prompt_logprobs
        sequences.append((f"{i}_{request_id}", replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)))
    return sequences
