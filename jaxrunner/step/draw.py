"""From final logits to a token: temperature, the filters' floor, noise, the largest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxrunner.step.filters import NUM_CANDIDATES, Filters, Scaled, filter_floor
from jaxrunner.step.noise import gumbel_noise
from jaxrunner.step.top import row_argmax


def draw(
    logits: Float32[Array, "S V"],
    position: Int32[Array, "S"],
    temperature: Float32[Array, "S"],
    seed: Int32[Array, "S 2"],
    filters: Filters,
    filtered: Bool[Array, ""],
    num_candidates: int = NUM_CANDIDATES,
) -> Int32[Array, "S"]:
    """A token a row; a temperature of 0 takes the first of the most likely ones.

    Args:
        filtered: False promises that no row has min_p, top_k or top_p.
        num_candidates: as ``filter_floor`` has it.
    """
    num_rows, vocab_size = logits.shape
    greedy = temperature == 0.0
    largest = logits.max(axis=1)
    # Relative to the largest logit: a tiny temperature must not overflow. A row with nothing left has -inf there.
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    scaled = Scaled(logits, largest, jnp.where(greedy, 1.0, temperature))
    has_filter = ~greedy & filters.used(vocab_size)

    def filter_rows() -> tuple[Float32[Array, "S"], Bool[Array, "S"], Int32[Array, "S"]]:
        floor, settled, values, ids = filter_floor(scaled, filters, has_filter, num_candidates)
        noisy = jnp.where(values >= floor[:, None], values + gumbel_noise(seed, position, ids), -jnp.inf)
        token = jnp.take_along_axis(ids, jnp.argmax(noisy, axis=1)[:, None], axis=1)[:, 0]
        token = jnp.where(greedy, row_argmax(logits), token)  # not the first candidate: of equal ones it may be any
        return jnp.where(has_filter, floor, -jnp.inf), greedy | (has_filter & settled), token

    def no_filter() -> tuple[Float32[Array, "S"], Bool[Array, "S"], Int32[Array, "S"]]:
        return jnp.full(num_rows, -jnp.inf), jnp.zeros(num_rows, bool), jnp.zeros(num_rows, jnp.int32)

    floor, settled, among_candidates = jax.lax.cond(filtered, filter_rows, no_filter)

    def among_all() -> Int32[Array, "S"]:
        x = scaled.all()
        noise = jnp.where(greedy[:, None], 0.0, gumbel_noise(seed, position, vocab_size))
        return row_argmax(jnp.where(x >= floor[:, None], x + noise, -jnp.inf))

    # One program draws for every row that isn't settled, with or without a filter: a row's token can't depend on
    # whether a neighbour has one.
    drawn = jax.lax.cond(settled.all(), lambda: jnp.zeros(num_rows, jnp.int32), among_all)
    return jnp.where(settled, among_candidates, drawn)
