"""Log probabilities of the chosen tokens and of others, from the logits as the model gave them.

They travel as int32 words, a row of them each, in which any number of leading entries can be taken as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxrunner.step.top import row_top_k


def packed_logprobs(
    logits: Float32[Array, "S V"], token: Int32[Array, "S"], num_top: int
) -> Int32[Array, "S 3+2*num_top"]:
    """Of each row the chosen token, its log probability (as the bits of float32) and its rank: how many tokens are at
    least as likely, itself among them. Then the ``num_top`` most likely tokens, each with its log probability.

    ``jaxrunner.logprobs_lists`` is the host's side.
    """
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)
    rank = (logits >= chosen).sum(axis=1, dtype=jnp.int32)
    top, ids = row_top_k(logits, num_top) if num_top else (logits[:, :0], token[:, None][:, :0])
    total = _log_total(logits)
    first = jnp.stack([token, _bits(chosen - total)[:, 0], rank], axis=1)
    return jnp.concatenate([first, _pairs(ids, top - total)], axis=1)


def given_logprobs(logits: Float32[Array, "S V"], ids: Int32[Array, "S n"]) -> Int32[Array, "S 2*n"]:
    """Of each row the given tokens, each with its log probability."""
    return _pairs(ids, jnp.take_along_axis(logits, ids, axis=1) - _log_total(logits))


def _log_total(logits: Float32[Array, "S V"]) -> Float32[Array, "S 1"]:
    largest = logits.max(axis=1, keepdims=True)
    return largest + jnp.log(jnp.exp(logits - largest).sum(axis=1, keepdims=True))


def _pairs(ids: Int32[Array, "S n"], values: Float32[Array, "S n"]) -> Int32[Array, "S 2*n"]:
    return jnp.stack([ids, _bits(values)], axis=2).reshape(ids.shape[0], -1)


def _bits(values: Array) -> Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)
