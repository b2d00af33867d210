"""Which mode and which padded size a step takes: vLLM's CUDA graph dispatcher, without the graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxrunner.shapes.ladders import round_up_to_multiple
from jaxrunner.shapes.modes import ExecutionMode, Policy


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """What a step runs as: vLLM's key of a graph.

    Attributes:
        num_tokens: T; the true number in mode NONE.
        num_reqs: R; None where the mode doesn't fix it.
        uniform: the executable takes decodes of one length only.
    """

    mode: ExecutionMode
    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False


def uniform_sizes(sizes: Iterable[int], query_len: int, max_num_reqs: int) -> tuple[int, ...]:
    """Buckets of uniform decodes: each size rounded up to a multiple of ``query_len``, up to a full batch of them."""
    rounded = {round_up_to_multiple(size, query_len) for size in sizes}
    return tuple(sorted(size for size in rounded if query_len <= size <= query_len * max_num_reqs))


def is_uniform_decode(scheduled: Sequence[int], prefilling: Sequence[bool], query_len: int) -> bool:
    """Whether every request decodes, and with ``query_len`` tokens.

    By the request's phase, not by length: a chunk of a prompt that happens to have ``query_len`` tokens is none.
    """
    return all(count == query_len for count in scheduled) and not any(prefilling)


@dataclass(frozen=True)
class Dispatcher:
    """vLLM's lookup: FULL, then PIECEWISE, then NONE.

    Attributes:
        sizes: token buckets, ascending. A step above the largest runs unpadded, as NONE.
        uniform: buckets of uniform decodes, ascending; see ``uniform_sizes``.
        query_len: tokens of a uniform decode, 1 + draft tokens.
    """

    policy: Policy
    sizes: tuple[int, ...]
    uniform: tuple[int, ...]
    max_num_reqs: int
    query_len: int = 1

    def dispatch(self, num_tokens: int, uniform: bool) -> BatchDescriptor:
        """The mode and padded size of a step of ``num_tokens``; ``uniform`` as ``is_uniform_decode`` has it."""
        policy = self.policy
        if uniform and policy.separates:
            at = bisect_left(self.uniform, num_tokens)
            if at < len(self.uniform):
                size = self.uniform[at]
                return BatchDescriptor(ExecutionMode.FULL, size, size // self.query_len, True)
        at = bisect_left(self.sizes, num_tokens)
        if policy.mixed is ExecutionMode.NONE or at == len(self.sizes):
            return BatchDescriptor(ExecutionMode.NONE, num_tokens)
        size = self.sizes[at]
        rows = min(size, self.max_num_reqs) if policy.mixed is ExecutionMode.FULL else None
        return BatchDescriptor(policy.mixed, size, rows)


def dummy_batch(num_tokens: int, num_reqs: int) -> list[int]:
    """Tokens of each request of a step that stands in for a real one: as even as can be, the longer ones last."""
    if not 1 <= num_reqs <= num_tokens:
        raise ValueError(f"{num_tokens} tokens can't be shared among {num_reqs} requests, each at least one")
    base, longer = divmod(num_tokens, num_reqs)
    return [base + (row >= num_reqs - longer) for row in range(num_reqs)]
