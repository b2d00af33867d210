"""min_p, top_k and top_p as one number a row: the floor that a token's scaled logit must reach to be kept.

The most likely tokens of each row are looked at first, sorted; nearly always they settle the floor. Rows that they
don't settle are searched by bisection over the ordered bits of float32, a few rows at a time: exact, and without
sorting the vocabulary. Which of the two a row takes depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxrunner.step.top import row_top_k

NUM_CANDIDATES = 64
_SEARCHED_AT_ONCE = 16  # rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Filters:
    """min_p, top_k (0: all) and top_p of each row."""

    min_p: Float32[Array, "S"]
    top_k: Int32[Array, "S"]
    top_p: Float32[Array, "S"]

    def rows(self, at: Int32[Array, "n"]) -> Filters:
        return jax.tree.map(lambda a: a[at], self)

    @property
    def min_logit(self) -> Float32[Array, "S"]:
        """A scaled logit at or above it is one of a p >= min_p * p_max."""
        return jnp.log(self.min_p)

    def used(self, vocab_size: int) -> Bool[Array, "S"]:
        """Whether a row has any of them."""
        return (self.min_p > 0.0) | ((self.top_k > 0) & (self.top_k < vocab_size)) | (self.top_p < 1.0)


@dataclass(frozen=True)
class Scaled:
    """Logits less their row's largest, over the temperature, computed where they are asked for."""

    logits: Float32[Array, "S V"]
    largest: Float32[Array, "S"]
    divisor: Float32[Array, "S"]

    def all(self) -> Float32[Array, "S V"]:
        return self.of(self.logits)

    def of(self, logits: Float32[Array, "S n"]) -> Float32[Array, "S n"]:
        return (logits - self.largest[:, None]) / self.divisor[:, None]

    def rows(self, at: Int32[Array, "n"]) -> Float32[Array, "n V"]:
        return Scaled(self.logits[at], self.largest[at], self.divisor[at]).all()


def filter_floor(
    scaled: Scaled, filters: Filters, wanted: Bool[Array, "S"], num_candidates: int = NUM_CANDIDATES
) -> tuple[Float32[Array, "S"], Bool[Array, "S"], Float32[Array, "S K"], Int32[Array, "S K"]]:
    """Floors of the ``wanted`` rows, and the candidates.

    Args:
        num_candidates: of the most likely tokens, how many are looked at before a row is searched.

    Returns:
        The floors; for which rows all tokens that reach it are among the candidates; the candidates' scaled logits,
        largest first, and their ids. Of rows that aren't wanted only the candidates are right.
    """
    rows, vocab_size = scaled.logits.shape
    k = min(num_candidates, vocab_size)
    values, ids = row_top_k(scaled.logits, k)
    values = scaled.of(values)
    ends_here = (values[:, -1] < filters.min_logit) | ((filters.top_k > 0) & (filters.top_k < k)) | (k == vocab_size)
    needs_total = wanted & (filters.top_p < 1.0) & ~ends_here

    def total() -> Float32[Array, "S"]:
        x = scaled.all()
        return jnp.where(x >= filters.min_logit[:, None], jnp.exp(x), 0.0).sum(axis=1)

    totals = jax.lax.cond(needs_total.any(), total, lambda: jnp.zeros(rows, jnp.float32))
    floor, settled = candidate_floor(values, totals, filters, vocab_size)
    return searched_floor(scaled, floor, wanted & ~settled, filters), settled, values, ids


def candidate_floor(
    scaled: Float32[Array, "S K"],
    total: Float32[Array, "S"],
    filters: Filters,
    vocab_size: int,
) -> tuple[Float32[Array, "S"], Bool[Array, "S"]]:
    """The floor of rows whose K most likely tokens are known, and whether these were enough to know it.

    Args:
        scaled: logits over temperature less the row's largest, of the K most likely tokens, largest first.
        total: sum of exp(scaled) over all words that reach min_p; used where neither min_p nor top_k ends among the K.
    """
    k, top_k, top_p = scaled.shape[1], filters.top_k, filters.top_p
    floor = filters.min_logit
    least = scaled[:, -1]
    kth = jnp.take_along_axis(scaled, jnp.clip(top_k - 1, 0, k - 1)[:, None], axis=1)[:, 0]
    floor = jnp.where((top_k > 0) & (top_k <= k), jnp.maximum(floor, kth), floor)
    whole = k == vocab_size
    ends_here = (least < floor) | whole

    weights = jnp.where(scaled >= floor[:, None], jnp.exp(scaled), 0.0)
    mass = top_p * jnp.where(ends_here, weights.sum(axis=1), total)
    # A token stays while the tokens above it have less than top_p: as many as it takes to reach top_p.
    above = jnp.cumsum(weights, axis=1) - weights
    stays = (above < mass[:, None]) & (scaled >= floor[:, None])
    last = jnp.where(stays, scaled, jnp.inf).min(axis=1)
    floor = jnp.where(top_p < 1.0, jnp.maximum(floor, last), floor)
    total_known = ends_here | (top_k <= 0) | (top_k >= vocab_size)
    return floor, ((least < floor) | whole) & total_known


def searched_floor(
    scaled: Scaled, floor: Float32[Array, "S"], wanted: Bool[Array, "S"], filters: Filters
) -> Float32[Array, "S"]:
    """``floor``, its entries for the ``wanted`` rows replaced by what a search over the whole row finds."""
    num_rows = floor.shape[0]
    size = min(_SEARCHED_AT_ONCE, num_rows)

    def search(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        floor, wanted = carry
        still, row = jax.lax.top_k(wanted.astype(jnp.int32), size)
        found = row_floor(scaled.rows(row), filters.rows(row))
        at = jnp.where(still != 0, row, num_rows)
        return floor.at[at].set(found, mode="drop"), wanted.at[at].set(False, mode="drop")

    return jax.lax.while_loop(lambda carry: carry[1].any(), search, (floor, wanted))[0]


def row_floor(scaled: Float32[Array, "S V"], filters: Filters) -> Float32[Array, "S"]:
    """The floor by bisection: of the tokens that reach min_p the top_k-th largest, then what top_p needs of those.

    Both are the largest number that leaves enough at or above it: enough tokens, enough probability.
    """
    k = jnp.where(filters.top_k > 0, filters.top_k, scaled.shape[1]).astype(jnp.float32)

    def narrow(stage: Int32[Array, ""], floor: Float32[Array, "S"]) -> Float32[Array, "S"]:
        likely = jnp.where(scaled >= floor[:, None], jnp.exp(scaled), 0.0)
        weights = jnp.where(stage == 0, 1.0, likely)
        enough = jnp.where(stage == 0, k, filters.top_p * likely.sum(axis=1))
        found = _largest_threshold(scaled, weights, enough)
        return jnp.where((stage == 0) | (filters.top_p < 1.0), jnp.maximum(floor, found), floor)

    first = jnp.where((filters.top_k > 0).any(), 0, 1)  # a row without top_k loses nothing in stage 0
    return jax.lax.fori_loop(first, 2, narrow, filters.min_logit)


def _largest_threshold(
    values: Float32[Array, "S V"], weights: Float32[Array, "S V"], enough: Float32[Array, "S"]
) -> Float32[Array, "S"]:
    """Per row the largest of ``values`` such that the values at or above it weigh ``enough``; -inf if all don't."""
    ordered = _ordered_bits(values)

    def halve(_: Int32[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # low weighs enough, high does not
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        # XLA's CPU backend adds up an array four times faster than what it computes on the way; these are few rows.
        inside = jax.lax.optimization_barrier(jnp.where(ordered >= middle[:, None], weights, 0.0))
        holds = inside.sum(axis=1) >= enough
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

    low = jnp.full(values.shape[0], _ordered_bits(jnp.float32(-jnp.inf)), jnp.int32)
    high = jnp.full(values.shape[0], _ordered_bits(jnp.float32(jnp.inf)), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return _from_ordered_bits(low)


def _ordered_bits(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    """int32 in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _from_ordered_bits(bits: Int32[Array, "..."]) -> Float32[Array, "..."]:
    return jax.lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits), jnp.float32)
