"""The columns of the persistent batch, declared once, and the table that holds them.

Every column is keyed by *request index*, which a request keeps from the step it enters to the step it leaves. Rows
(the order of a step) move all the time, but a row holds nothing except a request index, so condense, swap and reorder
have one array to move and can't forget another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from jaxrunner.sampling_columns import RECORD_WORDS


@dataclass(frozen=True, slots=True)
class Column:
    """One value or one row of values a request.

    Attributes:
        shape: trailing shape; () is one value a request, (n,) a row of n.
        fill: what an index that nobody holds contains, and what a request starts with.
        valid: for a wide column, the name of the column that counts its valid entries; entries behind are garbage.
            None: the whole row is always valid and goes back to ``fill`` when the index is freed.
    """

    name: str
    dtype: type
    fill: float = 0
    shape: tuple[int, ...] = ()
    valid: str | None = None


FIRST_COLUMNS = ("num_tokens", "num_prompt_tokens", "num_computed_tokens", "num_draft_tokens", "sampling_flags")
"""The columns that are declared first, of one int32 each; the sampling record follows them."""


def declared_columns(max_model_len: int, num_speculative_tokens: int) -> tuple[Column, ...]:
    """All columns but the block tables (which have operations of their own, ``batch.block_table``)."""
    return (
        Column("num_tokens", np.int32),  # prompt and outputs; drafts not counted
        Column("num_prompt_tokens", np.int32),  # what the user sent; outputs of a restart not counted
        Column("num_computed_tokens", np.int32),
        Column("num_draft_tokens", np.int32),  # lie in token_ids behind num_tokens
        Column("sampling_flags", np.int32),
        Column("sampling_record", np.int32, 0, (RECORD_WORDS,)),
        # One more than a request may have: the last sample of a full request has a place, and its row ends there.
        Column("token_ids", np.int32, 0, (max_model_len + num_speculative_tokens + 1,), valid="num_tokens"),
    )


class ColumnTable:
    """Arrays [I, *shape] of the declared columns, for I request indices; ``table["num_tokens"]`` is one.

    The int32 columns that are always valid lie in two matrices with a row for each request: those of one number a
    request close together, since a step reads one column of many requests, and the wide ones. Who enters or leaves is
    written there in one go.

    Attributes:
        words: int32 words of a request in those matrices.
        fill: what they are for an index that nobody holds.
    """

    def __init__(self, columns: Sequence[Column], capacity: int) -> None:
        names = [c.name for c in columns]
        if len(set(names)) != len(names):
            raise ValueError(f"a column is declared twice: {names}")
        self.columns = tuple(columns)
        together = [c for c in columns if c.dtype is np.int32 and c.valid is None]
        single = [c for c in together if c.shape == ()]
        wide = [c for c in together if c.shape != ()]
        self._apart = [c for c in columns if c not in together]
        self._cleared_apart = [c for c in self._apart if c.valid is None]
        self.fill: Int32[np.ndarray, "words"] = np.concatenate(
            [np.full(math.prod(c.shape), c.fill, np.int32) for c in (*single, *wide)] or [np.zeros(0, np.int32)]
        )
        self.words, self._fill_bytes = len(self.fill), self.fill.tobytes()
        self._num_single_bytes, self._num_wide_bytes = 4 * len(single), 4 * (self.words - len(single))
        self._single: Int32[np.ndarray, "I single"] = np.repeat(self.fill[None, : len(single)], capacity, axis=0)
        self._wide: Int32[np.ndarray, "I wide"] = np.repeat(self.fill[None, len(single) :], capacity, axis=0)
        # The same memory, a request's bytes one after the other: NumPy takes longer to find a row than to write it.
        self._single_bytes, self._wide_bytes = (memoryview(m.reshape(-1)).cast("B") for m in (self._single, self._wide))
        self._arrays: dict[str, np.ndarray] = {c.name: self._single[:, i] for i, c in enumerate(single)}
        self.offsets: dict[str, int] = {c.name: i for i, c in enumerate(single)}
        at = 0
        for c in wide:
            size = math.prod(c.shape)
            self._arrays[c.name] = self._wide[:, at : at + size].reshape(capacity, *c.shape)
            self.offsets[c.name] = len(single) + at
            at += size
        for c in self._apart:
            # np.zeros of a large table is memory the system hands out on first touch; np.full would touch it all.
            zeros: np.ndarray = np.zeros((capacity, *c.shape), c.dtype)
            self._arrays[c.name] = zeros if c.fill == 0 else np.full_like(zeros, c.fill)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def put(self, indices: Sequence[int], words: Sequence[bytes]) -> None:
        """All int32 words of these indices, each in the order of ``fill``. Other columns are left alone."""
        single, wide, n, m = self._single_bytes, self._wide_bytes, self._num_single_bytes, self._num_wide_bytes
        for index, row in zip(indices, words, strict=True):
            single[index * n : (index + 1) * n] = row[:n]
            wide[index * m : (index + 1) * m] = row[n:]

    def clear(self, indices: Sequence[int]) -> None:
        """These indices are free again: every always-valid column back to its fill value."""
        self.put(indices, [self._fill_bytes] * len(indices))
        for c in self._cleared_apart:
            self._arrays[c.name][indices] = c.fill

    def snapshot(self, index: int) -> dict[str, np.ndarray]:
        """A copy of everything valid at ``index``, for tests, traces and messages."""
        out = {}
        for c in self.columns:
            row = self._arrays[c.name][index]
            out[c.name] = (row[: self._arrays[c.valid][index]] if c.valid else row).copy()
        return out
