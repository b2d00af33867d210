"""The token stream of a step as only the device knows it: positions, lengths and the tokens that it sampled itself."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxrunner.step.inputs import StepArrays
from jaxrunner.step.state import ForwardState
from pallas_kernels import request_indices


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenStream:
    """Derived from the upload and the state.

    Attributes:
        token_ids: with the device's last sample where the host asked for it.
        positions: of each token in its request; padding 0.
        row: of each token; padding: the last.
        seq_lens: of each row after this step; padding 0.
        is_prefilling: rows whose prompt is not wholly computed before this step.
    """

    token_ids: Int32[Array, "T"]
    positions: Int32[Array, "T"]
    row: Int32[Array, "T"]
    seq_lens: Int32[Array, "R"]
    is_prefilling: Bool[Array, "R"]


def token_stream(state: ForwardState, inputs: StepArrays) -> TokenStream:
    """What the step's tokens are and where they stand."""
    num_tokens, num_rows = inputs.token_ids.shape[0], inputs.idx_mapping.shape[0]
    starts = inputs.query_start_loc
    query_lens = starts[1:] - starts[:-1]
    seq_lens = jnp.where(query_lens > 0, inputs.num_computed + query_lens, 0)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    real = token < inputs.num_tokens
    row = jnp.minimum(request_indices(starts, num_tokens), num_rows - 1)
    positions = jnp.where(real, inputs.num_computed[row] + token - starts[row], 0)

    # The last token before the drafts may be one that only the device knows.
    sampled_at = starts[1:] - 1 - inputs.num_draft
    from_device = real & (inputs.use_device[row] != 0) & (token == sampled_at[row])
    token_ids = jnp.where(from_device, state.last_sampled[inputs.idx_mapping[row]], inputs.token_ids)
    is_prefilling = (query_lens > 0) & (inputs.num_computed < inputs.num_prompt)
    return TokenStream(token_ids, positions, row, seq_lens, is_prefilling)
