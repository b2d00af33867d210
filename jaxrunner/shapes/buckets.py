"""Which padded shape a step runs at: token buckets for the forward, row buckets for head and sampler.

The forward is compiled per token bucket T, with R = min(T, max_num_reqs) rows, and hands the head a fixed number of
rows; head and sampler are compiled per bucket S of logits rows. So the numbers of executables add; they don't multiply.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxrunner.shapes.layout import StepLayout


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... below ``limit``, and ``limit`` itself: the largest bucket is exactly what may be asked for."""
    if limit < 1:
        raise ValueError(f"the largest bucket must be at least 1, got {limit}")
    return tuple(1 << i for i in range((limit - 1).bit_length())) + (limit,)


def round_up(n: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``n``.

    Raises:
        ValueError: ``n`` is above every bucket.
    """
    at = bisect_left(buckets, n)
    if at == len(buckets):
        raise ValueError(f"{n} is above the largest bucket {buckets[-1]}: raise the limit the buckets were made for")
    return buckets[at]


def _ladder(sizes: Iterable[int] | None, limit: int, what: str) -> tuple[int, ...]:
    if sizes is None:
        return powers_of_two(limit)
    ladder = tuple(sorted(set(sizes)))
    if not ladder or ladder[0] < 1 or ladder[-1] > limit:
        raise ValueError(f"{what} must be from 1 to {limit}, got {list(ladder)}")
    return ladder if ladder[-1] == limit else (*ladder, limit)


@dataclass(frozen=True, slots=True)
class StepShape:
    """One padded shape: T tokens in R rows for the forward, S logits rows for head and sampler."""

    num_tokens: int
    num_reqs: int
    num_logits: int


@dataclass(frozen=True)
class StepShapes:
    """All shapes a runner may execute.

    Attributes:
        max_num_batched_tokens: the token budget: the last token bucket.
        max_num_reqs: rows at most.
        num_speculative_tokens: drafts a request may carry; a row has up to 1 + that many logits rows.
        num_groups, min_block_size: of the KV cache; they bound how many block-table cells a step can fill.
        token_buckets, logits_buckets: explicit sizes; None means powers of two. The limit itself is always added.
    """

    max_num_batched_tokens: int
    max_num_reqs: int
    num_speculative_tokens: int = 0
    num_groups: int = 1
    min_block_size: int = 16
    token_buckets: tuple[int, ...] | None = None
    logits_buckets: tuple[int, ...] | None = None

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Token buckets, ascending."""
        return _ladder(self.token_buckets, self.max_num_batched_tokens, "token buckets")

    @cached_property
    def max_logits(self) -> int:
        """S_max: the rows that every forward hands to the head."""
        return self.max_num_reqs * (1 + self.num_speculative_tokens)

    @cached_property
    def logits(self) -> tuple[int, ...]:
        """Buckets of logits rows, ascending."""
        return _ladder(self.logits_buckets, self.max_logits, "logits buckets")

    @cached_property
    def layouts(self) -> dict[int, StepLayout]:
        """The upload's layout per token bucket."""
        return {t: self._layout(t) for t in self.tokens}

    def check(self) -> None:
        """Raises ValueError if explicit sizes are out of range."""
        _ = self.tokens, self.logits

    def rows(self, num_tokens: int) -> int:
        """R of a token bucket: a row has at least one token."""
        return min(num_tokens, self.max_num_reqs)

    def dispatch(self, num_tokens: int, num_logits: int) -> StepShape:
        """The shape a step of so many tokens and logits rows runs at: the smallest bucket of each that holds it."""
        t = round_up(num_tokens, self.tokens)
        return StepShape(t, self.rows(t), round_up(max(num_logits, 1), self.logits))

    def _layout(self, t: int) -> StepLayout:
        rows = self.rows(t)
        # A step fills at most one more block a row than its tokens need; what a prefix hit brings goes ahead.
        updates = self.num_groups * (rows + cdiv(t, self.min_block_size))
        return StepLayout(t, rows, min(t, self.max_logits), updates)
