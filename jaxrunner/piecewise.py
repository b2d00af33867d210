"""Mode PIECEWISE: a forward made of small executables, called one after another by the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxrunner.shapes import StepShape, StepShapes
from jaxrunner.step import ForwardState, StepFunctions, unpack
from jaxrunner.step.pieces import StepPieces


class Get(Protocol):
    """How an executable is had: by name, or made of a function and its abstract arguments."""

    def __call__(
        self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any], donate: tuple[int, ...]
    ) -> Callable[..., Any]: ...


class PiecewiseForwards:
    """Forwards of all token buckets T and rows R. Dense pieces are compiled per T, attention per T and R.

    A step calls 2 L + 2 executables for L layers, where FULL calls one: each call costs the host some microseconds.
    In return a bucket compiles a few pieces instead of L layers, and attention's rows are padded on their own.
    """

    def __init__(
        self, functions: StepFunctions, shapes: StepShapes, params: Any, kv_caches: Any, state: ForwardState, get: Get
    ) -> None:
        self._functions, self._shapes, self._get = functions, shapes, get
        self._params, self._kv_caches, self._state = params, kv_caches, state

    @cached_property
    def _pieces(self) -> StepPieces:
        return StepPieces.of(self._functions)

    def forward(self, shape: StepShape) -> Callable[..., Any]:
        """(params, kv_caches, state, buffer) -> (hidden, head_inputs, kv_caches, state, all hidden); caches and state
        donated.
        """
        pieces, get, state = self._pieces, self._get, self._state
        layout = self._shapes.layout(shape)
        t, r = layout.num_tokens, shape.num_reqs
        last = len(pieces.layers) - 1
        buffer = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        places = {name: pieces.parameters(*parts) for name, parts in _parts(last).items()}
        leaves = {name: tuple(self._params[i] for i in at) for name, at in places.items()}

        def begin_piece(leaves: Any, state: ForwardState, buffer: jax.Array) -> Any:
            return pieces.begin(leaves, state, unpack(buffer, layout))

        def metadata_piece(state: ForwardState, buffer: jax.Array) -> Any:
            return pieces.metadata(state, unpack(buffer, layout), r)

        arguments = {"leaves": leaves["begin"], "state": state, "buffer": buffer}
        begin = get(f"begin[{t}]", begin_piece, arguments, (1,))
        x, qkv, tables, at, _, _ = jax.eval_shape(begin_piece, *arguments.values())
        arguments = {"state": state, "buffer": buffer}
        metadata = get(f"metadata[{t}x{r}]", metadata_piece, arguments, ())
        of_groups = jax.eval_shape(metadata_piece, *arguments.values())

        attends, betweens, names = [], [], dict[Any, str]()
        for index, layer in enumerate(pieces.layers):
            kind = pieces.kind(index)

            def attend_piece(cache: Any, qkv: Any, metadata: Any, slots: Any, kind: Any = kind) -> Any:
                return pieces.attend(kind, cache, qkv, metadata, slots)

            cache, (facts, slots) = self._kv_caches[index], of_groups[layer.group]
            arguments = {"cache": cache, "qkv": qkv, "metadata": facts, "slots": slots}
            name = names.setdefault((kind, _key(cache)), f"attend[{t}x{r}, layer {index}]")
            attends.append(get(name, attend_piece, arguments, (0,)))
            attended, _ = jax.eval_shape(attend_piece, *arguments.values())
            if index == last:
                break

            def between_piece(leaves: Any, x: Any, attended: Any, tables: Any, index: int = index) -> Any:
                return pieces.between(index, leaves, x, attended, tables)

            own = leaves[f"between {index}"]
            arguments = {"leaves": own, "x": x, "attended": attended, "tables": tables}
            key = (kind, pieces.kind(index + 1), _key(own))
            betweens.append(get(names.setdefault(key, f"between[{t}, layer {index}]"), between_piece, arguments, (1,)))
            x, qkv = jax.eval_shape(between_piece, *arguments.values())

        arguments = {"leaves": leaves["end"], "x": x, "attended": attended, "at": at}
        end = get(f"end[{t}]", pieces.end, arguments, ())
        groups = [layer.group for layer in pieces.layers]
        return _chain(places, begin, metadata, attends, betweens, end, groups)


def _parts(last: int) -> dict[str, tuple[str, ...]]:
    """The parts of the model that each piece has parameters of."""
    between = {f"between {i}": (f"layers.{i}", f"layers.{i + 1}") for i in range(last)}
    return {"begin": ("embed_tokens", "layers.0"), **between, "end": (f"layers.{last}", "norm")}


def _chain(
    places: Mapping[str, tuple[int, ...]],
    begin: Callable[..., Any],
    metadata: Callable[..., Any],
    attends: list[Callable[..., Any]],
    betweens: list[Callable[..., Any]],
    end: Callable[..., Any],
    groups: list[int],
) -> Callable[..., Any]:
    last = len(attends) - 1

    def forward(params: Any, kv_caches: Any, state: ForwardState, buffer: Any) -> Any:
        own = {name: tuple([params[i] for i in at]) for name, at in places.items()}
        x, qkv, tables, at, head_inputs, state = begin(own["begin"], state, buffer)
        facts = metadata(state, buffer)
        caches = []
        for index, attend in enumerate(attends):
            attended, cache = attend(kv_caches[index], qkv, *facts[groups[index]])
            caches.append(cache)
            if index < last:
                x, qkv = betweens[index](own[f"between {index}"], x, attended, tables)
        hidden, all_hidden = end(own["end"], x, attended, at)
        return hidden, head_inputs, tuple(caches), state, all_hidden

    return forward


def _key(tree: Any) -> tuple[Any, ...]:
    return tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))
