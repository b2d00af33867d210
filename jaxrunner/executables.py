"""Compiled programs of a runner, one a shape: made ahead of time, so that nothing recompiles behind one's back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.block_edits import EDIT_CAPACITY
from jaxrunner.sampling_columns import RECORD_WORDS
from jaxrunner.shapes import StepShapes
from jaxrunner.step import (
    DeviceState,
    StepFunctions,
    edit_blocks,
    enter_requests,
    enter_tables,
    unpack,
    update_block_table,
)

ENTER_CAPACITY = 64  # requests whose records one upload carries
TABLE_CAPACITY = 4096  # block-table cells one upload ahead of a step carries


@dataclass(frozen=True, slots=True)
class Compiled:
    """One executable and what it took to make."""

    name: str
    call: Callable[..., Any]
    seconds: float
    temp_bytes: int


class StepExecutables:
    """Compiles each program of a step when it is first asked for, or ahead of time, and keeps it.

    Args:
        arguments: abstract parameters, caches and state: shapes, dtypes and shardings that every call will have.

    Attributes:
        compiled: every executable so far, by name.
        warm: set once warm-up is over; ``late`` counts what was compiled after that.
    """

    def __init__(
        self,
        functions: StepFunctions,
        shapes: StepShapes,
        params: Any,
        kv_caches: Any,
        state: DeviceState,
    ) -> None:
        self._functions, self._shapes = functions, shapes
        self._params, self._kv_caches, self._state = (jax.tree.map(_abstract, a) for a in (params, kv_caches, state))
        self.compiled: dict[str, Compiled] = {}
        self.warm = False
        self.late = 0

    def forward(self, num_tokens: int) -> Callable[..., Any]:
        """(params, kv_caches, state, buffer) -> (hidden, head_inputs, kv_caches, state); caches and state donated."""

        def make() -> Any:
            layout = self._shapes.layouts[num_tokens]

            def forward(params: Any, kv_caches: Any, state: DeviceState, buffer: jax.Array) -> Any:
                return self._functions.forward(params, kv_caches, state, unpack(buffer, layout))

            buffer = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
            return jax.jit(forward, donate_argnums=(1, 2)).lower(self._params, self._kv_caches, self._state, buffer)

        return self._get(f"forward[{num_tokens}]", make)

    def head(self, num_rows: int, *, return_logits: bool = False) -> Callable[..., Any]:
        """(params, state, hidden, head_inputs) -> (sampled, state[, logits]); state donated."""

        def make() -> Any:
            def head(params: Any, state: DeviceState, hidden: jax.Array, head_inputs: Any) -> Any:
                return self._functions.head_and_sample(
                    params, state, hidden, head_inputs, num_rows=num_rows, return_logits=return_logits
                )

            layout = self._shapes.layouts[self._shapes.tokens[0]]
            buffer = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
            hidden, head_inputs, _, _ = jax.eval_shape(
                lambda p, c, s, b: self._functions.forward(p, c, s, unpack(b, layout)),
                self._params, self._kv_caches, self._state, buffer,
            )  # fmt: skip
            return jax.jit(head, donate_argnums=(1,)).lower(self._params, self._state, hidden, head_inputs)

        return self._get(f"head[{num_rows}{', logits' if return_logits else ''}]", make)

    def enter(self) -> Callable[..., Any]:
        """(state, indices [ENTER_CAPACITY], records) -> state; donated."""

        def make() -> Any:
            indices = jax.ShapeDtypeStruct((ENTER_CAPACITY,), jnp.int32)
            records = jax.ShapeDtypeStruct((ENTER_CAPACITY, RECORD_WORDS), jnp.int32)
            return jax.jit(enter_requests, donate_argnums=0).lower(self._state, indices, records)

        return self._get("enter", make)

    def enter_tables(self) -> Callable[..., Any]:
        """(state, index, words [TableSizes.words]) -> state; donated."""

        def make() -> Any:
            def enter(state: DeviceState, index: jax.Array, words: jax.Array) -> DeviceState:
                assert state.tables is not None
                return replace(state, tables=enter_tables(state.tables, index, words))

            words = sum(math.prod(table.shape[1:]) for table in jax.tree.leaves(self._state.tables))
            index, row = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((words,), jnp.int32)
            return jax.jit(enter, donate_argnums=0).lower(self._state, index, row)

        return self._get("enter_tables", make)

    def update_table(self, group: int) -> Callable[..., Any]:
        """(state, cells [TABLE_CAPACITY], values) -> state; donated."""

        def make() -> Any:
            cells = jax.ShapeDtypeStruct((TABLE_CAPACITY,), jnp.int32)

            def update(state: DeviceState, cells: jax.Array, values: jax.Array) -> DeviceState:
                return update_block_table(state, group, cells, values)

            return jax.jit(update, donate_argnums=0).lower(self._state, cells, cells)

        return self._get(f"update_table[{group}]", make)

    def edit_blocks(self, group: int) -> Callable[..., Any]:
        """(kv_caches, sources [EDIT_CAPACITY], targets, clear) -> kv_caches; donated."""

        def make() -> Any:
            blocks = jax.ShapeDtypeStruct((EDIT_CAPACITY,), jnp.int32)
            clear = jax.ShapeDtypeStruct((EDIT_CAPACITY,), jnp.bool_)
            members = {layer.name for layer in self._functions.groups[group].spec.layers}
            layers = [layer for g in self._functions.groups for layer in g.spec.layers]
            caches = tuple(i for i, layer in enumerate(layers) if layer.name in members)

            def edit(kv_caches: Any, sources: jax.Array, targets: jax.Array, clear: jax.Array) -> Any:
                return edit_blocks(kv_caches, caches, sources, targets, clear)

            return jax.jit(edit, donate_argnums=0).lower(self._kv_caches, blocks, blocks, clear)

        return self._get(f"edit_blocks[{group}]", make)

    def temporaries(self) -> int:
        """Bytes of temporaries of the largest program: the forward over the budget, or the head over all rows."""
        self.forward(self._shapes.tokens[-1])
        self.head(self._shapes.logits[-1])
        return max(compiled.temp_bytes for compiled in self.compiled.values())

    def compile_all(self, token_buckets: tuple[int, ...]) -> Iterator[Compiled]:
        """Compiles what steps of these token buckets can need, largest first, and yields each as it is ready."""
        # A step of T tokens has at most min(T, S_max) logits rows.
        most = min(max(token_buckets, default=1), self._shapes.max_logits)
        last = self._shapes.dispatch(most, most).num_logits
        jobs: list[Callable[[], object]] = [self.enter, self.enter_tables]
        jobs += [partial(self.update_table, g) for g in range(len(self._state.block_tables))]
        jobs += [partial(self.edit_blocks, g) for g in range(len(self._state.block_tables))]
        jobs += [partial(self.forward, t) for t in sorted(token_buckets, reverse=True)]
        jobs += [partial(self.head, s) for s in sorted(self._shapes.logits, reverse=True) if s <= last]
        for job in jobs:
            known = set(self.compiled)
            job()
            for name in self.compiled.keys() - known:
                yield self.compiled[name]

    def _get(self, name: str, make: Callable[[], Any]) -> Callable[..., Any]:
        found = self.compiled.get(name)
        if found is None:
            start = time.perf_counter()
            executable = make().compile()
            analysis = executable.memory_analysis()
            temp = int(getattr(analysis, "temp_size_in_bytes", 0)) if analysis is not None else 0
            found = self.compiled[name] = Compiled(name, executable, time.perf_counter() - start, temp)
            self.late += self.warm
        return found.call


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    sharding = x.sharding if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else None
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)
