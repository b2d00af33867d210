"""Dispatch against vLLM's cases and a brute-force oracle: per mode the smallest bucket that fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrunner.shapes import (
    BatchDescriptor,
    Dispatcher,
    ExecutionMode,
    Policy,
    StepShapes,
    Support,
    dummy_batch,
    is_uniform_decode,
    supported_policy,
    uniform_sizes,
)
from pallas_kernels import AttentionSupport
from tests.cases_by_id import case

FULL, PIECEWISE, NONE = ExecutionMode.FULL, ExecutionMode.PIECEWISE, ExecutionMode.NONE


@pytest.mark.parametrize("policy", ["FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE"])
def test_dispatch_case(policy: str) -> None:
    given_, expected = case("runner_cases", "dispatch")
    sizes, seqs, q = tuple(given_["sizes"]), given_["max_num_seqs"], given_["qlen"]
    dispatcher = Dispatcher(Policy[policy], sizes, uniform_sizes(sizes, q, seqs), seqs, q)
    for (tokens, uniform), want in zip(given_["queries"], expected[policy], strict=True):
        got = dispatcher.dispatch(tokens, uniform)
        if want[0] == "NONE":
            assert got == BatchDescriptor(NONE, want[1])
        else:
            assert [got.mode.name, got.num_tokens, got.num_reqs, got.uniform] == want


def test_dummy_batch_case() -> None:
    given_, expected = case("runner_cases", "dummy_batch")
    assert dummy_batch(given_["num_tokens"], given_["num_reqs"]) == expected["tokens"]


@given(st.integers(1, 50), st.integers(1, 500))
def test_a_dummy_batch_is_even(reqs: int, tokens: int) -> None:
    if reqs > tokens:
        with pytest.raises(ValueError, match="each at least one"):
            dummy_batch(tokens, reqs)
        return
    counts = dummy_batch(tokens, reqs)
    assert sum(counts) == tokens and len(counts) == reqs and counts == sorted(counts)
    assert counts[-1] - counts[0] <= 1


SIZES = st.sets(st.integers(1, 120), min_size=1, max_size=8).map(lambda sizes: tuple(sorted(sizes)))


@given(st.sampled_from(Policy), SIZES, st.integers(1, 40), st.integers(1, 4), st.integers(1, 150), st.booleans())
def test_dispatch_is_the_smallest_bucket_that_fits(
    policy: Policy, sizes: tuple[int, ...], seqs: int, q: int, tokens: int, uniform: bool
) -> None:
    dispatcher = Dispatcher(policy, sizes, uniform_sizes(sizes, q, seqs), seqs, q)
    got = dispatcher.dispatch(tokens, uniform)
    mixed, decode = policy.value
    candidates = []
    if uniform and decode is FULL and mixed is not FULL:
        multiples = [n * q for n in range(1, seqs + 1)]
        # A multiple of q is a bucket if it is what some size rounds up to.
        candidates = [m for m in multiples if m >= tokens and any(m - q < size <= m for size in sizes)]
    if candidates:
        assert got == BatchDescriptor(FULL, min(candidates), min(candidates) // q, True)
        again = dispatcher.dispatch(got.num_tokens, True)
    else:
        fitting = [size for size in sizes if size >= tokens]
        if mixed is NONE or not fitting:
            assert got == BatchDescriptor(NONE, tokens)
        else:
            rows = min(min(fitting), seqs) if mixed is FULL else None
            assert got == BatchDescriptor(mixed, min(fitting), rows, False)
        again = dispatcher.dispatch(got.num_tokens, False)
    assert again == got  # a bucket is its own
    larger = dispatcher.dispatch(tokens + 1, uniform)
    if larger.uniform == got.uniform:
        assert larger.num_tokens >= got.num_tokens


@st.composite
def policies_shapes(draw: st.DrawFn) -> StepShapes:
    budget, reqs, drafts = draw(st.integers(1, 120)), draw(st.integers(1, 30)), draw(st.integers(0, 3))
    tokens = draw(st.none() | st.lists(st.integers(1, budget), min_size=1, max_size=5).map(tuple))
    return StepShapes(budget, reqs, drafts, token_buckets=tokens, policy=draw(st.sampled_from(Policy)))


@given(policies_shapes(), st.data())
def test_a_steps_shape_holds_the_step_in_every_mode(shapes: StepShapes, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, min(shapes.max_num_reqs, shapes.max_num_batched_tokens)))
    q = shapes.query_len
    uniform = data.draw(st.booleans()) and n * q <= shapes.max_num_batched_tokens
    tokens = n * q if uniform else data.draw(st.integers(n, shapes.max_num_batched_tokens))
    logits = data.draw(st.integers(0, min(tokens, shapes.max_logits)))
    shape = shapes.dispatch(tokens, logits, n, uniform)
    assert shape.mode in shapes.policy.value
    if shape.mode is NONE:
        assert (shape.num_tokens, shape.num_reqs, shape.num_logits) == (tokens, n, max(logits, 1))
    elif shape.uniform:
        assert uniform and shape.num_tokens == min(u for u in shapes.uniform if u >= tokens)
        assert shape.num_reqs == shape.num_tokens // q
    else:
        assert shape.num_tokens == min(t for t in shapes.tokens if t >= tokens)
        rows = {FULL: min(shape.num_tokens, shapes.max_num_reqs)}
        rows[PIECEWISE] = min(shape.num_tokens, min(r for r in shapes.requests if r >= n))
        assert shape.num_reqs == rows[shape.mode]
    layout = shapes.layout(shape)
    assert layout.num_tokens == shape.num_tokens and layout.num_reqs >= shape.num_reqs >= n
    assert layout.num_logits >= min(logits, layout.num_tokens)
    # Every uniform decode has an executable: no batch of them is left to the mixed mode.
    if uniform and shapes.policy.separates:
        assert shape.uniform


def test_a_step_above_the_budget_fits_no_shape_in_any_mode() -> None:
    for policy in Policy:
        with pytest.raises(ValueError, match="^101 is above the largest bucket 100"):
            StepShapes(100, 8, policy=policy).dispatch(101, 1, 1)


def test_a_chunk_of_a_prompt_is_no_decode_however_long() -> None:
    assert is_uniform_decode([3, 3], [False, False], 3)
    assert not is_uniform_decode([3, 3], [False, True], 3)
    assert not is_uniform_decode([3, 2], [False, False], 3)
    assert not is_uniform_decode([1], [True], 1)


# What each policy becomes by support, from ALWAYS down to NEVER: vLLM's fallbacks, attention being split off.
FALLBACKS = [
    (Policy.NONE, 1, ["NONE"] * 4),
    (Policy.PIECEWISE, 1, ["PIECEWISE"] * 4),
    (Policy.FULL, 1, ["FULL", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE", None]),
    (Policy.FULL, 2, ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE", None]),
    (Policy.FULL_AND_PIECEWISE, 1, ["FULL_AND_PIECEWISE"] * 3 + ["PIECEWISE"]),
    (Policy.FULL_AND_PIECEWISE, 2, ["FULL_AND_PIECEWISE"] * 2 + ["PIECEWISE"] * 2),
    (Policy.FULL_DECODE_ONLY, 1, ["FULL_DECODE_ONLY"] * 3 + ["PIECEWISE"]),
    (Policy.FULL_DECODE_ONLY, 3, ["FULL_DECODE_ONLY"] * 2 + ["PIECEWISE"] * 2),
]


@pytest.mark.parametrize(("policy", "query_len", "expected"), FALLBACKS)
def test_fallbacks_by_support(policy: Policy, query_len: int, expected: list[str | None]) -> None:
    for support, want in zip(sorted(Support, reverse=True), expected, strict=True):
        if want is None:
            with pytest.raises(ValueError, match="execution_mode FULL .* supports NEVER: choose PIECEWISE or NONE"):
                supported_policy(policy, support, query_len)
        else:
            assert supported_policy(policy, support, query_len).name == want


def test_support_has_the_kernels_names() -> None:
    assert set(Support.__members__) == set(AttentionSupport.__members__)


def test_policies_by_name() -> None:
    assert Policy.of("FULL_DECODE_ONLY") is Policy.FULL_DECODE_ONLY
    with pytest.raises(ValueError, match="execution_mode must be one of NONE, PIECEWISE, FULL, .*got 'full'"):
        Policy.of("full")
