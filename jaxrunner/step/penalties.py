"""Repetition, frequency and presence penalties, from counts that exist only while a step needs them.

Resident counts of every request would be [max_num_reqs, V]: 525 MB at 1024 x 128k. They are counted anew from the
token history, in time that goes with the longest history of the step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

IN_PROMPT = 2**30  # in a count: the token stands in the prompt
_AT_ONCE = 512  # tokens of each row that are counted at a time


def token_counts(
    history: Int32[Array, "I L"],
    request_index: Int32[Array, "S"],
    num_prompt: Int32[Array, "S"],
    length: Int32[Array, "S"],
    vocab_size: int,
) -> Int32[Array, "S V"]:
    """How often each token stands in each row's output, plus IN_PROMPT where it stands in the prompt.

    Args:
        history: prompt and output of each request; of a token that the prompt has several times, the first one alone,
            and -1 in the other places.
        length: tokens of prompt and output that count; 0 for padding.
    """
    rows = jnp.arange(request_index.shape[0], dtype=jnp.int32)[:, None]
    size = min(_AT_ONCE, history.shape[1])

    def count(at: Int32[Array, ""], counts: Int32[Array, "S V"]) -> Int32[Array, "S V"]:
        place = (at * size + jnp.arange(size, dtype=jnp.int32))[None, :]
        token = history[request_index[:, None], jnp.minimum(place, history.shape[1] - 1)]
        there = (place < length[:, None]) & (token >= 0)
        weight = jnp.where(place < num_prompt[:, None], IN_PROMPT, 1)
        return counts.at[rows, jnp.where(there, token, vocab_size)].add(weight, mode="drop")

    counts = jnp.zeros((request_index.shape[0], vocab_size), jnp.int32)
    return jax.lax.fori_loop(0, (length.max() + size - 1) // size, count, counts)


def penalise(
    logits: Float32[Array, "S V"],
    counts: Int32[Array, "S V"],
    repetition: Float32[Array, "S"],
    frequency: Float32[Array, "S"],
    presence: Float32[Array, "S"],
) -> Float32[Array, "S V"]:
    """Repetition first, over prompt and output: a positive logit is divided, a negative one multiplied. Then, over
    the output alone, less ``frequency`` for every occurrence and ``presence`` for there being any.
    """
    in_output = counts & (IN_PROMPT - 1)
    factor = jnp.where(counts != 0, repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * in_output - presence[:, None] * (in_output > 0)
