"""What crosses the border between a scheduler and the runner.

A scheduler sends *differences*: whole state for a request that is new to the runner, changes for one that it knows,
and the ids of those that ended. Names and meaning are vLLM's. Everything here is plain data; it is checked where it is
used (``jaxrunner.batch.validate``), before anything changes.

Token lists may be Python lists or int32 NumPy arrays. Block ids are per cache group: a tuple with one list a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32

if TYPE_CHECKING:
    from jaxrunner.logprobs_lists import LogprobsLists
    from jaxrunner.pooling import PoolingParams
    from jaxrunner.sampling_params import SamplingParams

TokenIds = Sequence[int] | np.ndarray
BlockIds = tuple[Sequence[int], ...]


@dataclass(slots=True)
class NewRequestData:
    """Everything the runner must know about a request that it sees for the first time.

    Attributes:
        prompt_token_ids: the user's prompt, whole even when a prefix was found in the cache.
        prefill_token_ids: what is fed in before sampling starts, when that is more than the prompt: prompt and
            outputs of a request that restarts. None means the prompt alone.
        block_ids: physical blocks per cache group, in logical order.
        num_computed_tokens: tokens whose keys and values are already in the cache (a prefix hit).
        pooling_params: a ``jaxrunner.pooling.PoolingParams``: the prompt's embedding is wanted.
        prompt_embeds, mm_features, lora_request: carried; the runner refuses them by name.
    """

    req_id: str
    prompt_token_ids: TokenIds
    block_ids: BlockIds
    num_computed_tokens: int = 0
    sampling_params: SamplingParams | None = None
    prefill_token_ids: TokenIds | None = None
    prompt_embeds: Any = None
    mm_features: Sequence[Any] = ()
    lora_request: Any = None
    pooling_params: PoolingParams | None = None


@dataclass(slots=True)
class CachedRequestData:
    """Changes of requests the runner knows, one entry a request in every list.

    Attributes:
        resumed_req_ids: those of ``req_ids`` that come back from preemption. Their ``new_block_ids`` *replace* what
            the runner had; for all others they are *appended*.
        new_block_ids: per request a tuple over groups, or None where no group grew.
        num_computed_tokens: tokens whose keys and values exist before this step (rejected drafts already taken off).
        num_output_tokens: how many output tokens the scheduler counts. Fewer than the runner has means that the
            runner's surplus is dropped.
        new_token_ids: tokens the runner cannot know because another stage sampled them. May be left empty.
        all_token_ids: prompt and outputs of resumed requests, for a runner that lost them. May lack any of them.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[BlockIds | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)
    new_token_ids: list[TokenIds] = field(default_factory=list)
    all_token_ids: Mapping[str, TokenIds] = field(default_factory=dict)

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclass(slots=True)
class GrammarOutput:
    """Allowed tokens of the requests with structured output that sample in a step.

    Attributes:
        structured_output_request_ids: whose each row is.
        grammar_bitmask: bit b of word w speaks for token 32 w + b.
    """

    structured_output_request_ids: list[str]
    grammar_bitmask: Int32[np.ndarray, "n V/32"]


@dataclass(slots=True)
class SchedulerOutput:
    """One step's plan, as differences against what the runner holds.

    Attributes:
        num_scheduled_tokens: tokens to run this step per request id (drafts included), at least 1 each.
        scheduled_spec_decode_tokens: draft tokens per request id, for the requests that have any.
        finished_req_ids: ended since the last step. The same id may be new in this step: abort and resubmit.
        preempted_req_ids: lost their blocks since the last step. The runner drops row and request index and keeps
            the tokens. A request that is in none of the sets and not scheduled is merely unscheduled: it keeps
            blocks and index.
        num_common_prefix_blocks: per cache group, leading blocks that all scheduled requests share.
        block_copies: per cache group, (source, destination) block ids to copy before the step (copy on write).
        new_block_ids_to_zero: per cache group, blocks to clear before the copies.
        grammar_bitmask: which tokens requests with structured output may sample in this step.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    num_common_prefix_blocks: list[int] = field(default_factory=list)
    block_copies: list[list[tuple[int, int]]] = field(default_factory=list)
    new_block_ids_to_zero: list[list[int]] = field(default_factory=list)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    free_encoder_mm_hashes: list[str] = field(default_factory=list)
    grammar_bitmask: GrammarOutput | None = None


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step gives back: tokens on the host, by row of the batch as it was in the step.

    Attributes:
        req_ids: request of each row.
        req_id_to_index: the inverse of ``req_ids``.
        sampled_token_ids: tokens committed per row: empty for a prompt that is not yet fully computed. NO_TOKEN (of
            ``jaxrunner.sampling_columns``) where every token was ruled out: such a request must end.
        flat_token_ids, token_offsets: the same tokens as arrays: row r has
            flat_token_ids[token_offsets[r] : token_offsets[r + 1]]. None from runners that only give lists.
        logprobs: a row for each of ``req_ids``, if any request wants them; what stands in rows without a token, or
            with NO_TOKEN, means nothing.
        prompt_logprobs_dict: of each prompt that is complete with this step and wants them: those of its tokens from
            the second on.
        pooler_output: if a prompt that is pooled was in the step, for each row its embedding, float32 [D], or None
            while its prompt isn't complete.
        logits: float32 [S, V], only from a step that was asked for them.
    """

    req_ids: list[str] = field(default_factory=list)
    req_id_to_index: dict[str, int] = field(default_factory=dict)
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: LogprobsLists | None = None
    prompt_logprobs_dict: dict[str, LogprobsLists] = field(default_factory=dict)
    pooler_output: list[np.ndarray | None] | None = None
    logits: np.ndarray | None = None
    flat_token_ids: np.ndarray | None = None
    token_offsets: np.ndarray | None = None
