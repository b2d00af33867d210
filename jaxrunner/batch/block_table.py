"""Page tables: which physical block holds which logical block of a request. One table per cache group.

Rows of a table are request indices in the persistent batch. Entries behind a row's count are 0, the null block: rows
are cleared when they are given up, not when they are reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from jaxtyping import Int32, Int64

from jaxrunner.batch.packing import equal, pack, runs

NULL_BLOCK_ID = 0
_FEW = 4  # rows up to which one after the other is faster than all at once


def map_to_kernel_blocks(block_ids: Int32[np.ndarray, "n"], ratio: int) -> Int32[np.ndarray, "n*ratio"]:
    """Manager blocks to the smaller blocks a kernel addresses: id becomes id*ratio .. id*ratio + ratio - 1."""
    if ratio == 1:
        return block_ids
    return (block_ids[:, None] * ratio + np.arange(ratio, dtype=np.int32)).reshape(-1)


def select_common_block_size(manager_block_size: int, supported: Sequence[Sequence[int | str]]) -> int:
    """The block size kernels use on blocks of ``manager_block_size`` tokens.

    Args:
        supported: per implementation the sizes it takes: integers, or "mult16" for any multiple of 16.

    Returns:
        The manager's own size if everyone takes it, else the largest listed size that divides it and everyone takes.

    Raises:
        ValueError: there is none.
    """

    def takes(size: int, listed: Sequence[int | str]) -> bool:
        return any(size % int(s.removeprefix("mult")) == 0 if isinstance(s, str) else size == s for s in listed)

    listed_sizes = {s for listed in supported for s in listed if isinstance(s, int)}
    for size in (manager_block_size, *sorted(listed_sizes, reverse=True)):
        if manager_block_size % size == 0 and all(takes(size, listed) for listed in supported):
            return size
    raise ValueError(
        f"no kernel block size divides the manager's block size {manager_block_size} and is taken by every"
        f" implementation: they take {[list(s) for s in supported]}"
    )


class BlockTable:
    """One group's table [rows, W] of kernel block ids, W = ceil(max_model_len / kernel block size).

    Changes are noted cell by cell until ``take_updates``: that is what has to be uploaded.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, kernel_block_size: int | None = None
    ) -> None:
        kernel_block_size = kernel_block_size or block_size
        if block_size % kernel_block_size:
            raise ValueError(f"kernel block size {kernel_block_size} does not divide block size {block_size}")
        self.block_size = kernel_block_size
        self.ratio = block_size // kernel_block_size
        # A whole number of manager blocks: the last one may reach past max_model_len.
        self.width = -(-max_model_len // block_size) * self.ratio
        self.table: Int32[np.ndarray, "I W"] = np.zeros((num_rows, self.width), np.int32)
        self._flat = self.table.reshape(-1)
        self._row_cells = np.arange(num_rows) * self.width
        self._fullest = 0  # no row holds more blocks; a closer look is taken when that could be too many
        self.num_blocks: Int32[np.ndarray, "I"] = np.zeros(num_rows, np.int32)
        self._cells: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def add_row(self, block_ids: Sequence[int], row: int) -> None:
        """Row ``row`` becomes ``block_ids`` (manager ids)."""
        self.clear_row(row)
        self.append_row(block_ids, row)

    def append_row(self, block_ids: Sequence[int], row: int) -> None:
        """``block_ids`` (manager ids) go behind what row ``row`` has."""
        self.append_rows([block_ids], np.array([row], np.intp))

    def append_rows(self, lists: Sequence[Sequence[int]], rows: Int64[np.ndarray, "n"]) -> None:
        """Each list (manager ids) goes behind its row. A row may stand only once in ``rows``."""
        flat = np.array(list(chain.from_iterable(lists)), np.int32)
        self.append_flat(map_to_kernel_blocks(flat, self.ratio), [len(ids) * self.ratio for ids in lists], rows)

    def append_flat(
        self, block_ids: Int32[np.ndarray, "m"], lengths: Sequence[int] | None, rows: Int64[np.ndarray, "n"]
    ) -> None:
        """Kernel block ids, one row's after the other's, go behind their rows: one scatter for all.

        Args:
            lengths: how many each row gets; None: one each. ``block_ids`` is kept until ``take_updates``.
        """
        if not len(block_ids):
            return
        start, cells = self.num_blocks[rows], self._row_cells[rows]
        cells += start
        if lengths is None:
            end = start + equal(len(rows), 1)
            self._fullest += 1
        else:
            counts = pack(np.empty(len(lengths), np.int32), lengths)
            end = start + counts
            cells = runs(cells, counts)
            self._fullest += max(lengths)
        if self._fullest > self.width:
            self._check_width(rows, end)
        self._flat[cells] = block_ids
        self.num_blocks[rows] = end
        self._cells.append(cells)
        self._values.append(block_ids)

    def _check_width(self, rows: Int64[np.ndarray, "n"], ends: Int32[np.ndarray, "n"]) -> None:
        """These rows are to hold so many blocks: the closer look."""
        at = int(ends.argmax())
        if ends[at] > self.width:
            raise ValueError(
                f"row {rows[at]} would hold {ends[at]} blocks, the table has {self.width} columns: the request is"
                " longer than the table was made for"
            )
        self._fullest = max(int(self.num_blocks.max()), int(ends[at]))

    def clear_row(self, row: int) -> None:
        """Row ``row`` is given up: count 0, every entry the null block."""
        self.table[row, : self.num_blocks[row]] = NULL_BLOCK_ID
        self.num_blocks[row] = 0

    def clear_rows(self, rows: Sequence[int]) -> None:
        """``clear_row`` for several."""
        if len(rows) <= _FEW:
            for row in rows:
                self.clear_row(row)
        else:
            self.table[rows, : int(self.num_blocks[rows].max())] = NULL_BLOCK_ID
            self.num_blocks[rows] = 0

    def move_row(self, source: int, destination: int) -> None:
        """Row ``source`` goes to ``destination``; ``source`` is empty afterwards."""
        ids = self.table[source, : self.num_blocks[source]].copy()
        self.clear_row(source)
        self.clear_row(destination)
        self._set_row(destination, ids)

    def swap_row(self, a: int, b: int) -> None:
        """Rows ``a`` and ``b`` change places."""
        ids_a = self.table[a, : self.num_blocks[a]].copy()
        ids_b = self.table[b, : self.num_blocks[b]].copy()
        self.clear_row(a)
        self.clear_row(b)
        self._set_row(a, ids_b)
        self._set_row(b, ids_a)

    def row(self, row: int) -> Int32[np.ndarray, "n"]:
        """Valid kernel block ids of a row (a view)."""
        return self.table[row, : self.num_blocks[row]]

    @property
    def has_updates(self) -> bool:
        """``take_updates`` has something to give."""
        return bool(self._cells)

    def take_updates(self) -> tuple[Int64[np.ndarray, "U"], Int32[np.ndarray, "U"]]:
        """(cells, values) changed since the last call; a cell is row * W + column and stands at most once.

        Entries that only became null again are not among them: a step reads no column past its own blocks.
        """
        if not self._cells:
            return _NO_CELLS, _NO_VALUES
        if len(self._cells) == 1:
            cells, values = self._cells[0], self._values[0]
        else:
            cells, values = np.concatenate(self._cells), np.concatenate(self._values)
            # A cell may have been filled, given up and filled again since: the last value counts.
            _, last = np.unique(cells[::-1], return_index=True)
            if len(last) != len(cells):
                keep = len(cells) - 1 - last
                cells, values = cells[keep], values[keep]
        self._cells, self._values = [], []
        return cells, values

    def _set_row(self, row: int, ids: Int32[np.ndarray, "n"]) -> None:
        self.table[row, : len(ids)] = ids
        self.num_blocks[row] = len(ids)
        self._cells.append(row * self.width + np.arange(len(ids)))
        self._values.append(ids)


_NO_CELLS = np.zeros(0, np.int64)
_NO_VALUES = np.zeros(0, np.int32)


class MultiGroupBlockTable:
    """One ``BlockTable`` per cache group; every operation goes to all of them."""

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_sizes: Iterable[int],
        kernel_block_sizes: Iterable[int] | None = None,
    ) -> None:
        block_sizes = tuple(block_sizes)
        kernel = tuple(kernel_block_sizes) if kernel_block_sizes is not None else block_sizes
        self.tables = tuple(BlockTable(num_rows, max_model_len, b, k) for b, k in zip(block_sizes, kernel, strict=True))

    @property
    def widths(self) -> tuple[int, ...]:
        """W of each group's table."""
        return tuple(table.width for table in self.tables)

    def __getitem__(self, group: int) -> BlockTable:
        return self.tables[group]

    def __len__(self) -> int:
        return len(self.tables)

    def add_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.add_row(ids, row)

    def append_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.append_row(ids, row)

    def append_rows(self, block_ids: Sequence[Sequence[Sequence[int]]], rows: Int64[np.ndarray, "n"]) -> None:
        """``block_ids`` is per request a tuple over groups."""
        for group, table in enumerate(self.tables):
            table.append_rows([ids[group] for ids in block_ids], rows)

    def clear_row(self, row: int) -> None:
        for table in self.tables:
            table.clear_row(row)

    def clear_rows(self, rows: Sequence[int]) -> None:
        for table in self.tables:
            table.clear_rows(rows)

    def move_row(self, source: int, destination: int) -> None:
        for table in self.tables:
            table.move_row(source, destination)

    def swap_row(self, a: int, b: int) -> None:
        for table in self.tables:
            table.swap_row(a, b)
