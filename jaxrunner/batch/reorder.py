"""Putting decodes before prefills, for attention implementations that want them apart."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from jaxrunner.batch.input_batch import InputBatch


def split_order(
    num_scheduled: Int[np.ndarray, "R"],
    num_computed: Int[np.ndarray, "R"],
    num_prompt: Int[np.ndarray, "R"],
    threshold: int = 1,
) -> list[int]:
    """The order decode, short extend, long extend, prefill, reached with the fewest moves.

    A decode has its prompt computed and at most ``threshold`` tokens scheduled; a short extend has as few and an
    unfinished prompt; a long extend has more and some tokens computed; a prefill has none computed. A row that is in
    its region stays where it is; the others fill the region's places in their order.

    Returns:
        ``order`` for ``InputBatch.reorder``: row i becomes what row ``order[i]`` is.
    """
    scheduled, computed, prompt = (np.asarray(a) for a in (num_scheduled, num_computed, num_prompt))
    few = scheduled <= threshold
    region = np.select(
        [computed == 0, few & (computed >= prompt), few],
        [3, 0, 1],
        default=2,
    )
    wanted = np.sort(region)
    order = np.arange(len(region))
    moved = np.flatnonzero(region != wanted)
    by_region = moved[np.argsort(region[moved], kind="stable")]
    places = moved[np.argsort(wanted[moved], kind="stable")]
    order[places] = by_region
    return order.tolist()


def reorder_decodes_first(batch: InputBatch, threshold: int = 1) -> bool:
    """Reorders the rows of a batch whose states are updated; True if any row moved."""
    n = batch.num_reqs
    order = split_order(batch.num_scheduled[:n], batch.num_computed[:n], batch.num_prompt[:n], threshold)
    if order == list(range(n)):
        return False
    batch.reorder(order)
    return True
