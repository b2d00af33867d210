"""A request as the scheduler sees it: its tokens, how far they are computed, and when it stops."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Sequence

from jaxrunner.pooling import PoolingParams
from jaxrunner.repetition import RepetitionDetectionParams
from jaxrunner.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # never scheduled: the runner doesn't know it
    RUNNING = "running"
    PREEMPTED = "preempted"  # known to the runner, but without blocks; waits to be computed again
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_REPETITION = "repetition"

    @property
    def is_finished(self) -> bool:
        return self in _FINISHED

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "abort" or "repetition"; None for a request that goes on."""
        return self.value if self in _FINISHED else None


_FINISHED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH,
    RequestStatus.FINISHED_ABORTED,
    RequestStatus.FINISHED_REPETITION,
)


class Request:
    """One sequence to generate.

    Arguments:
        request_id: unique among the unfinished requests.
        prompt_token_ids: at least one token.
        sampling_params: read, never changed.
        eos_token_ids: every id that ends the output unless ``ignore_eos``: the configuration's and the
            tokenizer's.
        arrival_time: seconds; recorded only. Among equals the order of service is that of ``Scheduler.add_request``.
        priority: under the policy "priority" lower values are served first.
        pooling_params: how its prompt's embedding is made, if it wants one.
        cache_salt: blocks are shared only between requests of the same salt.
        leader: a request with the same prompt. This one waits until the leader has computed it, and branches off.

    Attributes:
        all_token_ids: prompt and outputs; ``output_token_ids`` are its tail. Only ``append_output_tokens``
            adds to them.
        num_computed_tokens: leading tokens whose keys and values are in the cache and may be relied on.
        num_cached_tokens: of the prompt, the tokens found in the prefix cache at first admission; None
            before.
        num_preemptions: how often it has lost its blocks.
        order: (priority, number of arrival), the scheduler's note: the lowest is served first.
        stop_reason: the id out of ``stop_token_ids`` that ended it, or "repetition_detected"; None for an
            end-of-sequence id or the length.

    Raises:
        ValueError: the prompt is empty.
    """

    __slots__ = (
        "request_id",
        "prompt_token_ids",
        "num_prompt_tokens",
        "sampling_params",
        "arrival_time",
        "priority",
        "cache_salt",
        "leader",
        "pooling_params",
        "order",
        "status",
        "stop_reason",
        "all_token_ids",
        "output_token_ids",
        "num_computed_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "block_hashes",
        "hash_epoch",
        "num_published_tokens",
        "num_block_tokens",
        "_eos_token_ids",
        "_stopping_ids",
        "_min_tokens",
        "_repetition",
        "_max_total_tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        eos_token_ids: Iterable[int] = (),
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        leader: Request | None = None,
        pooling_params: PoolingParams | None = None,
    ) -> None:
        if len(prompt_token_ids) == 0:
            raise ValueError(f"request {request_id!r} has an empty prompt: it needs at least one token")
        if leader is not None and sampling_params.prompt_logprobs is not None:
            raise ValueError(f"request {request_id!r} has a leader, so the leader's prompt_logprobs are its own")
        self.request_id = request_id
        self.prompt_token_ids = [int(token) for token in prompt_token_ids]
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.sampling_params = sampling_params
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.leader = leader
        self.pooling_params = pooling_params
        self.order = (0, 0)

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.all_token_ids = list(self.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0

        # The KVCacheManager's notes. Hash i covers all tokens up to the end of block i.
        self.block_hashes: list[bytes] = []
        self.hash_epoch = -1  # which reset of the prefix cache block_hashes belong to
        self.num_published_tokens = 0  # leading tokens whose blocks other requests may find
        self.num_block_tokens = 0  # tokens that the owned blocks have room for

        self._eos_token_ids = frozenset() if sampling_params.ignore_eos else frozenset(eos_token_ids)
        self._stopping_ids = self._eos_token_ids.union(sampling_params.stop_token_ids or ())
        self._min_tokens = sampling_params.min_tokens
        detection = sampling_params.repetition_detection
        self._repetition = detection if isinstance(detection, RepetitionDetectionParams) else None
        self.limit_length(None)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether blocks of others may stand in for its prompt. Prompt logprobs, and the mean over the hidden states,
        need every position computed.
        """
        needs_all = self.pooling_params is not None and self.pooling_params.pooling == "mean"
        params = self.sampling_params
        return not needs_all and params.prompt_logprobs is None and not params.skip_reading_prefix_cache

    def limit_length(self, max_model_len: int | None) -> None:
        """Stop at ``max_tokens`` outputs or at ``max_model_len`` tokens in all, whichever comes first."""
        max_tokens = self.sampling_params.max_tokens
        limits = [] if max_tokens is None else [self.num_prompt_tokens + max_tokens]
        if max_model_len is not None:
            limits.append(max_model_len)
        self._max_total_tokens = min(limits, default=2**62)

    def append_output_tokens(self, token_ids: list[int]) -> list[int]:
        """Take the tokens of one step up to the first that stops the request; sets status and stop reason.

        Arguments:
            token_ids: the step's tokens in order, several under speculation.
        Returns:
            The tokens taken: ``token_ids`` itself, or what is left of it when a stop lies inside.
        """
        longer = len(self.all_token_ids) + len(token_ids)
        may_stop = self._repetition is not None or not self._stopping_ids.isdisjoint(token_ids)
        if longer < self._max_total_tokens and not may_stop:
            self.all_token_ids.extend(token_ids)
            self.output_token_ids.extend(token_ids)
            return token_ids
        for i, token in enumerate(token_ids):
            self.all_token_ids.append(token)
            self.output_token_ids.append(token)
            # min_tokens counts the tokens *before* the one that stops, as the sampler's mask does.
            if token in self._stopping_ids and len(self.output_token_ids) > self._min_tokens:
                self.status = RequestStatus.FINISHED_STOPPED
                self.stop_reason = None if token in self._eos_token_ids else token
            elif len(self.all_token_ids) >= self._max_total_tokens:
                self.status = RequestStatus.FINISHED_LENGTH
            elif self._repeats():
                self.status = RequestStatus.FINISHED_REPETITION
                self.stop_reason = "repetition_detected"
            else:
                continue
            return token_ids[: i + 1]
        return token_ids

    def _repeats(self) -> bool:
        detection, output = self._repetition, self.output_token_ids
        return detection is not None and len(output) >= self._min_tokens and detection.found_in(output)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, tokens={self.num_tokens}, "
            f"prompt={self.num_prompt_tokens}, computed={self.num_computed_tokens})"
        )
