"""The step: forward over the token stream, then head and sampler over the rows that need logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrunner.request_tables import MAX_LOGPROB_TOKEN_IDS
from jaxrunner.sampling_columns import LOGPROB_IDS, LOGPROBS, NEEDS_HISTORY, NO_TOKEN
from jaxrunner.step.custom import Processor, apply_custom, update_custom
from jaxrunner.step.inputs import StepArrays
from jaxrunner.step.logprobs import given_logprobs, packed_logprobs
from jaxrunner.step.sampling import sample
from jaxrunner.step.state import DeviceState, ForwardState
from jaxrunner.step.stream import TokenStream, token_stream
from jaxrunner.step.tables import append_token
from models import merge
from pallas_kernels import (
    AttentionImplementation,
    CommonAttentionMetadata,
    GroupSpec,
    KVCache,
    StepAttention,
    slot_mapping,
)


@dataclass(frozen=True)
class CacheGroup:
    """One KV-cache group: what its layers share.

    Attributes:
        spec: block size and kind of cache, as the kernels want to know it.
        implementation: what attends in its layers.
    """

    spec: GroupSpec
    implementation: AttentionImplementation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadInputs:
    """What head and sampler know of each logits row. Always S_max rows; rows past ``num_logits`` are padding.

    Attributes:
        request_index: whose row it is; padding: the scratch index.
        position: where in its request the sampled token will stand.
        commit: the sample counts. False for padding, and where known tokens remain to be computed.
        flags: the sampling features any row needs.
    """

    request_index: Int32[Array, "S_max"]
    position: Int32[Array, "S_max"]
    commit: Bool[Array, "S_max"]
    flags: Int32[Array, ""]


@dataclass(frozen=True)
class StepFunctions:
    """The pure functions of a step, for one model and one set of limits. Everything here is static.

    Attributes:
        graphdef: of the model; ``models.split(model)`` gives it, with the flat tuple of parameters.
        groups: the cache groups, in the order of the model's attention layers' ``group``.
        max_num_reqs: request indices; the scratch index is this number.
        max_logits: S_max.
        processors: logits processors; their state is ``DeviceState.custom``.
        num_logprobs: most likely tokens of which a row's log probabilities can be had.
    """

    graphdef: Any
    groups: tuple[CacheGroup, ...]
    max_num_reqs: int
    max_logits: int
    num_logprobs: int = 0
    processors: tuple[Processor, ...] = ()

    def forward(
        self,
        params: tuple[Array, ...],
        kv_caches: tuple[KVCache, ...],
        state: ForwardState,
        inputs: StepArrays,
        *,
        return_all_hidden: bool = False,
    ) -> tuple[Any, ...]:
        """Runs the model over the step's tokens; their keys and values go into the caches.

        Donate ``kv_caches`` and ``state``: both are returned updated. A whole ``DeviceState`` is one; what a forward
        doesn't know of it is handed through.

        Returns:
            Hidden states [S_max, E] after the final norm, only of the tokens in ``inputs.logits_indices``; what the
            head needs to know of them, ``HeadInputs``; the caches; the state with the step's block-table updates; and
            if asked for the hidden states [T, E] of all tokens.
        """
        state = self.with_table_updates(state, inputs)
        stream = token_stream(state, inputs)
        attention = [self.attention(g, state, inputs, stream) for g in range(len(self.groups))]
        hidden, kv_caches = merge(self.graphdef, params)(stream.token_ids, stream.positions, kv_caches, attention)
        at, head_inputs = self.head_inputs(inputs, stream)
        return (hidden[at], head_inputs, kv_caches, state, *([hidden] if return_all_hidden else []))

    def head_and_sample(
        self,
        params: tuple[Array, ...],
        state: DeviceState,
        hidden: Float[Array, "S_max E"],
        head_inputs: HeadInputs,
        *,
        num_rows: int | None = None,
        return_logits: bool = False,
        return_logprobs: bool = False,
    ) -> tuple[Any, ...]:
        """Logits of the first ``num_rows`` rows (all by default), and a token for each.

        Returns:
            Tokens, int32 [S], -1 where the sample must not count, NO_TOKEN where none is left; the state, which
            remembers each request's last sample; and if asked for the logits, float32 [S, V], and ``packed_logprobs``
            with ``given_logprobs`` of the tokens that requests named, zeros without the flags LOGPROBS and LOGPROB_IDS.
        """
        s = num_rows if num_rows is not None else hidden.shape[0]
        rows = HeadInputs(
            head_inputs.request_index[:s], head_inputs.position[:s], head_inputs.commit[:s], head_inputs.flags
        )
        logits = merge(self.graphdef, params).compute_logits(hidden[:s])
        params_of_rows = state.sampling.rows(rows.request_index)
        index, position = rows.request_index, rows.position

        def custom(x: Array) -> Array:
            return apply_custom(self.processors, state.custom, x, index, position, rows.flags)

        drawn = sample(logits, position, params_of_rows, rows.flags, state.tables, index, custom)
        token = jnp.where(drawn == NO_TOKEN, 0, drawn)  # what the device keeps is in the vocabulary
        past_the_end = self.max_num_reqs + 1
        target = jnp.where(rows.commit, rows.request_index, past_the_end)
        state = replace(state, last_sampled=state.last_sampled.at[target].set(token, mode="drop"))
        if self.processors:
            updated = update_custom(self.processors, state.custom, target, token, position, rows.flags)
            state = replace(state, custom=updated)
        if state.tables is not None:
            tables = jax.lax.cond(
                (rows.flags & NEEDS_HISTORY) != 0,
                lambda t: append_token(t, target, rows.position, token),
                lambda t: t,
                state.tables,
            )
            state = replace(state, tables=tables)
        sampled = jnp.where(rows.commit, drawn, -1)
        more = [logits] if return_logits else []
        if return_logprobs:
            more.append(
                jax.lax.cond(
                    (rows.flags & LOGPROBS) != 0,
                    # The logits once more: kept until here, they would be copied in every step before they are changed.
                    lambda: self._output_logprobs(params, hidden[:s], token, state, rows),
                    lambda: (jnp.zeros((s, 2 * self.num_logprobs + 3), jnp.int32), _no_given(s)),
                )
            )
        return (sampled, state, *more)

    def _output_logprobs(
        self,
        params: tuple[Array, ...],
        hidden: Float[Array, "S E"],
        token: Int32[Array, "S"],
        state: DeviceState,
        rows: HeadInputs,
    ) -> tuple[Int32[Array, "S words"], Int32[Array, "S 2*m"]]:
        logits, tables = merge(self.graphdef, params).compute_logits(hidden), state.tables
        given = _no_given(len(token))
        if tables is not None:
            ids = tables.logprob_ids
            given = jax.lax.cond(
                (rows.flags & LOGPROB_IDS) != 0,
                lambda: given_logprobs(logits, ids[rows.request_index]),
                lambda: given,
            )
        return packed_logprobs(logits, token, self.num_logprobs), given

    def prompt_logprobs(
        self, params: tuple[Array, ...], hidden: Float[Array, "C E"], targets: Int32[Array, "C"]
    ) -> Int32[Array, "C words"]:
        """``packed_logprobs`` of tokens that are known, by the hidden states of the tokens before them."""
        logits = merge(self.graphdef, params).compute_logits(hidden)
        return packed_logprobs(logits, targets, self.num_logprobs)

    def step(
        self,
        params: tuple[Array, ...],
        kv_caches: tuple[KVCache, ...],
        state: DeviceState,
        inputs: StepArrays,
        *,
        return_logits: bool = False,
        return_hidden: bool = False,
    ) -> tuple[Any, ...]:
        """``forward`` and ``head_and_sample`` in one: (sampled, kv_caches, state[, logits][, hidden])."""
        hidden, head_inputs, kv_caches, state = self.forward(params, kv_caches, state, inputs)
        sampled, state, *logits = self.head_and_sample(params, state, hidden, head_inputs, return_logits=return_logits)
        return (sampled, kv_caches, state, *logits, *([hidden] if return_hidden else []))

    def with_table_updates[S: ForwardState](self, state: S, inputs: StepArrays) -> S:
        """The state with the block-table cells that the step brings."""
        tables: Sequence[Array] = state.block_tables
        updated = []
        for g, table in enumerate(tables):
            cells = jnp.where(inputs.update_group == g, inputs.update_cell, table.size)
            updated.append(table.reshape(-1).at[cells].set(inputs.update_value, mode="drop").reshape(table.shape))
        return replace(state, block_tables=tuple(updated))

    def attention(self, g: int, state: ForwardState, inputs: StepArrays, stream: TokenStream) -> StepAttention:
        """What the layers of group ``g`` attend by, built once for all of them."""
        group, seq_lens = self.groups[g], stream.seq_lens
        size = group.spec.block_size
        table = state.block_tables[g][inputs.idx_mapping]
        used = (seq_lens + size - 1) // size
        table = jnp.where(jnp.arange(table.shape[1], dtype=jnp.int32)[None, :] < used[:, None], table, 0)
        slots = slot_mapping(inputs.query_start_loc, stream.positions, table, block_size=size)
        common = CommonAttentionMetadata.make(
            query_start_loc=inputs.query_start_loc,
            seq_lens=seq_lens,
            block_table=table,
            slot_mapping=slots,
            positions=stream.positions,
            num_reqs=inputs.num_reqs,
            is_prefilling=stream.is_prefilling,
            block_size=size,
        )
        metadata = group.implementation.build(common, group.spec)
        return StepAttention(group.implementation, metadata, slots)

    def head_inputs(self, inputs: StepArrays, stream: TokenStream) -> tuple[Int32[Array, "S_max"], HeadInputs]:
        """The tokens whose hidden states get logits, and what the head knows of each."""
        at = _pad_rows(inputs.logits_indices, self.max_logits)
        row = stream.row[at]
        used = jnp.arange(self.max_logits, dtype=jnp.int32) < inputs.num_logits
        return at, HeadInputs(
            request_index=jnp.where(used, inputs.idx_mapping[row], self.max_num_reqs),
            position=jnp.where(used, stream.positions[at] + 1, 0),
            commit=used & (stream.seq_lens >= inputs.num_known)[row],
            flags=inputs.flags,
        )


def _pad_rows(values: Int32[Array, "S"], length: int) -> Int32[Array, "length"]:
    return jnp.pad(values, (0, length - values.shape[0]))


def _no_given(num_rows: int) -> Int32[Array, "S 2*m"]:
    return jnp.zeros((num_rows, 2 * MAX_LOGPROB_TOKEN_IDS), jnp.int32)
