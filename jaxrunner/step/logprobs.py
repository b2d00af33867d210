"""Log probabilities of the chosen tokens and of the most likely ones, from the logits as the model gave them.

They travel in one array of int32 words a row, so that a step that wants them downloads one thing more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxrunner.step.top import row_top_k


def packed_logprobs(
    logits: Float32[Array, "S V"], token: Int32[Array, "S"], num_top: int
) -> Int32[Array, "S 2*num_top+2"]:
    """Of each row the ids of the ``num_top`` most likely tokens, their log probabilities (as the bits of float32),
    the chosen token's log probability, and its rank: how many tokens are at least as likely, itself among them.

    ``jaxrunner.logprobs.unpack_logprobs`` is the host's side.
    """
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)
    largest = logits.max(axis=1, keepdims=True)
    log_total = largest + jnp.log(jnp.exp(logits - largest).sum(axis=1, keepdims=True))
    rank = (logits >= chosen).sum(axis=1, dtype=jnp.int32)
    top, ids = row_top_k(logits, num_top) if num_top else (logits[:, :0], token[:, None][:, :0])
    floats = jax.lax.bitcast_convert_type(jnp.concatenate([top, chosen], axis=1) - log_total, jnp.int32)
    return jnp.concatenate([ids, floats, rank[:, None]], axis=1)
