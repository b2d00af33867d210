"""Bookkeeping after a step: sampled tokens become part of their requests."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int32

from jaxrunner.batch.input_batch import InputBatch
from jaxrunner.batch.packing import equal

NOT_SAMPLED = -1


def record_sampled(batch: InputBatch, sampled: Int32[np.ndarray, "R w"]) -> list[list[int]]:
    """Appends each row's tokens to its request, and returns them as lists.

    Args:
        sampled: per row of the step up to w tokens, then NOT_SAMPLED; a discarded row has none.

    Raises:
        ValueError: rows do not match the batch, a token is behind a gap, or a request would outgrow its row. Nothing
            has changed then.
    """
    return record_tokens(batch, sampled).lists()


class SampledTokens:
    """Tokens of a step's rows: flat, and as lists for those who want them.

    Attributes:
        token_ids: [n], one row's after the other's.
        offsets: [R + 1]; row r has token_ids[offsets[r] : offsets[r + 1]].
    """

    __slots__ = ("_sampled", "offsets", "token_ids")

    def __init__(
        self,
        token_ids: Int32[np.ndarray, "n"],
        offsets: Int32[np.ndarray, "R+1"],
        sampled: Int32[np.ndarray, "R w"],
    ) -> None:
        self.token_ids, self.offsets, self._sampled = token_ids, offsets, sampled

    def lists(self) -> list[list[int]]:
        """One list a row. Making them takes most of the time of bookkeeping."""
        sampled, flat = self._sampled, self.token_ids
        if len(flat) == sampled.size:
            return sampled.tolist()
        if sampled.shape[1] > 1:
            tokens = flat.tolist()
            return [tokens[start:end] for start, end in pairwise(self.offsets.tolist())]
        lists: list[list[int]] = sampled.tolist()
        for row in (sampled[:, 0] < 0).nonzero()[0].tolist():
            lists[row] = []
        return lists


def record_tokens(batch: InputBatch, sampled: Int32[np.ndarray, "R w"]) -> SampledTokens:
    """``record_sampled`` without the lists: the same arguments, effects and errors."""
    rows, n = batch.by_row, batch.num_reqs
    if sampled.ndim != 2 or len(sampled) != n:
        raise ValueError(f"sampled must be [{n}, w] for the {n} rows of the step, got {list(sampled.shape)}")
    width, indices, known = sampled.shape[1], batch.row_indices, rows.known
    if width == 1 and n and sampled.min() >= 0:
        there = None  # all of them
    else:
        there = np.greater_equal(sampled.T, 0, order="C")  # [w, R]: a pass along the rows is a long one
        if width > 1 and np.count_nonzero(there[1:] > there[:-1]):
            raise ValueError(f"a row of sampled has a token behind a gap: {sampled.tolist()}")
    at = np.add(batch.row_starts, known, out=rows.cells)
    if batch.longest + width > batch.token_row_stride:
        kept = np.ones((width, n), bool) if there is None else there
        _check_room(batch, known, kept)
        for j in range(width):
            batch.flat_token_ids[at[kept[j]] + j] = sampled[kept[j], j]
    elif width == 1:  # here, what is not kept is written too: behind a request's tokens, where nothing counts
        batch.flat_token_ids[at] = sampled.ravel()
    else:
        batch.flat_token_ids[at[:, None] + batch.ascending[:width]] = sampled
    batch.longest += width
    if there is None:
        known += equal(n, width)
        offsets = batch.ascending32[: n + 1]
        tokens = sampled.ravel()
    else:
        offsets = np.zeros(n + 1, np.int32)
        counts = there[0].astype(np.int32) if width == 1 else there.sum(axis=0, dtype=np.int32)
        known += counts
        np.add.accumulate(counts, out=offsets[1:])
        tokens = sampled[there.T]
    batch.num_tokens[indices] = known
    return SampledTokens(tokens, offsets, sampled)


def _check_room(batch: InputBatch, lengths: Int32[np.ndarray, "R"], there: Bool[np.ndarray, "w R"]) -> None:
    """The closer look, when some row may be so long that the widest sample would not fit."""
    after = lengths + there.sum(axis=0)
    if (after > batch.token_row_stride).any():
        row = int(np.flatnonzero(after > batch.token_row_stride)[0])
        raise ValueError(
            f"request {batch.req_ids[row]!r} would have {after[row]} tokens, max_model_len is {batch.max_model_len}:"
            " it should have been finished"
        )
    batch.longest = int(lengths.max())
