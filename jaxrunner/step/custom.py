"""Logits processors of the user inside the head: each a branch, its state by request index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxrunner.sampling_columns import FIRST_CUSTOM

Columns = dict[str, Array]


class Processor(Protocol):
    """What is needed here of a ``jaxrunner.logits_processors.LogitsProcessor``."""

    @property
    def apply(self) -> Callable[[Array, Mapping[str, Any], Array], Array]: ...

    @property
    def update(self) -> Callable[[Mapping[str, Any], Array, Array], Mapping[str, Any]]: ...


def apply_custom(
    processors: Sequence[Processor],
    states: tuple[Columns, ...],
    logits: Float32[Array, "S V"],
    index: Int32[Array, "S"],
    position: Int32[Array, "S"],
    flags: Int32[Array, ""],
) -> Float32[Array, "S V"]:
    """Logits after all processors, in their order."""
    for k, (processor, state) in enumerate(zip(processors, states, strict=True)):

        def change(x: Array, processor: Processor = processor, state: Columns = state) -> Array:
            changed = processor.apply(x, _rows(state, index), position)
            return jnp.where(state["used"][index][:, None] != 0, changed, x)

        logits = jax.lax.cond((flags & (FIRST_CUSTOM << k)) != 0, change, lambda x: x, logits)
    return logits


def update_custom(
    processors: Sequence[Processor],
    states: tuple[Columns, ...],
    target: Int32[Array, "S"],
    token: Int32[Array, "S"],
    position: Int32[Array, "S"],
    flags: Int32[Array, ""],
) -> tuple[Columns, ...]:
    """States after the sampled tokens; a target past the end is dropped."""
    out = []
    for k, (processor, state) in enumerate(zip(processors, states, strict=True)):

        def change(state: Columns, processor: Processor = processor) -> Columns:
            new = processor.update(_rows(state, jnp.minimum(target, state["used"].shape[0] - 1)), token, position)
            return state | {
                name: state[name].at[target].set(value.astype(state[name].dtype), mode="drop")
                for name, value in new.items()
            }

        out.append(jax.lax.cond((flags & (FIRST_CUSTOM << k)) != 0, change, lambda s: s, state))
    return tuple(out)


def enter_custom(
    states: tuple[Columns, ...], k: int, index: Int32[Array, ""], row: Mapping[str, Array]
) -> tuple[Columns, ...]:
    """A request's columns of processor ``k`` go to its index."""
    changed = {name: states[k][name].at[index].set(value) for name, value in row.items()}
    return (*states[:k], changed, *states[k + 1 :])


def _rows(state: Columns, index: Int32[Array, "S"]) -> Columns:
    return {name: column[index] for name, column in state.items() if name != "used"}
