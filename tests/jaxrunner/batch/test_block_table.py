"""Page tables against lists of lists; the device's copy, built from the updates alone, has every valid entry."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrunner.batch import BlockTable, MultiGroupBlockTable

ROWS, WIDTH = 4, 6


class Checked:
    """A table of 6 blocks a row, a list for each row, and what the device has been told."""

    def __init__(self, ratio: int = 1) -> None:
        self.ratio = ratio
        self.table = BlockTable(ROWS, WIDTH * 4 * ratio, 4 * ratio, 4)
        self.rows: list[list[int]] = [[] for _ in range(ROWS)]
        self.device = np.full((ROWS, self.table.width), -1, np.int32)
        assert self.table.width == WIDTH * ratio

    def upload(self) -> None:
        cells, values = self.table.take_updates()
        assert len(set(cells.tolist())) == len(cells)
        self.device.reshape(-1)[cells] = values
        assert self.table.take_updates()[0].size == 0

    def check(self) -> None:
        for row, ids in enumerate(self.rows):
            kernel = [i * self.ratio + j for i in ids for j in range(self.ratio)]
            assert self.table.row(row).tolist() == kernel
            assert self.table.num_blocks[row] == len(kernel)
            assert not self.table.table[row, len(kernel) :].any()  # null behind the count, wherever it has been
            assert self.device[row, : len(kernel)].tolist() == kernel


@given(st.sampled_from([1, 2]), st.data())
def test_any_operations(ratio: int, data: st.DataObject) -> None:
    checked, row = Checked(ratio), st.integers(0, ROWS - 1)
    table, rows = checked.table, checked.rows

    def some(most: int) -> list[int]:
        return data.draw(st.lists(st.integers(1, 99), max_size=most))

    for _ in range(data.draw(st.integers(1, 12))):
        a, b = data.draw(row), data.draw(row)
        match data.draw(st.sampled_from(["add", "append", "append to all", "clear", "move", "swap", "upload"])):
            case "add":
                rows[a] = some(WIDTH)
                table.add_row(rows[a], a)
            case "append":
                more = some(WIDTH - len(rows[a]))
                table.append_row(more, a)
                rows[a] = rows[a] + more
            case "append to all":
                order = data.draw(st.permutations(range(ROWS)))
                each = [some(WIDTH - len(rows[i])) for i in order]
                table.append_rows(each, np.array(order, np.intp))
                for i, more in zip(order, each, strict=True):
                    rows[i] = rows[i] + more
            case "clear":
                table.clear_row(a)
                rows[a] = []
            case "move" if a != b:
                table.move_row(a, b)
                rows[a], rows[b] = [], rows[a]
            case "swap":
                table.swap_row(a, b)
                rows[a], rows[b] = rows[b], rows[a]
            case "upload":
                checked.upload()
    checked.upload()
    checked.check()


def test_swap_tells_the_device_of_both_rows() -> None:
    table = BlockTable(2, 16, 4)
    table.add_row([5, 6, 7], 0)
    table.add_row([8], 1)
    table.take_updates()
    table.swap_row(0, 1)
    cells, values = table.take_updates()
    assert dict(zip(cells.tolist(), values.tolist(), strict=True)) == {0: 8, 4: 5, 5: 6, 6: 7}
    assert table.table.tolist() == [[8, 0, 0, 0], [5, 6, 7, 0]]


def test_move_tells_the_device_of_the_destination_alone() -> None:
    table = BlockTable(2, 16, 4)
    table.add_row([5, 6], 0)
    table.add_row([7, 8, 9], 1)
    table.take_updates()
    table.move_row(0, 1)
    cells, values = table.take_updates()
    assert dict(zip(cells.tolist(), values.tolist(), strict=True)) == {4: 5, 5: 6}
    assert table.table.tolist() == [[0, 0, 0, 0], [5, 6, 0, 0]]


def test_the_last_value_of_a_cell_counts() -> None:
    table = BlockTable(1, 16, 4)
    for ids in ([5, 6], [7], [8, 9]):
        table.add_row(ids, 0)
    cells, values = table.take_updates()
    assert dict(zip(cells.tolist(), values.tolist(), strict=True)) == {0: 8, 1: 9}


def test_a_block_size_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="kernel block size 3 does not divide block size 16"):
        BlockTable(1, 16, 16, 3)


def test_every_group_takes_every_operation() -> None:
    """Two groups, of 4 and of 8 tokens a block, do as two tables alone would."""
    both = MultiGroupBlockTable(3, 16, (4, 8))
    alone = [BlockTable(3, 16, 4), BlockTable(3, 16, 8)]

    def each(operation: str, per_group: list[tuple], together: tuple) -> None:
        getattr(both, operation)(*together)
        for table, arguments in zip(alone, per_group, strict=True):
            getattr(table, operation)(*arguments)
        for got, expected in zip(both.tables, alone, strict=True):
            np.testing.assert_array_equal(got.table, expected.table)
            np.testing.assert_array_equal(got.num_blocks, expected.num_blocks)

    each("add_row", [([1, 2], 0), ([3], 0)], (([1, 2], [3]), 0))
    each("append_row", [([4], 0), ([5], 0)], (([4], [5]), 0))
    rows = np.array([1, 2], np.intp)
    each("append_rows", [([[6], [7, 8]], rows), ([[], [9]], rows)], ([([6], []), ([7, 8], [9])], rows))
    each("swap_row", [(0, 2)] * 2, (0, 2))
    each("move_row", [(0, 1)] * 2, (0, 1))
    each("clear_row", [(1,)] * 2, (1,))
    assert len(both) == 2 and both[1].row(2).tolist() == [3, 5]
