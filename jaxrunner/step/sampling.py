"""From logits to tokens, in the field's order: held-back stop tokens, temperature, min_p, top_k, top_p, draw.

Features are branches on batch-wide flags inside one executable: what no row uses is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxrunner.sampling_columns import FILTERED, HELD_BACK, MAX_STOP_TOKEN_IDS, RANDOM
from jaxrunner.step.noise import gumbel_noise


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters by request index (``SAMPLING_COLUMNS``); gathered, by logits row."""

    temperature: Float32[Array, "I"]
    top_p: Float32[Array, "I"]
    min_p: Float32[Array, "I"]
    top_k: Int32[Array, "I"]
    seed: Int32[Array, "I 2"]
    min_length: Int32[Array, "I"]
    stop_token_ids: Int32[Array, f"I {MAX_STOP_TOKEN_IDS}"]

    def rows(self, indices: Int32[Array, "S"]) -> SamplingState:
        """The parameters of each logits row."""
        return jax.tree.map(lambda a: a[indices], self)


def sample(
    logits: Float32[Array, "S V"],
    position: Int32[Array, "S"],
    params: SamplingState,
    flags: Int32[Array, ""],
) -> Int32[Array, "S"]:
    """One token a row.

    Args:
        position: where in its request the sampled token will stand. With the row's seed it fixes the noise.
        params: by row.
        flags: bits RANDOM, FILTERED, HELD_BACK; a clear bit promises that no row needs that feature.

    A greedy row takes the lowest of the most likely tokens, whatever the flags say.
    """
    logits = jax.lax.cond(
        (flags & HELD_BACK) != 0, lambda: hold_back_stop_tokens(logits, position, params), lambda: logits
    )

    def draw() -> Int32[Array, "S"]:
        greedy = params.temperature == 0.0
        # Relative to the largest logit: a tiny temperature must not overflow.
        scaled = (logits - logits.max(axis=1, keepdims=True)) / jnp.where(greedy, 1.0, params.temperature)[:, None]
        scaled = jax.lax.cond((flags & FILTERED) != 0, lambda: filter_logits(scaled, params), lambda: scaled)
        noise = gumbel_noise(params.seed, position, logits.shape[1])
        drawn = jnp.argmax(scaled + noise, axis=1).astype(jnp.int32)
        return jnp.where(greedy, jnp.argmax(logits, axis=1).astype(jnp.int32), drawn)

    return jax.lax.cond((flags & RANDOM) != 0, draw, lambda: jnp.argmax(logits, axis=1).astype(jnp.int32))


def hold_back_stop_tokens(
    logits: Float32[Array, "S V"], position: Int32[Array, "S"], params: SamplingState
) -> Float32[Array, "S V"]:
    """Rows below their min_tokens cannot sample a token that would stop them."""
    held = position < params.min_length
    ids = params.stop_token_ids
    past_the_end = logits.shape[1]
    ids = jnp.where(held[:, None] & (ids >= 0), ids, past_the_end)
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")


def filter_logits(scaled: Float32[Array, "S V"], params: SamplingState) -> Float32[Array, "S V"]:
    """min_p, then top_k, then top_p: what falls out becomes -inf. Ties with the last token kept are kept.

    Args:
        scaled: logits over temperature, each row's largest is 0.

    Each filter keeps the tokens at or above a threshold, found by bisection over the ordered bits of float32: exact,
    and without sorting the vocabulary.
    """
    keep = scaled >= jnp.log(params.min_p)[:, None]  # p >= min_p * p_max
    scaled = jnp.where(keep, scaled, -jnp.inf)

    k = jnp.where(params.top_k > 0, params.top_k, scaled.shape[1])
    threshold = _largest_threshold(scaled, lambda at_least: at_least.sum(axis=1) >= k)
    scaled = jnp.where(scaled >= threshold[:, None], scaled, -jnp.inf)

    weights = jnp.exp(scaled)
    mass = params.top_p * weights.sum(axis=1)
    # A token stays while the tokens above it have less than top_p: as many as it takes to reach top_p.
    threshold = _largest_threshold(scaled, lambda at_least: jnp.where(at_least, weights, 0.0).sum(axis=1) >= mass)
    threshold = jnp.where(params.top_p < 1.0, threshold, -jnp.inf)
    return jnp.where(scaled >= threshold[:, None], scaled, -jnp.inf)


def _largest_threshold(
    values: Float32[Array, "S V"], enough: Callable[[Bool[Array, "S V"]], Bool[Array, "S"]]
) -> Float32[Array, "S"]:
    """Per row the largest of ``values`` for which ``enough(values >= it)`` holds; -inf if it never does.

    ``enough`` must hold for every smaller threshold when it holds for one.
    """
    ordered = _ordered_bits(values)

    def halve(_: Int32[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # enough(low) holds, enough(high) does not
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        holds: Bool[Array, "S"] = enough(ordered >= middle[:, None])
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
