"""From logits to tokens, in the field's order: allowed tokens, bad words, held-back stop tokens, bias, penalties, draw.

Features are branches on batch-wide flags inside one executable: what no row uses is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxrunner.sampling_columns import (
    BAD_WORDS,
    BIAS,
    FILTERED,
    HELD_BACK,
    MASKED,
    MAX_STOP_TOKEN_IDS,
    NO_TOKEN,
    PENALTIES,
    RANDOM,
)
from jaxrunner.step.constraints import HELD, add_to_tokens, ended_bad_words, keep_allowed
from jaxrunner.step.draw import draw
from jaxrunner.step.filters import Filters
from jaxrunner.step.penalties import penalise, token_counts
from jaxrunner.step.tables import RequestTables
from jaxrunner.step.top import row_argmax


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
    repetition_penalty: Float32[Array, "I"]
    frequency_penalty: Float32[Array, "I"]
    presence_penalty: Float32[Array, "I"]
    num_prompt: Int32[Array, "I"]
    num_bias: Int32[Array, "I"]
    num_bad_words: Int32[Array, "I"]
    masked: Int32[Array, "I"]

    def rows(self, indices: Int32[Array, "S"]) -> SamplingState:
        """The parameters of each logits row."""
        return jax.tree.map(lambda a: a[indices], self)


def sample(
    logits: Float32[Array, "S V"],
    position: Int32[Array, "S"],
    params: SamplingState,
    flags: Int32[Array, ""],
    tables: RequestTables | None = None,
    request_index: Int32[Array, "S"] | None = None,
    custom: Callable[[Float32[Array, "S V"]], Float32[Array, "S V"]] = lambda x: x,
) -> Int32[Array, "S"]:
    """One token a row.

    Args:
        position: where in its request the sampled token will stand. With the row's seed it fixes the noise.
        params: by row.
        flags: bits of ``jaxrunner.sampling_columns``; a clear bit promises that no row needs that feature.
        tables, request_index: what the features of variable size read, and whose row each is. Without them MASKED,
            BAD_WORDS, BIAS and PENALTIES do nothing.
        custom: a change of the logits between penalties and temperature.

    A greedy row takes the lowest of the most likely tokens, whatever the flags say. A row whose tokens are all ruled
    out (minus infinity each) gets NO_TOKEN.
    """
    logits = custom(adjust_logits(logits, position, params, flags, tables, request_index))

    def draw_rows() -> Int32[Array, "S"]:
        filters = Filters(params.min_p, params.top_k, params.top_p)
        return draw(logits, position, params.temperature, params.seed, filters, (flags & FILTERED) != 0)

    token = jax.lax.cond((flags & RANDOM) != 0, draw_rows, lambda: row_argmax(logits))
    taken = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return jnp.where(jnp.isneginf(taken), NO_TOKEN, token)


def adjust_logits(
    logits: Float32[Array, "S V"],
    position: Int32[Array, "S"],
    params: SamplingState,
    flags: Int32[Array, ""],
    tables: RequestTables | None,
    request_index: Int32[Array, "S"] | None,
) -> Float32[Array, "S V"]:
    """All that happens to logits before the temperature; arguments as ``sample`` has them."""

    def having(flag: int) -> Array:
        return (flags & flag) != 0

    held = position < params.min_length
    held_back = jnp.where(held[:, None], params.stop_token_ids, -1), -HELD
    if tables is None or request_index is None:
        return jax.lax.cond(having(HELD_BACK), lambda x: add_to_tokens(x, held_back), lambda x: x, logits)
    i, t = request_index, tables

    def allow(x: Array) -> Array:
        return keep_allowed(x, t.allowed[i], params.masked != 0)

    def edit(x: Array) -> Array:
        outputs = t.last_outputs(i, position, params.num_prompt)
        bad = ended_bad_words(t.bad_words[i], params.num_bad_words, outputs), -jnp.inf
        biased = jnp.arange(t.bias_ids.shape[1], dtype=jnp.int32)[None, :] < params.num_bias[:, None]
        return add_to_tokens(x, bad, held_back, (jnp.where(biased, t.bias_ids[i], -1), t.bias_values[i]))

    def take_penalties(x: Array) -> Array:
        counts = token_counts(t.history, i, params.num_prompt, position, x.shape[1])
        return penalise(x, counts, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)

    for flag, change in ((MASKED, allow), (BAD_WORDS | HELD_BACK | BIAS, edit), (PENALTIES, take_penalties)):
        logits = jax.lax.cond(having(flag), change, lambda x: x, logits)
    return logits
