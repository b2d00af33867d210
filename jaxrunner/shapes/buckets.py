"""Which padded shape a step runs at: token buckets for the forward, row buckets for head and sampler.

The forward is compiled per token bucket T, with R = min(T, max_num_reqs) rows, and hands the head a fixed number of
rows; head and sampler are compiled per bucket S of logits rows. So the numbers of executables add; they don't multiply.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from jaxrunner.shapes.dispatch import Dispatcher, uniform_sizes
from jaxrunner.shapes.ladders import cdiv, listed, named, powers_of_two, round_up
from jaxrunner.shapes.layout import StepLayout
from jaxrunner.shapes.modes import ExecutionMode, Policy

Buckets = tuple[int, ...] | str | None  # sizes, a ladder's name, or powers of two


@dataclass(frozen=True, slots=True)
class StepShape:
    """One padded shape: T tokens in R rows for the forward, S logits rows for head and sampler.

    In mode PIECEWISE R is the rows of attention's metadata; the dense pieces know only T.
    """

    num_tokens: int
    num_reqs: int
    num_logits: int
    mode: ExecutionMode = ExecutionMode.FULL
    uniform: bool = False


@dataclass(frozen=True)
class StepShapes:
    """All shapes a runner may execute.

    Attributes:
        max_num_batched_tokens: the token budget: the last token bucket.
        max_num_reqs: rows at most.
        num_speculative_tokens: drafts a request may carry; a row has up to 1 + that many logits rows.
        num_groups, min_block_size: of the KV cache; they bound how many block-table cells a step can fill.
        token_buckets, logits_buckets, request_buckets: explicit sizes, a name (see ``ladders.NAMED``), or None for
            powers of two. The limit itself is always added. Request buckets are attention's own, in mode PIECEWISE.
        policy: which execution mode a step takes.
    """

    max_num_batched_tokens: int
    max_num_reqs: int
    num_speculative_tokens: int = 0
    num_groups: int = 1
    min_block_size: int = 16
    token_buckets: Buckets = None
    logits_buckets: Buckets = None
    request_buckets: Buckets = None
    policy: Policy = Policy.FULL

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Token buckets, ascending."""
        return self._ladder(self.token_buckets, self.max_num_batched_tokens, "token buckets")

    @cached_property
    def max_logits(self) -> int:
        """S_max: the rows that every forward hands to the head."""
        return self.max_num_reqs * self.query_len

    @cached_property
    def logits(self) -> tuple[int, ...]:
        """Buckets of logits rows, ascending."""
        return self._ladder(self.logits_buckets, self.max_logits, "logits buckets")

    @cached_property
    def requests(self) -> tuple[int, ...]:
        """Buckets of rows that attention has in mode PIECEWISE, ascending."""
        return self._ladder(self.request_buckets, self.max_num_reqs, "request buckets")

    @cached_property
    def uniform(self) -> tuple[int, ...]:
        """Token buckets of uniform decodes, ascending; empty where the policy has none."""
        if not self.policy.separates:
            return ()
        full_batch = min(self.max_logits, self.max_num_batched_tokens // self.query_len * self.query_len)
        return tuple(
            size
            for size in uniform_sizes((*self.tokens, full_batch), self.query_len, self.max_num_reqs)
            if size <= self.max_num_batched_tokens
        )

    @property
    def query_len(self) -> int:
        """Tokens of a uniform decode."""
        return 1 + self.num_speculative_tokens

    @cached_property
    def separates(self) -> bool:
        """``Policy.separates``; kept, since every step asks."""
        return self.policy.separates

    @cached_property
    def layouts(self) -> dict[int, StepLayout]:
        """The upload's layout per token bucket."""
        return {t: self._layout(t, self.rows(t)) for t in self.tokens}

    def layout(self, shape: StepShape) -> StepLayout:
        """The upload's layout of a shape that ``dispatch`` gave."""
        if not shape.uniform and (found := self.layouts.get(shape.num_tokens)) is not None:
            if shape.mode is not ExecutionMode.NONE:
                return found
        return self._layout(shape.num_tokens, shape.num_reqs)

    def check(self) -> None:
        """Raises ValueError if explicit sizes are out of range."""
        _ = self.tokens, self.logits, self.requests

    def rows(self, num_tokens: int) -> int:
        """R of a token bucket: a row has at least one token."""
        return min(num_tokens, self.max_num_reqs)

    def full(self, num_tokens: int) -> StepShape:
        """The shape of mode FULL with the largest number of rows, at a token bucket."""
        return StepShape(num_tokens, self.rows(num_tokens), min(num_tokens, self.max_logits))

    def dispatch(
        self, num_tokens: int, num_logits: int, num_reqs: int | None = None, uniform: bool = False
    ) -> StepShape:
        """The shape a step of so many tokens and logits rows runs at: the smallest bucket of each that holds it.

        Args:
            num_reqs: rows of the step; only modes other than FULL ask.
            uniform: ``is_uniform_decode``; only policies that separate ask.
        """
        if self.policy is Policy.FULL:
            t = round_up(num_tokens, self.tokens)
            return StepShape(t, self.rows(t), round_up(max(num_logits, 1), self.logits))
        if num_tokens > self.max_num_batched_tokens:
            raise ValueError(f"{num_tokens} is above the largest bucket {self.max_num_batched_tokens}: raise the limit")
        found = self._dispatcher.dispatch(num_tokens, uniform)
        n = min(num_tokens, self.max_num_reqs) if num_reqs is None else num_reqs
        if found.mode is ExecutionMode.NONE:
            return StepShape(num_tokens, n, max(num_logits, 1), found.mode)
        rows = found.num_reqs if found.num_reqs is not None else min(round_up(n, self.requests), found.num_tokens)
        return StepShape(found.num_tokens, rows, round_up(max(num_logits, 1), self.logits), found.mode, found.uniform)

    def forwards(self, token_buckets: Iterable[int]) -> list[StepShape]:
        """Every shape that the forward can have at these token buckets and at all of uniform decodes, largest first.

        None of mode NONE: those follow the steps.
        """
        budgets = sorted(token_buckets, reverse=True)
        found = []
        if self.policy.mixed is ExecutionMode.FULL:
            found += [self.full(t) for t in budgets]
        elif self.policy.mixed is ExecutionMode.PIECEWISE:
            for t in budgets:
                rows = {min(r, t) for r in self.requests}
                found += [StepShape(t, r, 1, ExecutionMode.PIECEWISE) for r in sorted(rows, reverse=True)]
        largest = max(budgets, default=0)
        found += [StepShape(t, t // self.query_len, t, uniform=True) for t in reversed(self.uniform) if t <= largest]
        return found

    def only(self, tokens: Iterable[int], logits: Iterable[int]) -> StepShapes:
        """The same with fewer buckets, the limits among them: what is ready while the rest is being compiled."""
        return replace(self, token_buckets=tuple(tokens), logits_buckets=tuple(logits))

    @cached_property
    def _dispatcher(self) -> Dispatcher:
        return Dispatcher(self.policy, self.tokens, self.uniform, self.max_num_reqs, self.query_len)

    def _ladder(self, buckets: Buckets, limit: int, what: str) -> tuple[int, ...]:
        if buckets is None:
            return powers_of_two(limit)
        if isinstance(buckets, str):
            return named(buckets, limit, self.max_num_reqs, self.num_speculative_tokens)
        return listed(buckets, limit, what)

    def _layout(self, t: int, rows: int) -> StepLayout:
        # A step fills at most one more block a row than its tokens need; what a prefix hit brings goes ahead.
        updates = self.num_groups * (rows + cdiv(t, self.min_block_size))
        return StepLayout(t, rows, min(t, self.max_logits), updates)
