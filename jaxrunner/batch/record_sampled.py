"""Bookkeeping after a step: sampled tokens become part of their requests."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int32

from jaxrunner.batch.input_batch import InputBatch

NOT_SAMPLED = -1


def record_sampled(batch: InputBatch, sampled: Int32[np.ndarray, "R w"]) -> list[list[int]]:
    """Appends each row's tokens to its request, and returns them as lists.

    Args:
        sampled: per row of the step up to w tokens, then NOT_SAMPLED; a discarded row has none.

    Raises:
        ValueError: rows do not match the batch, a token is behind a gap, or a request would outgrow its row. Nothing
            has changed then.
    """
    n = batch.num_reqs
    if sampled.ndim != 2 or len(sampled) != n:
        raise ValueError(f"sampled must be [{n}, w] for the {n} rows of the step, got {list(sampled.shape)}")
    there = sampled >= 0
    indices = batch.row_indices
    if (batch.num_tokens[indices] + sampled.shape[1] > batch.token_row_stride).any():
        _check_room(batch, there)
    at = batch.row_starts + batch.num_tokens[indices]
    tokens = batch.token_ids.reshape(-1)
    if sampled.shape[1] == 1:
        column, kept = sampled[:, 0], there[:, 0]
        if kept.all():
            tokens[at] = column
            batch.num_tokens[indices] += 1
            return sampled.tolist()
        tokens[at[kept]] = column[kept]
        batch.num_tokens[indices] += kept
        lists = sampled.tolist()
        for row in np.flatnonzero(~kept).tolist():
            lists[row] = []
        return lists
    counts = there.sum(axis=1, dtype=np.int32)
    if (there != (np.arange(sampled.shape[1]) < counts[:, None])).any():
        raise ValueError(f"a row of sampled has a token behind a gap: {sampled.tolist()}")
    tokens[(at[:, None] + np.arange(sampled.shape[1]))[there]] = sampled[there]
    batch.num_tokens[indices] += counts
    return [row[:count] for row, count in zip(sampled.tolist(), counts.tolist(), strict=True)]


def _check_room(batch: InputBatch, there: Bool[np.ndarray, "R w"]) -> None:
    """The slow look, when some row is so long that the widest sample would not fit."""
    lengths = batch.num_tokens[batch.row_indices] + there.sum(axis=1)
    if (lengths > batch.token_row_stride).any():
        row = int(np.flatnonzero(lengths > batch.token_row_stride)[0])
        raise ValueError(
            f"request {batch.req_ids[row]!r} would have {lengths[row]} tokens, max_model_len is {batch.max_model_len}:"
            " it should have been finished"
        )
