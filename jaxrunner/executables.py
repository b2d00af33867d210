"""Compiled programs of a runner, one a shape: made ahead of time, so that nothing recompiles behind one's back."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.block_edits import EDIT_CAPACITY
from jaxrunner.compilation_counter import CompilationCounter
from jaxrunner.compiled import Compiled
from jaxrunner.exact_call import abstract
from jaxrunner.executable_store import ExecutableStore
from jaxrunner.piecewise import PiecewiseForwards
from jaxrunner.sampling_columns import RECORD_WORDS
from jaxrunner.saved_executables import SavedExecutables, save_executables
from jaxrunner.shapes import ExecutionMode, StepShape, StepShapes, round_up
from jaxrunner.step import (
    DeviceState,
    ForwardState,
    StepFunctions,
    edit_blocks,
    enter_custom,
    enter_requests,
    enter_tables,
    pool_rows,
    set_allowed,
    unpack,
    update_block_table,
)

ENTER_CAPACITY = 64  # requests whose records one upload carries
MASK_CAPACITY = 64  # requests whose allowed tokens one upload carries
PROMPT_CHUNK = 256  # rows of prompt log probabilities that go through the head at a time
TABLE_CAPACITY = 4096  # block-table cells one upload ahead of a step carries


class StepExecutables(ExecutableStore):
    """The programs of a step, each compiled when it is first asked for, or ahead of time.

    Args:
        params, kv_caches, state: arrays or abstract ones, with the shapes, dtypes and shardings of every call.
        counter: hears of JAX's compilations.

    Attributes:
        mask_capacity: requests whose allowed tokens one upload carries.
        prompt_chunk: rows that go through the head at a time for the log probabilities of prompts.
    """

    def __init__(
        self,
        functions: StepFunctions,
        shapes: StepShapes,
        params: Any,
        kv_caches: Any,
        state: DeviceState,
        counter: CompilationCounter | None = None,
    ) -> None:
        super().__init__(counter)
        self._functions, self._shapes = functions, shapes
        self._params, self._kv_caches, self._state = (jax.tree.map(abstract, a) for a in (params, kv_caches, state))
        of_forward = self._state.of_forward
        self._pieces = PiecewiseForwards(functions, shapes, self._params, self._kv_caches, of_forward, self._get)
        self._forwards: dict[tuple[ExecutionMode, int, int], Callable[..., Any]] = {}
        self._heads: dict[str, Callable[..., Any]] = {}
        names = functions.graphdef.names
        self._head_places = [i for i, name in enumerate(names) if name.startswith(("embed_tokens.", "lm_head."))]
        self.mask_capacity = min(MASK_CAPACITY, functions.max_num_reqs)
        self.prompt_chunk = min(PROMPT_CHUNK, shapes.tokens[-1])

    def forward(self, shape: StepShape) -> Callable[..., Any]:
        """(params, kv_caches, state, buffer) -> (hidden, head_inputs, kv_caches, state, all hidden); caches and state
        donated.

        The executables themselves get and give what a forward knows of the state: a call costs by the array.
        """
        key = (shape.mode, shape.num_tokens, shape.num_reqs)
        found = self._forwards.get(key)
        if found is None:
            make = self._pieces.forward if shape.mode is ExecutionMode.PIECEWISE else self._whole_forward
            run = make(shape)

            def forward(params: Any, kv_caches: Any, state: DeviceState, buffer: Any) -> Any:
                hidden, head_inputs, kv_caches, part, all_hidden = run(params, kv_caches, state.of_forward, buffer)
                state = replace(state, block_tables=part.block_tables, last_sampled=part.last_sampled)
                return hidden, head_inputs, kv_caches, state, all_hidden

            found = self._forwards[key] = forward
        return found

    def _whole_forward(self, shape: StepShape) -> Callable[..., Any]:
        layout = self._shapes.layout(shape)

        def forward(params: Any, kv_caches: Any, state: ForwardState, buffer: jax.Array) -> Any:
            return self._functions.forward(params, kv_caches, state, unpack(buffer, layout), return_all_hidden=True)

        t, r = layout.num_tokens, layout.num_reqs
        arguments = {
            "params": self._params,
            "kv_caches": self._kv_caches,
            "state": self._state.of_forward,
            "buffer": jax.ShapeDtypeStruct((layout.size,), jnp.int32),
        }
        name = f"forward[{t}]" if r == self._shapes.rows(t) else f"forward[{t}x{r}]"
        return self._get(name, forward, arguments, (1, 2))

    def head(self, num_rows: int, *, return_logits: bool = False) -> Callable[..., Any]:
        """(params, state, hidden, head_inputs) -> (sampled, state[, logits], (logprobs, given)); state donated.

        The executable itself gets its own parameters and leaves block tables and sampling columns where they are: a
        call costs by the array, used or not.
        """
        name = f"head[{num_rows}{', logits' if return_logits else ''}]"
        found = self._heads.get(name)
        if found is not None:
            return found

        whole, places = self._state, self._head_places

        def head(own: Any, sampling: Any, changing: Any, hidden: jax.Array, head_inputs: Any) -> Any:
            params: list[Any] = [None] * len(self._params)
            for place, array in zip(places, own, strict=True):
                params[place] = array
            sampled, state, *more = self._functions.head_and_sample(
                tuple(params),
                replace(whole, sampling=sampling, **changing),
                hidden,
                head_inputs,
                num_rows=num_rows,
                return_logits=return_logits,
                return_logprobs=True,
            )
            return sampled, _changed_by_head(state), *more

        hidden, head_inputs = self._head_arguments
        arguments = {
            "params": tuple(self._params[place] for place in places),
            "sampling": whole.sampling,
            "state": _changed_by_head(whole),
            "hidden": hidden,
            "head_inputs": head_inputs,
        }
        call = self._get(name, head, arguments, (2,))

        def found_head(params: Any, state: DeviceState, hidden: jax.Array, head_inputs: Any) -> Any:
            own = tuple([params[place] for place in places])
            sampled, changed, *more = call(own, state.sampling, _changed_by_head(state), hidden, head_inputs)
            return sampled, replace(state, **changed), *more

        self._heads[name] = found_head
        return found_head

    @cached_property
    def _head_arguments(self) -> tuple[Any, Any]:
        """Shapes of the hidden states and of the HeadInputs that every forward hands to the head."""
        layout = self._shapes.layouts[self._shapes.tokens[0]]
        buffer = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        hidden, head_inputs, *_ = jax.eval_shape(
            lambda p, c, s, b: self._functions.forward(p, c, s, unpack(b, layout)),
            self._params, self._kv_caches, self._state.of_forward, buffer,
        )  # fmt: skip
        return hidden, head_inputs

    def hidden_rows(self, num_tokens: int) -> Callable[..., Any]:
        """(all hidden [num_tokens, E], rows [prompt_chunk]) -> hidden [prompt_chunk, E]."""
        hidden = self._head_arguments[0]
        arguments = {
            "all_hidden": jax.ShapeDtypeStruct((num_tokens, hidden.shape[1]), hidden.dtype),
            "rows": jax.ShapeDtypeStruct((self.prompt_chunk,), jnp.int32),
        }
        return self._get(f"hidden_rows[{num_tokens}]", _rows, arguments, ())

    def pool(self, num_tokens: int) -> Callable[..., Any]:
        """(all hidden [num_tokens, E], starts [R+1]) -> float32 [R, 2, E]: sum and last hidden state of each row."""
        hidden = self._head_arguments[0]
        arguments = {
            "all_hidden": jax.ShapeDtypeStruct((num_tokens, hidden.shape[1]), hidden.dtype),
            "starts": jax.ShapeDtypeStruct((self._functions.max_num_reqs + 1,), jnp.int32),
        }
        return self._get(f"pool[{num_tokens}]", pool_rows, arguments, ())

    def prompt_logprobs(self) -> Callable[..., Any]:
        """(params, hidden [prompt_chunk, E], targets [prompt_chunk]) -> packed log probabilities."""
        hidden = self._head_arguments[0]
        arguments = {
            "params": self._params,
            "hidden": jax.ShapeDtypeStruct((self.prompt_chunk, hidden.shape[1]), hidden.dtype),
            "targets": jax.ShapeDtypeStruct((self.prompt_chunk,), jnp.int32),
        }
        return self._get("prompt_logprobs", self._functions.prompt_logprobs, arguments, ())

    def enter(self) -> Callable[..., Any]:
        """(state, indices [ENTER_CAPACITY], records) -> state; donated."""
        arguments = {
            "state": self._state,
            "indices": jax.ShapeDtypeStruct((ENTER_CAPACITY,), jnp.int32),
            "records": jax.ShapeDtypeStruct((ENTER_CAPACITY, RECORD_WORDS), jnp.int32),
        }
        return self._get("enter", enter_requests, arguments, (0,))

    def enter_tables(self) -> Callable[..., Any]:
        """(state, index, words [TableSizes.words]) -> state; donated."""

        def enter(state: DeviceState, index: jax.Array, words: jax.Array) -> DeviceState:
            assert state.tables is not None
            return replace(state, tables=enter_tables(state.tables, index, words))

        words = sum(math.prod(table.shape[1:]) for table in jax.tree.leaves(self._state.tables))
        arguments = {
            "state": self._state,
            "index": jax.ShapeDtypeStruct((), jnp.int32),
            "words": jax.ShapeDtypeStruct((words,), jnp.int32),
        }
        return self._get("enter_tables", enter, arguments, (0,))

    def set_allowed(self) -> Callable[..., Any]:
        """(state, indices [mask_capacity], masks [mask_capacity, V/32]) -> state; donated."""

        def set_masks(state: DeviceState, indices: jax.Array, masks: jax.Array) -> DeviceState:
            assert state.tables is not None
            return replace(state, tables=set_allowed(state.tables, indices, masks))

        words = self._state.tables.allowed.shape[1]
        arguments = {
            "state": self._state,
            "indices": jax.ShapeDtypeStruct((self.mask_capacity,), jnp.int32),
            "masks": jax.ShapeDtypeStruct((self.mask_capacity, words), jnp.int32),
        }
        return self._get("set_allowed", set_masks, arguments, (0,))

    def enter_custom(self, k: int) -> Callable[..., Any]:
        """(state, index, columns of processor k) -> state; donated."""

        def enter(state: DeviceState, index: jax.Array, row: Any) -> DeviceState:
            return replace(state, custom=enter_custom(state.custom, k, index, row))

        row = {name: jax.ShapeDtypeStruct(c.shape[1:], c.dtype) for name, c in self._state.custom[k].items()}
        arguments = {"state": self._state, "index": jax.ShapeDtypeStruct((), jnp.int32), "row": row}
        return self._get(f"enter_custom[{k}]", enter, arguments, (0,))

    def update_table(self, group: int) -> Callable[..., Any]:
        """(state, cells [TABLE_CAPACITY], values) -> state; donated."""

        def update(state: DeviceState, cells: jax.Array, values: jax.Array) -> DeviceState:
            return update_block_table(state, group, cells, values)

        cells = jax.ShapeDtypeStruct((TABLE_CAPACITY,), jnp.int32)
        arguments = {"state": self._state, "cells": cells, "values": cells}
        return self._get(f"update_table[{group}]", update, arguments, (0,))

    def edit_blocks(self, group: int) -> Callable[..., Any]:
        """(kv_caches, sources [EDIT_CAPACITY], targets, clear) -> kv_caches; donated."""

        members = {layer.name for layer in self._functions.groups[group].spec.layers}
        layers = [layer for g in self._functions.groups for layer in g.spec.layers]
        caches = tuple(i for i, layer in enumerate(layers) if layer.name in members)

        def edit(kv_caches: Any, sources: jax.Array, targets: jax.Array, clear: jax.Array) -> Any:
            return edit_blocks(kv_caches, caches, sources, targets, clear)

        blocks = jax.ShapeDtypeStruct((EDIT_CAPACITY,), jnp.int32)
        clear = jax.ShapeDtypeStruct((EDIT_CAPACITY,), jnp.bool_)
        arguments = {"kv_caches": self._kv_caches, "sources": blocks, "targets": blocks, "clear": clear}
        return self._get(f"edit_blocks[{group}]", edit, arguments, (0,))

    def temporaries(self) -> int:
        """Bytes of temporaries of the largest program: the forward over the budget, or the head over all rows."""
        budget = self._shapes.tokens[-1]
        self.forward(self._shapes.dispatch(budget, 1))
        self.head(self._shapes.logits[-1])
        return max(compiled.temp_bytes for compiled in self.compiled.values())

    def jobs(self, token_buckets: tuple[int, ...]) -> list[Callable[[], object]]:
        """What steps of up to these token buckets can need, each a call that compiles it; the largest first."""
        shapes = self._shapes
        # A step of T tokens has at most min(T, S_max) logits rows.
        most = min(max(token_buckets, default=1), shapes.max_logits)
        last = round_up(most, shapes.logits)
        wanted = [partial(self.forward, shape) for shape in shapes.forwards(token_buckets)]
        wanted += [partial(self.head, s) for s in sorted(shapes.logits, reverse=True) if s <= last]
        wanted += [
            partial(make, g)
            for g in range(len(self._state.block_tables))
            for make in (self.update_table, self.edit_blocks)
        ]
        wanted += [partial(make, t) for t in token_buckets for make in (self.hidden_rows, self.pool)]
        wanted += [partial(self.enter_custom, k) for k in range(len(self._state.custom))]
        return [*wanted, self.prompt_logprobs, self.enter, self.enter_tables, self.set_allowed]

    def compile_all(self, token_buckets: tuple[int, ...], workers: int = 1) -> Iterator[Compiled]:
        """Compiles what steps of these token buckets can need, largest first, and yields each as it is ready.

        Args:
            workers: threads. XLA compiles outside Python's lock, tracing stays one at a time.
        """
        told = set(self.compiled)

        def news() -> Iterator[Compiled]:
            for name in list(self.compiled):
                if name not in told:
                    told.add(name)
                    yield self.compiled[name]

        jobs = self.jobs(token_buckets)
        if workers == 1:
            for job in jobs:
                job()
                yield from news()
            return
        with ThreadPoolExecutor(workers, thread_name_prefix="compile") as pool:
            try:
                for future in as_completed([pool.submit(job) for job in jobs]):
                    future.result()
                    yield from news()
            finally:  # after a failure or Ctrl-C only what has begun is waited for
                pool.shutdown(wait=False, cancel_futures=True)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Keeps all executables so far in a folder, for ``load`` by a run with the same model, limits and device."""
        return save_executables(Path(folder), self.compiled, self._fingerprint())

    def load(self, folder: str | os.PathLike[str]) -> int:
        """From now on takes executables from there where it has them; returns how many there are.

        The folder's files are unpickled: load only what you or somebody you trust has saved.

        Raises:
            SavedExecutablesError: they are of another device kind, number of processors, JAX version, model, limits or
                project version.
        """
        self.saved = SavedExecutables(Path(folder), self._fingerprint())
        return len(self.saved.names)

    def _fingerprint(self) -> Any:
        functions = self._functions
        groups = [(group.spec, group.implementation.name) for group in functions.groups]
        arguments = jax.tree.map(lambda x: (x.shape, x.dtype.name), (self._params, self._kv_caches, self._state))
        limits = functions.max_num_reqs, functions.max_logits, functions.num_logprobs
        return (functions.graphdef, groups, limits, self._shapes, arguments)


def _changed_by_head(state: DeviceState) -> dict[str, Any]:
    return {"last_sampled": state.last_sampled, "tables": state.tables, "custom": state.custom}


def _rows(hidden: jax.Array, rows: jax.Array) -> jax.Array:
    return hidden[rows]
