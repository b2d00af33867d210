"""The order of a step: which request index stands in each row. Rows move; what they lead to does not.

A request that leaves its row makes a hole. Who comes next takes the lowest hole, else a row at the end; holes that
are left when all have come are filled from the end, the lowest with the last row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Int32, Int64

from jaxrunner.batch.request_state import NO_INDEX

NO_ROW = -1
_FEW = 4  # indices up to which one after the other is faster than all at once


class RowOrder:
    """Rows of a batch.

    Args:
        idx_mapping: int32 [R], written by this class alone: the request index of each row, NO_INDEX for one that is
            not in use.

    Attributes:
        row_of_index: [I], the inverse: NO_ROW for an index without a row.
        req_ids: request of each row below ``end``; what stands in a hole means nothing.
        holes: rows below ``end`` that are not in use, ascending.
        version: another number whenever a row has changed.
    """

    def __init__(self, idx_mapping: Int32[np.ndarray, "R"]) -> None:
        self.idx_mapping = idx_mapping
        self.idx_mapping[:] = NO_INDEX
        self.row_of_index: Int64[np.ndarray, "I"] = np.full(len(idx_mapping), NO_ROW, np.intp)
        self.end = 0
        self.req_ids: list[str] = []
        self.holes: list[int] = []
        self.version = 0

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return self.end - len(self.holes)

    def leave(self, indices: Sequence[int]) -> None:
        """These indices give up their rows; those that have none are passed over. (For a few of them.)"""
        holes = self.holes
        for index in indices:
            row = self.row_of_index.item(index)
            if row != NO_ROW:
                self.row_of_index[index] = NO_ROW
                self.idx_mapping[row] = NO_INDEX
                holes.append(row)
        holes.sort()
        self.version += 1

    def leave_all_but(self, staying: Int64[np.ndarray, "n"]) -> None:
        """All rows are given up but ``staying``."""
        gone = self.idx_mapping[: self.end] != NO_INDEX
        gone[staying] = False
        rows = gone.nonzero()[0]
        self.row_of_index[self.idx_mapping[rows]] = NO_ROW
        self.idx_mapping[rows] = NO_INDEX
        self.holes += rows.tolist()
        self.holes.sort()
        self.version += 1

    def take(self, indices: Sequence[int], req_ids: Sequence[str]) -> None:
        """Rows for indices that have none, and whose they are."""
        n = len(indices)
        rows, self.holes = self.holes[:n], self.holes[n:]
        more = n - len(rows)
        if more:
            rows += range(self.end, self.end + more)
            self.end += more
            self.req_ids += [""] * more
        self.version += 1
        if n <= _FEW:
            for row, index in zip(rows, indices, strict=True):
                self.idx_mapping[row] = index
                self.row_of_index[index] = row
        else:
            self.idx_mapping[rows] = indices
            self.row_of_index[indices] = rows
        for row, req_id in zip(rows, req_ids, strict=True):
            self.req_ids[row] = req_id

    def condense(self) -> None:
        """The last rows move into the holes, until rows 0..num_rows-1 are all in use."""
        if not self.holes:
            return
        end = self.num_rows
        holes = self.holes[: bisect_left(self.holes, end)]
        if holes:
            sources = (self.idx_mapping[end : self.end] != NO_INDEX).nonzero()[0][::-1] + end
            moved = self.idx_mapping[sources]
            self.idx_mapping[holes] = moved
            self.row_of_index[moved] = holes
            for hole, source in zip(holes, sources.tolist(), strict=True):
                self.req_ids[hole] = self.req_ids[source]
        self.idx_mapping[end : self.end] = NO_INDEX
        del self.req_ids[end:]
        self.end, self.holes = end, []
        self.version += 1

    def reorder(self, order: Int[np.ndarray, "n"] | Sequence[int]) -> None:
        """Row i becomes what row ``order[i]`` was; ``order`` is a permutation of the rows in use, without holes.

        Raises:
            ValueError: it is none.
        """
        n = self.end
        if sorted(order) != list(range(n)):
            raise ValueError(f"order must be a permutation of 0..{n - 1}, got {list(order)}")
        indices = self.idx_mapping[:n][np.asarray(order, np.intp)]
        self.idx_mapping[:n] = indices
        self.row_of_index[indices] = np.arange(n)
        self.req_ids = [self.req_ids[i] for i in order]
        self.version += 1
