"""Reads what a Hugging Face config.json says about rotary embeddings, in any of its spellings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.rope import LinearScaling, Llama3Scaling, RopeConfig
from models.sizes import LIMITS, check_number, check_size

_TYPES = ("default", "linear", "llama3")
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def read_rope(
    config: Mapping[str, Any], max_positions: int, gemma: bool = False
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotation of a model's layers, and that of its windowed layers where it's another.

    transformers 4 wrote ``rope_theta`` and ``rope_scaling``, and for Gemma 3 ``rope_local_base_freq``. transformers 5
    writes all into ``rope_parameters``: one dict, or one per layer type. What a dict says goes before the old keys.

    Args:
        max_positions: the original context length, where a scaling that needs one doesn't give it.
        gemma: two bases are the rule; scaling is of the global one.

    Raises:
        ValueError: a rope type that isn't supported (the message lists what is), or a number that makes no sense.
    """
    scaling, parameters = _mapping(config, "rope_scaling"), _mapping(config, "rope_parameters")
    by_type = {kind: _mapping(parameters, kind) for kind in (_GLOBAL, _LOCAL) if kind in parameters}
    theta = config.get("rope_theta", 1e6 if gemma else 1e4)
    if by_type or gemma:
        global_parameters = by_type.get(_GLOBAL, {}) if by_type else parameters
        local_parameters = by_type.get(_LOCAL, {})
        local_theta = config.get("rope_local_base_freq", 1e4) if gemma else theta
        local = _rope(local_parameters, local_theta, config, max_positions)
    else:
        global_parameters, local = parameters, None
    rope = _rope(global_parameters | scaling, theta, config, max_positions)
    return rope, None if local == rope else local


def _mapping(of: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = of.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r}, expected an object or null")
    read = dict(value or {})
    if "type" in read:  # transformers' spelling before 4.43
        read.setdefault("rope_type", read.pop("type"))
    return read


def _rope(parameters: Mapping[str, Any], theta: Any, config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor {part!r} isn't supported: whole heads are rotated")
    kind = parameters.get("rope_type") or "default"
    theta = check_number(parameters.get("rope_theta", theta), "rope_theta")
    match kind:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, LinearScaling(check_number(parameters.get("factor"), "rope factor")))
        case "llama3":
            return RopeConfig(theta, _llama3(parameters, max_positions))
        case _:
            raise ValueError(f"rope type {kind!r} isn't supported; supported: {', '.join(_TYPES)}")


def _llama3(parameters: Mapping[str, Any], max_positions: int) -> Llama3Scaling:
    factor, low, high = (
        check_number(parameters.get(key), f"llama3 rope {key}")
        for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = parameters.get("original_max_position_embeddings", max_positions)
    original = check_size(original, LIMITS["max_position_embeddings"], "rope original_max_position_embeddings")
    if high <= low:
        raise ValueError(f"llama3 rope has high_freq_factor {high}, expected more than low_freq_factor {low}")
    return Llama3Scaling(factor, low, high, original)
