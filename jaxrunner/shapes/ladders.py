"""Ladders: ascending padded sizes, made by rule or listed, and rounding up to one of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from fractions import Fraction

VLLM_CEILING = 512  # tokens; vLLM's largest default size, but on SM100
NAMED = "'powers_of_two', 'spread', 'vllm', or 'bounded:P' for at most P % padding"


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def round_up(n: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``n``.

    Raises:
        ValueError: ``n`` is above every bucket.
    """
    at = bisect_left(buckets, n)
    if at == len(buckets):
        raise ValueError(f"{n} is above the largest bucket {buckets[-1]}: raise the limit the buckets were made for")
    return buckets[at]


def round_up_to_multiple(n: int, of: int) -> int:
    """The smallest multiple that is at least ``n``."""
    return cdiv(n, of) * of


def padding_table(buckets: Sequence[int]) -> list[int]:
    """Entry n is the bucket that n rounds up to, for n from 0 (which needs none) to the largest."""
    return [0] + [round_up(n, buckets) for n in range(1, buckets[-1] + 1)]


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... below ``limit``, and ``limit`` itself: the largest bucket is exactly what may be asked for."""
    if limit < 1:
        raise ValueError(f"the largest bucket must be at least 1, got {limit}")
    return tuple(1 << i for i in range((limit - 1).bit_length())) + (limit,)


def spread(limit: int) -> tuple[int, ...]:
    """Few sizes, for where compiling is dear and a step cheap: 1, 8, 32, 128, 512 below ``limit``, and ``limit``."""
    if limit < 1:
        raise ValueError(f"the largest bucket must be at least 1, got {limit}")
    return (*(size for size in (1, 8, 32, 128, 512) if size < limit), limit)


def vllm_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, num_speculative_tokens: int = 0, ceiling: int = VLLM_CEILING
) -> tuple[int, ...]:
    """vLLM's default CUDA graph sizes, version 0.33: 51 of them for 256 sequences.

    The largest is 2 * max_num_seqs * (1 + drafts), at most ``ceiling`` and the token budget: 1, 2, 4, then every 8
    below 256 and every 16 from there; the budget if it is no larger; and uniform decodes: max_num_seqs itself, or with
    drafts 1, 2, 4, 8, 16, 24 ... max_num_seqs requests of 1 + drafts tokens.
    """
    if min(max_num_seqs, max_num_batched_tokens, ceiling) < 1 or num_speculative_tokens < 0:
        raise ValueError(
            f"limits must be at least 1 and drafts at least 0, got max_num_seqs {max_num_seqs}, max_num_batched_tokens"
            f" {max_num_batched_tokens}, ceiling {ceiling}, num_speculative_tokens {num_speculative_tokens}"
        )
    query_len = 1 + num_speculative_tokens
    largest = min(2 * max_num_seqs * query_len, ceiling, max_num_batched_tokens)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16), max_num_batched_tokens}
    decodes = {max_num_seqs} if query_len == 1 else {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
    sizes |= {n * query_len for n in decodes if n <= max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= largest))


def bounded_waste(limit: int, percent: float) -> tuple[int, ...]:
    """The fewest sizes up to ``limit`` of which no step fills less than 100 - ``percent`` % of its bucket.

    From the top: below bucket b comes the largest size s with (b - (s + 1)) / b over the bound, so that s + 1 is the
    least that may still be padded to b.
    """
    if limit < 1:
        raise ValueError(f"the largest bucket must be at least 1, got {limit}")
    if not 0 <= percent < 100:
        raise ValueError(f"a bound on padding is from 0 to less than 100 %, got {percent}")
    filled = 1 - Fraction(percent) / 100
    sizes = [limit]
    while (below := -(-sizes[-1] * filled // 1) - 1) >= 1:
        sizes.append(int(below))
    return tuple(reversed(sizes))


def listed(sizes: Iterable[int], limit: int, what: str) -> tuple[int, ...]:
    """Explicit sizes, sorted, each once, ``limit`` after them.

    Raises:
        ValueError: one is out of range. Sizes are never left out silently.
    """
    ladder = tuple(sorted(set(sizes)))
    if not ladder or ladder[0] < 1 or ladder[-1] > limit:
        raise ValueError(f"{what} must be from 1 to {limit}, got {list(ladder)}")
    return ladder if ladder[-1] == limit else (*ladder, limit)


def named(name: str, limit: int, max_num_seqs: int, num_speculative_tokens: int = 0) -> tuple[int, ...]:
    """The ladder of a name up to ``limit``, which is its last size; see ``NAMED``.

    Raises:
        ValueError: no such name.
    """
    kind, _, bound = name.partition(":")
    try:
        if kind == "bounded" and bound:
            return bounded_waste(limit, float(bound))
        if name == "powers_of_two":
            return powers_of_two(limit)
        if name == "spread":
            return spread(limit)
        if name == "vllm":
            return listed(vllm_sizes(max_num_seqs, limit, num_speculative_tokens), limit, name)
    except ValueError as error:
        raise ValueError(f"buckets {name!r}: {error}") from None
    raise ValueError(f"buckets are a list of sizes, a .json file that holds one, {NAMED}; got {name!r}")
