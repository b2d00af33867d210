"""The optimal ladder against every ladder there is, on small traces; and what it must never do."""

import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrunner.shapes import bounded_waste, powers_of_two, vllm_sizes
from jaxrunner.sweep import StepCounts, compare, optimal_ladders
from jaxrunner.sweep.ladders import bounded_of

TRACES = st.lists(st.integers(1, 14), min_size=1, max_size=30)
# Never falling: what each size from 0 to 14 costs.
COSTS = st.lists(st.integers(0, 9), min_size=15, max_size=15).map(lambda steps: np.cumsum(steps).astype(float))


@given(TRACES, COSTS, st.integers(1, 5))
def test_no_ladder_at_all_costs_less(trace: list[int], table: np.ndarray, count: int) -> None:
    budget = 14
    steps = StepCounts.of(trace, budget)
    ladder = optimal_ladders(steps, lambda sizes: table[sizes], [count])[count]
    assert ladder[-1] == budget and len(ladder) <= count and list(ladder) == sorted(set(ladder))
    best = min(
        sum(table[min(b for b in (*sizes, budget) if b >= n)] for n in trace)
        for k in range(min(count, budget))
        for sizes in combinations(range(1, budget), k)
    )
    assert steps.total(ladder, lambda sizes: table[sizes]) == pytest.approx(best)


@given(TRACES)
def test_waste_is_padding_by_padded_tokens_and_falls_with_more_buckets(trace: list[int]) -> None:
    steps = StepCounts.of(trace, 14)
    ladders = optimal_ladders(steps, lambda sizes: sizes.astype(float), range(1, 16))
    wastes = [steps.waste(ladders[count]) for count in range(1, 16)]
    assert wastes == sorted(wastes, reverse=True) and wastes[-1] == 0
    padded = [min(b for b in ladders[2] if b >= n) for n in trace]
    assert wastes[1] == pytest.approx((sum(padded) - sum(trace)) / sum(padded))


def test_a_hundred_thousand_steps_take_seconds() -> None:
    rng = np.random.default_rng(0)
    decodes, prompts = rng.integers(1, 257, 60_000), rng.integers(1, 8193, 40_000)
    steps = StepCounts.of(np.concatenate([decodes, prompts]).tolist(), 8192)
    assert len(steps.sizes) > 8000  # as many sizes as there can be: the slowest case
    start = time.process_time()
    ladders = optimal_ladders(steps, lambda sizes: sizes.astype(float), [4, 8, 16, 32])
    assert time.process_time() - start < 10
    assert [len(ladders[k]) for k in (4, 8, 16, 32)] == [4, 8, 16, 32]


@pytest.mark.parametrize(
    ("trace", "message"),
    [([], "no steps to choose"), ([3, 20], "3 to 20 tokens; the token budget is 14"), ([0], "0 to 0 tokens")],
)
def test_impossible_traces_are_refused(trace: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepCounts.of(trace, 14)


def test_a_cost_that_falls_is_refused() -> None:
    steps = StepCounts.of([1, 2, 3], 4)
    with pytest.raises(ValueError, match="cost falls from 3.0 at 1 tokens to 2.0"):
        optimal_ladders(steps, lambda sizes: 4.0 - sizes, [2])
    with pytest.raises(ValueError, match=r"at least one bucket, got \[0\]"):
        optimal_ladders(steps, lambda sizes: 1.0 * sizes, [0])


def test_the_usual_ladders_stand_beside_it() -> None:
    steps = StepCounts.of([1, 5, 5, 40, 100], 128)
    found = compare(steps, lambda sizes: 2.0 * sizes, (2, 6), 16, lambda sizes: (float(len(sizes)), 7))
    kinds = [(each.kind, each.executables) for each in found]
    assert kinds[:2] == [("optimal", 2), ("optimal", 4 + 1)]  # there are no more sizes than five
    by_kind = {each.kind: each for each in found}
    assert by_kind["powers_of_two"].sizes == powers_of_two(128)
    assert by_kind["vllm"].sizes == (*vllm_sizes(16, 128), 128)
    for each in found:
        padded = [min(b for b in each.sizes if b >= n) for n in (1, 5, 5, 40, 100)]
        assert each.padding_waste == pytest.approx(1 - 151 / sum(padded))
        assert each.step_time == pytest.approx(2 * sum(padded) / 5)
        assert (each.compile_s, each.memory_bytes) == (len(each.sizes), 7)


@given(st.integers(2, 40), st.integers(1, 3000))
def test_the_bounded_ladder_has_the_least_bound_of_its_size(count: int, budget: int) -> None:
    ladder = bounded_of(count, budget)
    assert len(ladder) <= count and ladder[-1] == budget
    waste = max(1 - (below + 1) / size for below, size in zip((0, *ladder), ladder, strict=False))
    tighter = 100 * waste - 0.02
    assert tighter < 0 or len(bounded_waste(budget, tighter)) > count
