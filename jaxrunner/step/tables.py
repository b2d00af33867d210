"""What requests bring along in variable number, on the device by request index: bounded tables, uploaded on entering.

A request that uses none of it uploads none of it; what an earlier owner of its index left there is never read, because
the counts in its sampling record are 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxrunner.request_tables import TableSizes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RequestTables:
    """Sizes are ``jaxrunner.request_tables.TableSizes``'.

    Attributes:
        history: tokens of each request that needs them (penalties, bad words): prompt, with -1 for a token that stands
            further in front already, and outputs.
        allowed: packed bits of the tokens that a request may sample.
        bias_ids, bias_values: logit_bias.
        bad_words: token ids, the last of each word at the end, -1 in front of shorter ones.
        logprob_ids: logprob_token_ids, 0 behind them.
    """

    history: Int32[Array, "I L"]
    allowed: Int32[Array, "I V/32"]
    bias_ids: Int32[Array, "I n"]
    bias_values: Float32[Array, "I n"]
    bad_words: Int32[Array, "I N M"]
    logprob_ids: Int32[Array, "I m"]

    def last_outputs(
        self, request_index: Int32[Array, "S"], length: Int32[Array, "S"], num_prompt: Int32[Array, "S"]
    ) -> Int32[Array, "S M-1"]:
        """The end of each row's output, for ``ended_bad_words``; -1 where the output is shorter."""
        width = self.bad_words.shape[2] - 1
        place = length[:, None] + jnp.arange(-width, 0, dtype=jnp.int32)
        tokens = self.history[request_index[:, None], jnp.clip(place, 0, self.history.shape[1] - 1)]
        return jnp.where(place >= num_prompt[:, None], tokens, -1)


def init_tables(sizes: TableSizes) -> RequestTables:
    """Tables of a runner that knows no request."""
    return RequestTables(
        **{
            name: jnp.zeros((sizes.max_num_reqs + 1, *shape), jnp.float32 if name == "bias_values" else jnp.int32)
            for name, shape in sizes.fields.items()
        }
    )


def enter_tables(tables: RequestTables, index: Int32[Array, ""], words: Int32[Array, "words"]) -> RequestTables:
    """A request's tables, as ``jaxrunner.request_tables.pack`` wrote them, go to its index."""
    changed, at = {}, 0
    for name, old in vars(tables).items():
        size = old[0].size
        row = words[at : at + size].reshape(old.shape[1:])
        at += size
        row = jax.lax.bitcast_convert_type(row, old.dtype) if old.dtype != jnp.int32 else row
        changed[name] = old.at[index].set(row, mode="drop")
    return RequestTables(**changed)


def set_allowed(tables: RequestTables, indices: Int32[Array, "P"], allowed: Int32[Array, "P V/32"]) -> RequestTables:
    """This step's allowed tokens of requests with a grammar; an index past the end is padding."""
    return replace(tables, allowed=tables.allowed.at[indices].set(allowed, mode="drop"))


def append_token(
    tables: RequestTables, indices: Int32[Array, "S"], position: Int32[Array, "S"], token: Int32[Array, "S"]
) -> RequestTables:
    """Committed tokens take their place in the history; an index or position past the end is dropped."""
    return replace(tables, history=tables.history.at[indices, position].set(token, mode="drop"))
