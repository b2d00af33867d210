"""A model taken apart and put together: a static definition and a flat tuple of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from models.decoder import Decoder


@dataclass(frozen=True)
class ModelDefinition:
    """All of a model but its parameters. Hashable, so it can be closed over or be a static argument.

    Attributes:
        graphdef: flax's description of the modules.
        treedef: how the parameters nest.
        names: of each parameter, such as "layers.3.attention.qkv.weight".
    """

    graphdef: Any
    treedef: Any
    names: tuple[str, ...]


def split(decoder: Decoder) -> tuple[ModelDefinition, tuple[Array, ...]]:
    """The model's definition, and its parameters in the order of ``ModelDefinition.names``.

    A step takes the flat tuple: JAX passes over it in every call, and a tuple is the cheapest pytree there is.
    """
    graphdef, state = nnx.split(decoder)
    leaves, treedef = jax.tree.flatten_with_path(state)
    names = tuple(".".join(str(key.key) for key in path if hasattr(key, "key")) for path, _ in leaves)
    return ModelDefinition(graphdef, treedef, names), tuple(leaf for _, leaf in leaves)


def merge(definition: ModelDefinition, params: tuple[Array, ...]) -> Decoder:
    """The model with these parameters. Call it inside the traced function: there it costs nothing at run time."""
    return nnx.merge(definition.graphdef, jax.tree.unflatten(definition.treedef, params))
