"""Ladders against brute force and vLLM's own sizes: each holds every step, and no rule cuts one short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrunner.shapes import (
    StepShapes,
    bounded_waste,
    padding_table,
    round_up,
    round_up_to_multiple,
    spread,
    vllm_sizes,
)
from jaxrunner.shapes.ladders import named
from tests.cases_by_id import case


def test_padding_table_case() -> None:
    given_, expected = case("runner_cases", "pad_table")
    assert padding_table(given_["sizes"]) == expected["bs_to_padded"]


def test_capture_sizes_case() -> None:
    given_, expected = case("runner_cases", "capture_sizes")
    got = [
        vllm_sizes(c["max_num_seqs"], given_["max_num_batched_tokens"], c.get("k", 0), given_["ceiling"])
        for c in given_["cfg"]
    ]
    assert [list(sizes) for sizes in got[:-1]] == expected["sizes"][:-1]
    assert expected["sizes"][-1] == "51 sizes, last 464,480,496,512"
    assert len(got[-1]) == 51 and got[-1][-4:] == (464, 480, 496, 512)
    assert got[-1] == (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


@given(st.integers(1, 600), st.integers(1, 9000), st.integers(0, 4))
def test_vllm_sizes_stay_within_the_limits(seqs: int, budget: int, drafts: int) -> None:
    sizes = vllm_sizes(seqs, budget, drafts)
    assert list(sizes) == sorted(set(sizes))
    largest = min(2 * seqs * (1 + drafts), 512, budget)
    assert 1 <= sizes[0] and sizes[-1] <= largest
    assert (budget in sizes) == (budget <= largest)
    assert (seqs * (1 + drafts) in sizes) or seqs * (1 + drafts) > largest


@given(st.integers(1, 3000), st.floats(0, 95))
def test_bounded_waste_keeps_its_bound_with_the_fewest_sizes(limit: int, percent: float) -> None:
    sizes = bounded_waste(limit, percent)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] >= 1 and sizes[-1] == limit
    for below, size in zip((0, *sizes), sizes, strict=False):
        least = below + 1  # what is padded most
        assert (size - least) * 100 <= percent * size * (1 + 1e-12)
        if below:  # one less below, and the bound would break: no ladder has fewer
            assert (size - below) * 100 > percent * size * (1 - 1e-12)


@pytest.mark.parametrize(("limit", "percent"), [(0, 10), (8, -1), (8, 100)])
def test_impossible_bounds_are_refused(limit: int, percent: float) -> None:
    with pytest.raises(ValueError, match="at least 1, got 0|from 0 to less than 100 %, got"):
        bounded_waste(limit, percent)


def test_names() -> None:
    assert named("powers_of_two", 12, 4) == (1, 2, 4, 8, 12)
    assert named("bounded:50", 12, 4) == bounded_waste(12, 50)
    assert named("vllm", 8192, 256) == (*vllm_sizes(256, 8192), 8192)  # the budget after vLLM's own
    assert StepShapes(8192, 256, token_buckets="vllm").tokens[-2:] == (512, 8192)
    assert StepShapes(64, 8, 1, logits_buckets="bounded:25").logits == bounded_waste(16, 25)


@pytest.mark.parametrize("limit", [1, 5, 8, 9, 512, 8192])
def test_spread_sizes_are_few_and_end_at_the_limit(limit: int) -> None:
    sizes = named("spread", limit, 4)
    assert sizes == spread(limit) and sizes[-1] == limit and len(sizes) <= 6
    assert list(sizes) == sorted(set(sizes))


@given(st.integers(0, 10**6), st.integers(1, 5000))
def test_the_next_multiple(n: int, of: int) -> None:
    found = round_up_to_multiple(n, of)
    assert found % of == 0 and found - of < n <= found


@pytest.mark.parametrize("name", ["bounded", "bounded:x", "bounded:100", "pow2", ""])
def test_an_unknown_name_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match=f"buckets (are .*'powers_of_two'.*; got )?{name!r}"):
        named(name, 8, 8)


@given(st.sets(st.integers(1, 200), min_size=1).map(sorted))
def test_the_padding_table_is_round_up(sizes: list[int]) -> None:
    table = padding_table(sizes)
    assert table == [0] + [min(s for s in sizes if s >= n) for n in range(1, sizes[-1] + 1)]
    assert all(table[size] == size == round_up(size, sizes) for size in sizes)  # a size is its own bucket
