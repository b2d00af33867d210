"""New weights for a model that is being served: checked against the old ones, so that no executable has to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import Decoder, ModelConfig, split
from models.assign import ParameterLoader
from models.build import ModelDefinition
from models.errors import CheckpointError

_NAMED = 5  # names in a message


def replaced_params(
    definition: ModelDefinition,
    params: tuple[jax.Array, ...],
    config: ModelConfig,
    weights: Decoder | Mapping[str, Any],
) -> tuple[jax.Array, ...]:
    """The parameters, with those that ``weights`` has in place of the old ones; copies, on the same devices.

    Args:
        config: the model's.
        weights: a Decoder; arrays by names of ``ModelDefinition.names``, as many as there are; or all tensors of a
            checkpoint by their Hugging Face names.

    Raises:
        ValueError: a name that there is not, or another shape or dtype; all are named, and nothing has changed.
    """
    if isinstance(weights, Decoder):
        theirs, arrays = split(weights)
        new = dict(zip(theirs.names, arrays, strict=True))
    elif not isinstance(weights, Mapping) or not weights:
        raise ValueError(f"weights must be a Decoder or a mapping of arrays by name, got {weights!r:.100}")
    elif any(str(name).startswith("model.") for name in weights):
        new = _from_checkpoint(config, params[0].dtype, weights)
    else:
        new = dict(weights)
    old = dict(zip(definition.names, params, strict=True))
    problems = [_problem(name, value, old.get(name)) for name, value in new.items()]
    found = [problem for problem in problems if problem]
    if isinstance(weights, Decoder):
        found += [f"{name} is missing" for name in old.keys() - new.keys()]
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise ValueError(f"the weights don't fit the model: {'; '.join(found[:_NAMED])}{more}")
    return tuple(
        jax.device_put(jnp.array(new[name], copy=True), param.sharding) if name in new else param
        for name, param in old.items()
    )


def _problem(name: str, value: Any, old: jax.Array | None) -> str | None:
    if old is None:
        return f"{name} is no parameter of it"
    shape, dtype = np.shape(value), getattr(value, "dtype", None)
    if shape != old.shape:
        return f"{name} is {list(shape)}, expected {list(old.shape)}"
    return f"{name} is {dtype}, expected {old.dtype}" if dtype != old.dtype else None


def _from_checkpoint(config: ModelConfig, dtype: jnp.dtype, weights: Mapping[str, Any]) -> dict[str, jax.Array]:
    loader = ParameterLoader(Decoder(config, dtype=dtype))
    try:
        loader.check({name: np.shape(value) for name, value in weights.items()})
        for name, value in weights.items():
            loader.assign(name, np.asarray(value))
        definition, arrays = split(loader.finish())
    except CheckpointError as error:
        raise ValueError(f"the weights don't fit the model: {error}") from None
    return dict(zip(definition.names, arrays, strict=True))
