"""Calls of executables: what doesn't fit is refused, and the message names each leaf and what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class ArgumentMismatch(TypeError):
    """An argument that an executable was not compiled for. An executable never recompiles."""


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and, of an array on a device, sharding."""
    sharding = x.sharding if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else None
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)


def exact(
    name: str, executable: Callable[..., Any], names: Sequence[str], expected: Sequence[Any]
) -> Callable[..., Any]:
    """``executable``, with errors that say what did not fit.

    Args:
        names: of the arguments.
        expected: their pytrees of ``ShapeDtypeStruct``, as they were compiled for.
    """

    def call(*arguments: Any) -> Any:
        try:
            return executable(*arguments)
        except (TypeError, ValueError) as error:
            found = differences(names, expected, arguments)
            if not found:
                raise
            raise ArgumentMismatch(
                f"{name} was compiled for other arguments, and does not compile again:\n  " + "\n  ".join(found)
            ) from error

    return call


def differences(names: Sequence[str], expected: Sequence[Any], arguments: Sequence[Any]) -> list[str]:
    """One line for each leaf of ``arguments`` that differs from ``expected``, in structure, shape, dtype, weak type or
    sharding.
    """
    if len(arguments) != len(expected):
        return [f"takes {len(expected)} arguments ({', '.join(names)}), got {len(arguments)}"]
    lines = []
    for name, want, got in zip(names, expected, arguments, strict=True):
        wanted, found = dict(_leaves(name, want)), dict(_leaves(name, got))
        lines += [f"{path}: missing (structure)" for path in wanted.keys() - found.keys()]
        lines += [f"{path}: not expected (structure)" for path in found.keys() - wanted.keys()]
        structure, expected_structure = jax.tree.structure(got), jax.tree.structure(want)
        if wanted.keys() == found.keys() and str(structure) != str(expected_structure):
            lines.append(f"{name}: structure {structure}, expected {expected_structure}")
        for path in wanted.keys() & found.keys():
            if differs := _leaf_differences(wanted[path], found[path]):
                lines.append(f"{path}: {'; '.join(differs)}")
    return sorted(lines)


def _leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def _leaf_differences(want: jax.ShapeDtypeStruct, got: Any) -> list[str]:
    shape, dtype = np.shape(got), jnp.result_type(got)
    lines = []
    if shape != want.shape:
        lines.append(f"shape {shape}, expected {want.shape}")
    if dtype != want.dtype:
        lines.append(f"dtype {dtype}, expected {want.dtype}")
    if (weak := bool(getattr(got, "weak_type", isinstance(got, int | float | complex)))) != bool(want.weak_type):
        lines.append(f"weak type {weak}, expected {bool(want.weak_type)}")
    if isinstance(got, jax.Array) and want.sharding is not None:
        if not got.sharding.is_equivalent_to(want.sharding, len(want.shape)):
            lines.append(f"sharding {got.sharding}, expected {want.sharding}")
    return lines
