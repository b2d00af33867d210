"""Padded sizes against brute force: the smallest bucket that holds a step, and nothing above the limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrunner.shapes import StepShapes, powers_of_two, round_up

LADDERS = st.sets(st.integers(1, 300), min_size=1).map(sorted)


@given(LADDERS, st.integers(0, 300))
def test_round_up_is_the_smallest_bucket_that_holds_it(buckets: list[int], n: int) -> None:
    fitting = [b for b in buckets if b >= n]
    if not fitting:
        with pytest.raises(ValueError, match=f"^{n} is above the largest bucket {buckets[-1]}: raise the limit"):
            round_up(n, buckets)
        return
    assert round_up(n, buckets) == min(fitting)
    assert round_up(min(fitting), buckets) == min(fitting)


@given(LADDERS)
def test_round_up_never_falls(buckets: list[int]) -> None:
    rounded = [round_up(n, buckets) for n in range(buckets[-1] + 1)]
    assert rounded == sorted(rounded)


@given(st.integers(1, 5000))
def test_powers_of_two_end_at_the_limit(limit: int) -> None:
    assert list(powers_of_two(limit)) == [2**i for i in range(20) if 2**i < limit] + [limit]


@pytest.mark.parametrize("limit", [0, -1])
def test_no_bucket_below_one(limit: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {limit}"):
        powers_of_two(limit)


@st.composite
def shapes(draw: st.DrawFn) -> StepShapes:
    budget, reqs, drafts = draw(st.integers(1, 200)), draw(st.integers(1, 50)), draw(st.integers(0, 3))
    rows = reqs * (1 + drafts)

    def sizes(limit: int) -> st.SearchStrategy[tuple[int, ...] | None]:
        return st.none() | st.lists(st.integers(1, limit), min_size=1, max_size=6).map(tuple)

    return StepShapes(
        budget, reqs, drafts, draw(st.integers(1, 3)), draw(st.integers(1, 32)), draw(sizes(budget)), draw(sizes(rows))
    )


@given(shapes(), st.data())
def test_dispatch_is_the_smallest_shape_that_holds_the_step(shapes: StepShapes, data: st.DataObject) -> None:
    most = shapes.max_num_reqs * (1 + shapes.num_speculative_tokens)
    tokens, logits = data.draw(st.integers(1, shapes.max_num_batched_tokens)), data.draw(st.integers(0, most))
    got = shapes.dispatch(tokens, logits)
    allowed_tokens = {*(shapes.token_buckets or powers_of_two(shapes.max_num_batched_tokens))}
    allowed_logits = {*(shapes.logits_buckets or powers_of_two(most))}
    assert got.num_tokens == min(b for b in allowed_tokens | {shapes.max_num_batched_tokens} if b >= tokens)
    assert got.num_logits == min(b for b in allowed_logits | {most} if b >= max(logits, 1))
    # A row has at least one token, so these are all the rows there can be.
    assert got.num_reqs == min(got.num_tokens, shapes.max_num_reqs)
    assert shapes.dispatch(got.num_tokens, got.num_logits) == got
    assert list(shapes.layouts) == list(shapes.tokens)


@given(shapes())
def test_the_ladders_hold_the_sizes_asked_for_and_the_limit_once(shapes: StepShapes) -> None:
    limits = (shapes.max_num_batched_tokens, shapes.max_num_reqs * (1 + shapes.num_speculative_tokens))
    explicit = (shapes.token_buckets, shapes.logits_buckets)
    for ladder, asked, limit in zip((shapes.tokens, shapes.logits), explicit, limits, strict=True):
        assert ladder[-1] == limit and list(ladder) == sorted(set(ladder))
        assert set(ladder) == {*(asked or powers_of_two(limit)), limit}


@pytest.mark.parametrize(("tokens", "logits"), [(101, 1), (1, 9)])
def test_a_step_above_the_limits_fits_no_shape(tokens: int, logits: int) -> None:
    with pytest.raises(ValueError, match=f"^{max(tokens, logits)} is above the largest bucket"):
        StepShapes(100, 8).dispatch(tokens, logits)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"token_buckets": (8, 101)}, r"^token buckets must be from 1 to 100, got \[8, 101\]"),
        ({"token_buckets": (0, 8)}, r"^token buckets must be from 1 to 100, got \[0, 8\]"),
        ({"token_buckets": ()}, r"^token buckets must be from 1 to 100, got \[\]"),
        ({"logits_buckets": (9,)}, r"^logits buckets must be from 1 to 8, got \[9\]"),
    ],
)
def test_sizes_out_of_range_are_refused(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepShapes(100, 8, **sizes).check()


@given(shapes())
def test_a_layout_has_room_for_the_blocks_that_its_tokens_can_need(shapes: StepShapes) -> None:
    """Whatever a row's computed tokens are: one that ends a block and goes on begins at most one block too many."""
    for tokens, layout in shapes.layouts.items():
        rows = min(tokens, shapes.max_num_reqs)
        assert layout.num_tokens == tokens and layout.num_reqs == rows
        assert layout.num_logits == min(tokens, shapes.max_num_reqs * (1 + shapes.num_speculative_tokens))
        size = shapes.min_block_size
        # The most that rows can need: each one token in a block of its own, and the rest in one row, all in new blocks.
        needed = (rows - 1) + -(-(tokens - (rows - 1)) // size)
        assert layout.num_updates >= shapes.num_groups * needed
