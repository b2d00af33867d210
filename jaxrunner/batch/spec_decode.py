"""Which logits rows verify draft tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32


@dataclass(frozen=True, slots=True)
class SpecDecodeMetadata:
    """A request with k drafts has 1 + k logits rows: k that judge a draft each, and one for the bonus token.

    Attributes:
        cu_num_draft_tokens: int32 [R], running sum of drafts.
        cu_num_sampled_tokens: int32 [R], running sum of logits rows.
        logits_indices: int32 [S], token of the stream whose hidden state gives each logits row.
        target_logits_indices: int32 [number of drafts], logits row that judges each draft.
        bonus_logits_indices: int32 [R], logits row of each request's last token.
        draft_token_positions: int32 [number of drafts], where in the stream each draft lies.
    """

    cu_num_draft_tokens: Int32[np.ndarray, "R"]
    cu_num_sampled_tokens: Int32[np.ndarray, "R"]
    logits_indices: Int32[np.ndarray, "S"]
    target_logits_indices: Int32[np.ndarray, "drafts"]
    bonus_logits_indices: Int32[np.ndarray, "R"]
    draft_token_positions: Int32[np.ndarray, "drafts"]


def spec_decode_metadata(
    cu_num_scheduled: Int32[np.ndarray, "R"], num_draft_tokens: Int32[np.ndarray, "R"]
) -> SpecDecodeMetadata:
    """Metadata for rows that end at ``cu_num_scheduled`` in the token stream, with so many drafts at their ends."""
    drafts = np.asarray(num_draft_tokens, np.int32)
    ends = np.asarray(cu_num_scheduled, np.int32)
    sampled = drafts + 1
    cu_sampled = np.cumsum(sampled, dtype=np.int32)
    cu_drafts = np.cumsum(drafts, dtype=np.int32)
    logits_indices = np.repeat(ends - cu_sampled, sampled) + np.arange(cu_sampled[-1], dtype=np.int32)
    target = np.repeat(cu_sampled - sampled - (cu_drafts - drafts), drafts) + np.arange(cu_drafts[-1], dtype=np.int32)
    return SpecDecodeMetadata(
        cu_num_draft_tokens=cu_drafts,
        cu_num_sampled_tokens=cu_sampled,
        logits_indices=logits_indices,
        target_logits_indices=target,
        bonus_logits_indices=cu_sampled - 1,
        draft_token_positions=logits_indices[target + 1],
    )
