"""Ladders beside each other over one trace: what each wastes, costs and needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxrunner.shapes import bounded_waste, powers_of_two
from jaxrunner.shapes.ladders import named
from jaxrunner.sweep.optimal import Cost, StepCounts, optimal_ladders


@dataclass(frozen=True)
class Ladder:
    """One choice of token buckets.

    Attributes:
        kind: "optimal", "powers_of_two", "vllm" or "bounded".
        sizes: the buckets; ``executables`` is their number.
        padding_waste: fraction of the padded tokens.
        step_time: mean cost of a step's forward, in the cost's unit.
        compile_s, memory_bytes: of all its executables; None where the cost doesn't know.
    """

    kind: str
    executables: int
    sizes: tuple[int, ...]
    padding_waste: float
    step_time: float
    compile_s: float | None = None
    memory_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"sizes": list(self.sizes)}


Needs = Callable[[Sequence[int]], tuple[float | None, int | None]]
"""Compile seconds and bytes of the executables of a ladder."""


def compare(
    steps: StepCounts,
    cost: Cost,
    num_buckets: Sequence[int],
    max_num_reqs: int,
    needs: Needs = lambda sizes: (None, None),
) -> list[Ladder]:
    """The optimal ladder for each number of buckets, powers of two, vLLM's, and the bounded one that fits the number.

    vLLM's ends at 512 tokens, above which it runs steps unpadded and without a graph; here the budget follows, since
    no step runs without an executable.
    """
    budget = int(steps.sizes[-1])
    found = [("optimal", sizes) for sizes in optimal_ladders(steps, cost, num_buckets).values()]
    found += [("powers_of_two", powers_of_two(budget)), ("vllm", named("vllm", budget, max_num_reqs))]
    found += [("bounded", bounded_of(count, budget)) for count in num_buckets]
    ladders = []
    for kind, sizes in dict.fromkeys(found):
        mean = steps.total(sizes, cost) / int(steps.counts.sum())
        ladders.append(Ladder(kind, len(sizes), sizes, steps.waste(sizes), mean, *needs(sizes)))
    return ladders


def bounded_of(count: int, budget: int) -> tuple[int, ...]:
    """The bounded-waste ladder of at most ``count`` sizes with the least bound, to a hundredth of a percent."""
    low, high = 0, 9999  # hundredths of a percent: high always fits, with one or two sizes
    while low < high:
        middle = (low + high) // 2
        if len(bounded_waste(budget, middle / 100)) <= count:
            high = middle
        else:
            low = middle + 1
    return bounded_waste(budget, low / 100)
