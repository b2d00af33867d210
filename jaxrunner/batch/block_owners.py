"""Who holds which block: how many table entries name it. The rule that keeps requests out of each other's caches.

Requests may share a block that none of them writes any more: a common prefix lies below the computed tokens of all
its holders. A block that a step writes (one that holds a position from a request's computed tokens on) must be held
by that request alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

from jaxrunner.batch.block_table import NULL_BLOCK_ID, BlockTable
from jaxrunner.batch.packing import runs


class BlockOwners:
    """Entries that name each block, over all rows of one table.

    The count is kept up by whoever checks; after a change that was not checked it is ``stale`` and made anew.

    Attributes:
        holders: [N], how many entries name each block; N grows with the largest id seen.
        any_shared: a block has been held twice; while none ever was, no row has to be looked at.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self.holders: Int32[np.ndarray, "N"] = np.zeros(1024, np.int32)
        self.any_shared = False
        self.stale = False

    def change(self, leaving: Sequence[int], added: Int32[np.ndarray, "m"]) -> None:
        """The rows ``leaving`` give up their blocks, and the blocks ``added`` get a holder more each."""
        if self.stale:
            self._count_anew()
        if len(leaving):
            self._add(self._blocks_of(leaving), -1)
        if len(added):
            top = int(added.max())
            if top >= len(self.holders):
                self.holders = np.concatenate((self.holders, np.zeros(top + 1, np.int32)))
            self._add(added, 1)
            if not self.any_shared:
                self.any_shared = bool((self.holders[added] > 1).any())

    def undo(self, leaving: Sequence[int], added: Int32[np.ndarray, "m"]) -> None:
        """Takes back a ``change``."""
        if len(added):
            self._add(added, -1)
        if len(leaving):
            self._add(self._blocks_of(leaving), 1)

    def held_twice(self, blocks: Int[np.ndarray, "n"]) -> Bool[np.ndarray, "n"]:
        """Which of these have other holders beside the one that asks."""
        return self.holders[blocks] > 1

    def written_and_shared(
        self, rows: Int64[np.ndarray, "n"], first: Int[np.ndarray, "n"], end: Int[np.ndarray, "n"]
    ) -> tuple[int, int] | None:
        """The first (position among ``rows``, column) out of columns first..end-1 of each row whose block has other
        holders too, in the table as it is. A row with end <= first has none.
        """
        counts = np.maximum(end - first, 0)
        position, column = np.repeat(np.arange(len(rows)), counts), runs(first, counts)
        shared = self.held_twice(self._table.table[rows[position], column])
        if not shared.any():
            return None
        at = int(shared.argmax())
        return int(position[at]), int(column[at])

    def _add(self, blocks: Int32[np.ndarray, "n"], change: int) -> None:
        # With indices and a value of the very types it wants, add.at takes a path a hundred times as fast.
        np.add.at(self.holders, blocks.astype(np.intp), np.int32(change))
        self.holders[NULL_BLOCK_ID] = 0  # nobody's

    def _blocks_of(self, rows: Sequence[int] | Int64[np.ndarray, "n"]) -> Int32[np.ndarray, "m"]:
        width = int(self._table.num_blocks[rows].max(initial=0))
        blocks = self._table.table[rows, :width]
        return blocks[blocks != NULL_BLOCK_ID]  # behind a row's count there is nothing else

    def _count_anew(self) -> None:
        blocks = self._blocks_of(np.flatnonzero(self._table.num_blocks))
        self.holders = np.bincount(blocks, minlength=len(self.holders)).astype(np.int32)
        self.any_shared = bool((self.holders > 1).any())
        self.stale = False
