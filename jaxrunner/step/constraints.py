"""What a request lays on single tokens before penalties: allowed ones, bad words, held-back stop tokens, bias."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

# Taken off a held-back stop token: no other token is ever that unlikely, and yet it wins where all others are
# impossible (a grammar that can only end).
HELD = jnp.float32(1e30)


def keep_allowed(
    logits: Float32[Array, "S V"], allowed: Int32[Array, "S V/32"], masked: Bool[Array, "S"]
) -> Float32[Array, "S V"]:
    """Only tokens whose bit is set stay, in rows that are ``masked``.

    Args:
        allowed: bit b of word w speaks for token 32 w + b.
    """
    words = jnp.where(masked[:, None], allowed, -1)
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return jnp.where(bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] != 0, logits, -jnp.inf)


def ended_bad_words(
    words: Int32[Array, "S N M"], count: Int32[Array, "S"], last_outputs: Int32[Array, "S M-1"]
) -> Int32[Array, "S N"]:
    """The last token of each bad word of which the output ends with the tokens before it; -1 for the other words.

    Args:
        words: token ids of each word, the last at the end; -1 in front of shorter ones.
        count: words of each row.
        last_outputs: the end of each row's output, -1 where it is shorter. The prompt is none of it.
    """
    before, last = words[:, :, :-1], words[:, :, -1]
    ends_with = ((before == -1) | (before == last_outputs[:, None, :])).all(axis=2)
    given = jnp.arange(words.shape[1], dtype=jnp.int32)[None, :] < count[:, None]
    return jnp.where(given & ends_with, last, -1)


def add_to_tokens(
    logits: Float32[Array, "S V"], *edits: tuple[Int32[Array, "S n"], Float32[Array, "S n"] | float | Array]
) -> Float32[Array, "S V"]:
    """Adds to the logits of each row's ids their values, all edits in one scatter.

    Args:
        edits: ids, where -1 is padding, and their values or one value for all.
    """
    ids = jnp.concatenate([i for i, _ in edits], axis=1)
    values = jnp.concatenate([jnp.broadcast_to(jnp.asarray(v, jnp.float32), i.shape) for i, v in edits], axis=1)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[rows, jnp.where(ids >= 0, ids, logits.shape[1])].add(values, mode="drop")
