"""What a step has by row, cut to the rows in use."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, Int64

from jaxrunner.batch.buffers import LIVE_FIELDS, ROW_FIELDS


class RowArrays:
    """Arrays of one entry a row; written by ``update_states``, read by ``prepare_inputs``.

    Attributes:
        fields: int32 [len(ROW_FIELDS), R], uploaded as it is.
        num_scheduled: int32 [R].
    """

    def __init__(self, max_num_reqs: int) -> None:
        self.fields: Int32[np.ndarray, "fields R"] = np.zeros((len(ROW_FIELDS), max_num_reqs), np.int32)
        self.num_scheduled: Int32[np.ndarray, "R"] = np.zeros(max_num_reqs, np.int32)
        self.cells: Int64[np.ndarray, "R"] = np.empty(max_num_reqs, np.intp)  # room for places in the token table
        self.ones: Int32[np.ndarray, "R"] = np.ones(max_num_reqs, np.int32)
        self._cuts: dict[int, RowViews] = {}

    def cut(self, num_rows: int) -> RowViews:
        """Views of the first ``num_rows`` rows. Cutting one takes as long as working on a few rows does, so each is
        cut once."""
        found = self._cuts.get(num_rows)
        if found is None:
            found = self._cuts[num_rows] = RowViews(self, num_rows)
        return found


class RowViews:
    """The first n rows of ``RowArrays``; ``live`` are the fields that change with every step."""

    __slots__ = (
        "cells", "computed", "draft", "fields", "known", "live", "num_rows", "ones", "prompt", "scheduled",
    )  # fmt: skip

    def __init__(self, arrays: RowArrays, n: int) -> None:
        self.num_rows = n
        self.fields: Int32[np.ndarray, "fields n"] = arrays.fields[:, :n]
        self.live: Int32[np.ndarray, "live n"] = self.fields[LIVE_FIELDS]
        _, self.computed, self.known, self.prompt, self.draft, _ = self.fields
        self.scheduled: Int32[np.ndarray, "n"] = arrays.num_scheduled[:n]
        self.cells: Int64[np.ndarray, "n"] = arrays.cells[:n]
        self.ones: Int32[np.ndarray, "n"] = arrays.ones[:n]
