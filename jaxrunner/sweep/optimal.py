"""The best k token buckets for a trace, by dynamic programming: exact, not a search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from jaxrunner.shapes import padding_table

Cost = Callable[[Int64[np.ndarray, "M"]], Float64[np.ndarray, "M"]]
"""What one step padded to each of these sizes costs, in any unit; never falls as the size grows."""


@dataclass(frozen=True)
class StepCounts:
    """How often a trace has steps of each number of tokens.

    Attributes:
        sizes: distinct numbers of tokens, ascending; the last is the token budget, also if no step reaches it.
        counts: steps of each.
    """

    sizes: Int64[np.ndarray, "M"]
    counts: Int64[np.ndarray, "M"]

    @staticmethod
    def of(tokens: Iterable[int], budget: int) -> StepCounts:
        """Counts the steps.

        Raises:
            ValueError: no steps, or one above the budget.
        """
        values = np.fromiter(tokens, np.int64)
        if not values.size:
            raise ValueError("there are no steps to choose buckets for")
        if values.min() < 1 or values.max() > budget:
            raise ValueError(f"steps have {values.min()} to {values.max()} tokens; the token budget is {budget}")
        sizes, counts = np.unique(values, return_counts=True)
        if sizes[-1] != budget:
            sizes, counts = np.append(sizes, budget), np.append(counts, 0)
        return StepCounts(sizes, counts.astype(np.int64))

    def padded(self, ladder: Sequence[int]) -> Int64[np.ndarray, "M"]:
        """The bucket that each of ``sizes`` runs at."""
        return np.asarray(padding_table(ladder), np.int64)[self.sizes]

    def waste(self, ladder: Sequence[int]) -> float:
        """Padding as a fraction of the padded tokens of all steps."""
        padded = int((self.padded(ladder) * self.counts).sum())
        return 1 - int((self.sizes * self.counts).sum()) / padded

    def total(self, ladder: Sequence[int], cost: Cost) -> float:
        """What all steps cost together."""
        return float(cost(self.padded(ladder)) @ self.counts)


def optimal_ladders(steps: StepCounts, cost: Cost, num_buckets: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """For each number of buckets the ladder of at most so many, the budget among them, at which the trace costs least.

    A bucket that no step fills could be lowered to the next size that one does at no more cost, so the sizes that
    occur are all the candidates. With f_k(j) the least cost of all steps up to size d_j in k buckets, the last d_j:

        f_k(j) = min over i < j of f_{k-1}(i) + (n_{i+1} + ... + n_j) * cost(d_j)

    The weight (n_{i+1} + ... + n_j) * cost(d_j) satisfies the quadrangle inequality because cost never falls, so the
    best i never falls as j grows (Yao 1980), and halving finds all of a row: O(M log M) for each k.

    Raises:
        ValueError: a cost that falls as sizes grow, or fewer than one bucket.
    """
    wanted = sorted(set(num_buckets))
    if not wanted or wanted[0] < 1:
        raise ValueError(f"a ladder has at least one bucket, got {wanted}")
    prices = np.asarray(cost(steps.sizes), np.float64)
    if (np.diff(prices) < 0).any():
        at = int(np.argmax(np.diff(prices) < 0))
        raise ValueError(
            f"cost falls from {prices[at]} at {steps.sizes[at]} tokens to {prices[at + 1]} at the next size"
        )
    m = len(prices)
    k = min(wanted[-1], m)
    so_far = np.concatenate([[0], np.cumsum(steps.counts)]).astype(np.float64)
    # Column j is the first j sizes; one bucket holds them all, whose last it is.
    best = np.concatenate([[0.0], so_far[1:] * prices])
    choice = np.zeros((k + 1, m + 1), np.int32)
    for row in range(2, k + 1):
        best = _one_more(best, so_far, prices, choice[row])
    return {count: _walk(steps.sizes, choice, min(count, k)) for count in wanted}


def _one_more(
    best: Float64[np.ndarray, "M+1"],
    so_far: Float64[np.ndarray, "M+1"],
    prices: Float64[np.ndarray, "M"],
    choice: np.ndarray,
) -> Float64[np.ndarray, "M+1"]:
    """The least costs with one bucket more, and into ``choice`` the i of each; by halving."""
    better = np.zeros_like(best)
    todo = [(1, len(best) - 1, 0, len(best) - 2)]  # columns first..last, whose i lies in low..high
    while todo:
        first, last, low, high = todo.pop()
        if first > last:
            continue
        j = (first + last) // 2
        end = min(j - 1, high) + 1
        candidates = best[low:end] - so_far[low:end] * prices[j - 1]
        i = low + int(candidates.argmin())
        choice[j] = i
        better[j] = candidates[i - low] + so_far[j] * prices[j - 1]
        todo += [(first, j - 1, low, i), (j + 1, last, i, high)]
    return better


def _walk(sizes: Int64[np.ndarray, "M"], choice: np.ndarray, count: int) -> tuple[int, ...]:
    ladder, j = [], len(sizes)
    while j:
        ladder.append(int(sizes[j - 1]))
        j, count = int(choice[count, j]), count - 1
    return tuple(reversed(ladder))
