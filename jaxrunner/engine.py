"""The engine: requests in, steps, outputs. Scheduler and runner below it, whole requests with their text above."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, SupportsIndex

from jaxrunner.active_request import ActiveRequest, ActiveSequence, fan_out
from jaxrunner.config import RunnerConfig
from jaxrunner.detokenizer import TextDecoder
from jaxrunner.grammars import Grammars, GrammarStates
from jaxrunner.kv_cache.manager import KVCacheManager, PrefixCacheStats
from jaxrunner.kv_cache.spec import KVCacheConfig
from jaxrunner.logprobs import SequenceLogprobs, TokenTexts
from jaxrunner.outputs import Prompt, RequestOutput, SequenceDelta
from jaxrunner.protocol import ModelRunnerOutput, SchedulerOutput
from jaxrunner.request import Request
from jaxrunner.ruled_out import nothing_left
from jaxrunner.sampling_params import RequestOutputKind
from jaxrunner.scheduler import Policy, RequestUpdate, Scheduler, SchedulerConfig
from jaxrunner.sequence_text import SequenceText


class Runner(Protocol):
    """What the engine needs of a ModelRunner."""

    config: RunnerConfig

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput: ...

    def update_params(self, weights: Any) -> None: ...

    def reset(self) -> None: ...


@dataclass(slots=True)
class StepResult:
    """What a step brought.

    Attributes:
        deltas: one for every sequence that got tokens.
        finished: requests whose last sequence ended in this step, with all they have.
        outputs: what the callers are to be told now, as their requests' ``output_kind`` has it.
    """

    deltas: list[SequenceDelta]
    finished: list[RequestOutput]
    outputs: list[RequestOutput]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of an engine between two steps.

    Attributes:
        num_running, num_waiting: sequences.
        kv_cache_usage: share of the KV cache's blocks that sequences hold, from 0 to 1.
        num_free_blocks: blocks that can be lent now; of these some still hold what the prefix cache can find.
        num_preemptions: since the engine was made or reset.
        prefix_cache: likewise.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_free_blocks: int
    num_preemptions: int
    prefix_cache: PrefixCacheStats


class EngineDeadError(RuntimeError):
    """A failed step could not be cleaned up behind, as when the device is gone. No request can be served any more."""


class Engine:
    """Runs requests step by step: ``add_request``, ``step`` until ``has_unfinished_requests`` is False.

    Prompts must have passed ``InputProcessor``. Not safe for use by several threads at once.

    Args:
        kv_cache_config: the blocks that the runner has.
        tokenizer: None serves requests with ``detokenize=False`` only.
        eos_token_ids: every id that ends a text.
        grammars: compiles structured outputs; None: the engine has none.

    Attributes:
        scheduler: the current one; a failed step replaces it.
        dead: why the engine can't go on: a failed step could not be cleaned up behind; None: it can.
    """

    def __init__(
        self,
        runner: Runner,
        kv_cache_config: KVCacheConfig,
        tokenizer: TextDecoder | None = None,
        *,
        eos_token_ids: tuple[int, ...] = (),
        grammars: Grammars | None = None,
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
        self._token_texts = TokenTexts(tokenizer)
        self._grammar_states = GrammarStates(grammars)
        self._requests: dict[str, ActiveRequest] = {}
        self._sequences: dict[str, ActiveSequence] = {}  # those that run, by the scheduler's id
        self.scheduler = self._new_scheduler()
        self.dead: BaseException | None = None

    def _new_scheduler(self) -> Scheduler:
        manager = KVCacheManager(self._kv_cache_config, self._enable_prefix_caching)
        return Scheduler(self._scheduler_config, manager)

    @property
    def scheduling_policy(self) -> Policy:
        """The order of service."""
        return self._scheduler_config.policy

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def add_request(
        self, request_id: str, prompt: Prompt, priority: int = 0, output_kind: RequestOutputKind | None = None
    ) -> None:
        """Queues a request, as ``params.n`` sequences: the first computes the prompt, the others branch off.

        Args:
            priority: lower values are served first; only with the scheduling policy "priority".
            output_kind: instead of that of the prompt's parameters.

        Raises:
            ValueError: the id is taken, a priority without that policy, or a prompt that can never run.
            EngineDeadError: see ``dead``.
        """
        self._check_alive()
        check_priority(priority, self.scheduling_policy)
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is taken by an unfinished request")
        active = ActiveRequest(request_id, prompt, output_kind or prompt.params.output_kind)
        self._requests[request_id] = active
        leader = None
        try:
            for sequence_id, params in fan_out(request_id, prompt.params):
                request = Request(
                    sequence_id,
                    prompt.token_ids,
                    params,
                    self.eos_token_ids,
                    priority=priority,
                    cache_salt=prompt.cache_salt,
                    leader=leader,
                    pooling_params=prompt.pooling_params,
                )
                leader = leader or request
                text = SequenceText(self.tokenizer, params)
                self.scheduler.add_request(request)
                logprobs = SequenceLogprobs(params, self._token_texts)
                self._sequences[sequence_id] = active.add(request, text, logprobs)
                self._grammar_states.add(request)
        except BaseException:
            self.abort([request_id])
            raise

    def step(self) -> StepResult:
        """Plans a step, runs it, and takes in its tokens.

        Whatever it raises, a KeyboardInterrupt included, ends all requests: none of them can be relied on any more.
        The engine itself goes on, as if new (``reset``); where even that fails it is dead.

        Raises:
            EngineDeadError: see ``dead``.
        """
        self._check_alive()
        try:
            plan = self.scheduler.schedule()
            plan.grammar_bitmask = self._grammar_states.masks(plan)
            output = self.runner.execute_model(plan)
            return self._take(self.scheduler.update_from_output(plan, output), output)
        except BaseException:
            self.reset()
            raise

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Ends requests; those that aren't unfinished are passed over. Returns what each caller is told last."""
        told = []
        for request_id in request_ids:
            active = self._requests.pop(request_id, None)
            if active is None:
                continue
            deltas = []
            for sequence in [s for s in active.sequences if s in active.running]:
                deltas.append(sequence.end("abort"))
                self._close(sequence, "abort")
            output = active.told(deltas) if deltas else None
            if output is not None:
                told.append(output)
        return told

    def reset(self) -> None:
        """Forgets all requests and the prefix cache, in the scheduler and in the runner.

        Whatever it raises leaves the engine dead, until another ``reset`` succeeds.
        """
        self._sequences.clear()
        self._grammar_states.clear()
        self._requests.clear()
        try:
            self.scheduler = self._new_scheduler()
            self.runner.reset()
        except BaseException as error:
            self.dead = error
            raise
        self.dead = None

    def update_weights(self, weights: Any, reset_running_requests: bool = True) -> None:
        """Replaces the model's weights between two steps and resets the prefix cache; see ``LLM.update_weights``."""
        self._check_alive()
        self.runner.update_params(weights)
        self.scheduler.reset_prefix_cache(reset_running_requests)

    def stats(self) -> EngineStats:
        """How busy it is, and how well the prefix cache does."""
        scheduler = self.scheduler
        manager = scheduler.manager
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=manager.usage,
            num_free_blocks=manager.num_free_blocks,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache=replace(manager.stats),
        )

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(
                f"the engine can't go on: after a failed step it could not be reset ({type(self.dead).__name__}:"
                f" {self.dead}); make a new one"
            ) from self.dead

    def _take(self, updates: list[RequestUpdate], runner_output: ModelRunnerOutput) -> StepResult:
        result = StepResult([], [], [])
        streaming: dict[ActiveRequest, list[SequenceDelta]] = {}
        now, logprobs = time.monotonic(), runner_output.logprobs
        for req_id, lists in runner_output.prompt_logprobs_dict.items():
            if req_id in self._sequences:
                self._sequences[req_id].take_prompt_logprobs(lists)
        for update in updates:
            sequence = self._sequences[update.req_id]
            active = sequence.parent
            metrics = active.output.metrics
            if metrics is not None and metrics.first_token_time is None:
                metrics.first_token_time = now
            row = runner_output.req_id_to_index[update.req_id]
            if runner_output.pooler_output is not None:
                active.output.embedding = runner_output.pooler_output[row]
            failure = nothing_left(sequence.request.sampling_params, update.new_token_ids)
            if failure is None:
                failure = self._grammar_states.accept(update.req_id, update.new_token_ids)
            if failure is not None:
                active.output.error = failure
            delta = sequence.take(update, logprobs, row) if failure is None else sequence.end("error")
            result.deltas.append(delta)
            if delta.finish_reason is not None:
                self._close(sequence, delta.finish_reason)
            if active.kind is not RequestOutputKind.FINAL_ONLY:
                streaming.setdefault(active, []).append(delta)
            if not active.running:
                del self._requests[active.request_id]
                result.finished.append(active.output)
                if active.kind is RequestOutputKind.FINAL_ONLY:
                    result.outputs.append(active.output)
        for active, deltas in streaming.items():
            output = active.told(deltas)
            if output is not None:
                result.outputs.append(output)
        return result

    def _close(self, sequence: ActiveSequence, reason: str) -> None:
        # A stop string, an abort and an error the scheduler does not know of yet; to all others it says nothing.
        self.scheduler.finish_requests(sequence.request.request_id, reason)
        del self._sequences[sequence.request.request_id]
        self._grammar_states.remove(sequence.request.request_id)
        sequence.parent.close(sequence)


def check_priority(priority: int, policy: Policy) -> None:
    """Raises ValueError for a priority that is no integer, or that nobody would look at."""
    if isinstance(priority, bool) or not isinstance(priority, SupportsIndex):  # NumPy's integers are some
        raise ValueError(f"priority must be an integer, got {priority!r:.100}")
    if priority and policy != "priority":
        raise ValueError(
            f"priority is {priority}, but requests are served first come, first served: leave it at 0, or set"
            " scheduling_policy='priority'"
        )
