"""What stays on the device between steps, keyed by request index: it never moves when rows do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrunner.request_tables import TableSizes
from jaxrunner.sampling_columns import RECORD_WORDS, SAMPLING_COLUMNS
from jaxrunner.step.sampling import SamplingState
from jaxrunner.step.tables import RequestTables, init_tables


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardState:
    """What a forward reads and changes of the state.

    Attributes:
        block_tables: per cache group [I+1, W], physical blocks. Columns past a request's blocks hold garbage.
        last_sampled: [I+1], the last committed token of each request.
    """

    block_tables: tuple[Int32[Array, "I+1 W"], ...]
    last_sampled: Int32[Array, "I+1"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState(ForwardState):
    """Entry ``max_num_reqs`` of every array is scratch: padding rows name it, and nothing is ever stored there.

    Attributes:
        sampling: each request's sampling parameters.
        tables: what requests bring in variable number; None: features that need them do nothing.
        custom: the columns of each logits processor.
    """

    sampling: SamplingState
    tables: RequestTables | None = None
    custom: tuple[dict[str, Array], ...] = ()

    @property
    def of_forward(self) -> ForwardState:
        return ForwardState(self.block_tables, self.last_sampled)


def init_state(max_num_reqs: int, table_widths: Sequence[int], tables: TableSizes | None = None) -> DeviceState:
    """State of a runner that knows no request yet."""
    entries = max_num_reqs + 1
    sampling = {
        c.name: jnp.full(
            (entries, c.width) if c.width > 1 else (entries,), c.fill, jnp.float32 if c.is_float else jnp.int32
        )
        for c in SAMPLING_COLUMNS
    }
    return DeviceState(
        block_tables=tuple(jnp.zeros((entries, w), jnp.int32) for w in table_widths),
        last_sampled=jnp.zeros(entries, jnp.int32),
        sampling=SamplingState(**sampling),
        tables=None if tables is None else init_tables(tables),
    )


def enter_requests(
    state: DeviceState, indices: Int32[Array, "P"], records: Int32[Array, f"P {RECORD_WORDS}"]
) -> DeviceState:
    """Requests enter or restart at ``indices``: their state begins anew from their records.

    An index past the end is padding.
    """
    sampling, at = {}, 0
    for c in SAMPLING_COLUMNS:
        words = records[:, at : at + c.width]
        at += c.width
        values = jax.lax.bitcast_convert_type(words, jnp.float32) if c.is_float else words
        old = getattr(state.sampling, c.name)
        sampling[c.name] = old.at[indices].set(values if c.width > 1 else values[:, 0], mode="drop")
    return replace(
        state,
        last_sampled=state.last_sampled.at[indices].set(0, mode="drop"),
        sampling=SamplingState(**sampling),
    )


def update_block_table(
    state: DeviceState, group: int, cells: Int32[Array, "U"], values: Int32[Array, "U"]
) -> DeviceState:
    """``values`` go to ``cells`` (request index * W + column) of a group's table; a cell past the end is padding."""
    tables = list(state.block_tables)
    tables[group] = tables[group].reshape(-1).at[cells].set(values, mode="drop").reshape(tables[group].shape)
    return replace(state, block_tables=tuple(tables))
