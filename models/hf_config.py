"""Reads a Hugging Face config.json, in the spelling of transformers 4 or 5, into ModelConfig's own words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from models.hf_rope import read_rope
from models.sizes import LIMITS, check_number, check_size

# What transformers assumes where a config.json says nothing. An absent key without an entry here is an error.
_COMMON: dict[str, Any] = {
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN = _COMMON | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {"num_key_value_heads": None, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": _COMMON
    | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    # The published multimodal configurations name only what differs from these.
    "gemma3": _COMMON
    | {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
}
_MODEL_TYPES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_hf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the ModelConfig that a config.json describes.

    Raises:
        ValueError: see ``ModelConfig.from_hf``.
    """
    architecture, config = _architecture(config)
    reader = _Reader(config, _DEFAULTS[architecture])
    gemma = architecture == "gemma3"
    hidden_size = reader.size("hidden_size")
    num_heads = reader.size("num_attention_heads", LIMITS["num_heads"])
    head_dim = _head_dim(reader, hidden_size, num_heads)
    max_positions = reader.size("max_position_embeddings")
    num_layers = reader.size("num_hidden_layers", LIMITS["num_layers"])
    activation_key = "hidden_activation" if gemma else "hidden_act"
    all_biased = architecture != "mistral" and reader.flag("attention_bias")
    rope, local_rope = read_rope(config, max_positions, gemma)
    windows = _layer_windows(reader, architecture, num_layers)
    return {
        "architecture": architecture,
        "vocab_size": reader.size("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.size("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads
        if reader.get("num_key_value_heads") is None
        else reader.size("num_key_value_heads", LIMITS["num_kv_heads"]),
        "head_dim": head_dim,
        "rms_norm_eps": reader.number("rms_norm_eps"),
        "max_position_embeddings": max_positions,
        "rope": rope,
        "local_rope": local_rope,
        "layer_windows": windows,
        "activation": reader.choice(activation_key, _ACTIVATIONS),
        "qkv_bias": all_biased or architecture == "qwen2",
        "o_bias": all_biased and architecture != "qwen2",
        "mlp_bias": architecture == "llama" and reader.flag("mlp_bias"),
        "qk_norm": architecture in ("qwen3", "gemma3"),
        "sandwich_norms": gemma,
        "norm_plus_one": gemma,
        "embed_scale": math.sqrt(hidden_size) if gemma else None,
        "attention_scale": (reader.number("query_pre_attn_scalar") if gemma else head_dim) ** -0.5,
        "attn_soft_cap": reader.optional_number("attn_logit_softcapping") if gemma else None,
        "logits_soft_cap": reader.optional_number("final_logit_softcapping") if gemma else None,
        "tie_word_embeddings": reader.flag("tie_word_embeddings"),
        "eos_token_ids": reader.token_ids("eos_token_id"),
        "bos_token_id": next(iter(reader.token_ids("bos_token_id")), None),
        "pad_token_id": next(iter(reader.token_ids("pad_token_id")), None),
    }


def _architecture(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Which family, and the part of the configuration that describes the language model."""
    known = f"supported: {', '.join(_CLASSES)}"
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"architectures is {classes!r}, expected a list of class names")
    unknown = [name for name in classes if name not in _CLASSES]
    if unknown:
        raise ValueError(f"architecture {unknown[0]!r} isn't supported; {known}")
    model_type = config.get("model_type")
    text = config.get("text_config")
    if model_type == "gemma3" and isinstance(text, Mapping):
        # What is said of the whole holds for the text model, unless that says otherwise itself.
        shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
        config = {key: config[key] for key in shared if config.get(key) is not None} | dict(text)
        model_type = config.setdefault("model_type", "gemma3_text")
    if model_type is None and classes:
        return _supported(_CLASSES[classes[0]], config)
    if not isinstance(model_type, str) or model_type not in _MODEL_TYPES:
        raise ValueError(f"model_type {model_type!r} isn't supported; {known}")
    return _supported(_MODEL_TYPES[model_type], config)


def _supported(architecture: str, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"the weights are quantised ({method!r}), which isn't supported; use an unquantised checkpoint"
        )
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention isn't supported: a decoder looks back only")
    return architecture, config


def _head_dim(reader: _Reader, hidden_size: int, num_heads: int) -> int:
    if reader.get("head_dim") is not None:
        return reader.size("head_dim")
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size {hidden_size} isn't a multiple of num_attention_heads {num_heads}, and there is no head_dim"
        )
    return hidden_size // num_heads


def _layer_windows(reader: _Reader, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window: none, the same everywhere (Mistral), or only where the layer's type says so."""
    everywhere_full = (None,) * num_layers
    if architecture == "llama" or (architecture == "mistral" and reader.get("sliding_window") is None):
        return everywhere_full
    if architecture in ("qwen2", "qwen3") and not (reader.flag("use_sliding_window") and reader.get("sliding_window")):
        return everywhere_full  # whatever layer_types say
    window = reader.size("sliding_window", LIMITS["max_position_embeddings"])
    if architecture == "mistral":
        return (window,) * num_layers
    types = reader.get("layer_types", None)
    if types is None:
        if architecture == "gemma3":
            # Some files have it under a private name.
            name = "_sliding_window_pattern" if "_sliding_window_pattern" in reader.config else "sliding_window_pattern"
            pattern = reader.size(name, LIMITS["max_position_embeddings"])
            local = [(index + 1) % pattern != 0 for index in range(num_layers)]
        else:
            first = reader.count("max_window_layers")
            local = [index >= first for index in range(num_layers)]
    else:
        local = _local_layers(types, num_layers)
    return tuple(window if is_local else None for is_local in local)


def _local_layers(types: Any, num_layers: int) -> list[bool]:
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"layer_types is {types!r}, expected a list of {num_layers} (num_hidden_layers) entries")
    known = ("full_attention", "sliding_attention")
    unknown = [kind for kind in types if kind not in known]
    if unknown:
        raise ValueError(f"layer type {unknown[0]!r} isn't supported; supported: {', '.join(known)}")
    return [kind == "sliding_attention" for kind in types]


_REQUIRED = object()


class _Reader:
    """Typed access to a config.json, which can hold anything under any key."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.config, self.defaults = config, defaults

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """As it stands there; null stays None. Absent: the architecture's default."""
        value = self.config.get(key, self.defaults.get(key, default))
        if value is _REQUIRED:
            raise ValueError(f"the configuration lacks {key!r}, which a model can't be built without")
        return value

    def size(self, key: str, limit: int | None = None) -> int:
        return check_size(self.get(key), LIMITS[key] if limit is None else limit, key)

    def count(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{key} is {value!r}, expected a whole number, 0 or more")
        return value

    def number(self, key: str) -> float:
        return check_number(self.get(key), key)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        value = self.defaults[key] if value is None else value
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {value!r}, expected true or false")
        return value

    def choice(self, key: str, choices: Mapping[str, str]) -> str:
        value = self.get(key)
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{key} {value!r} isn't supported; supported: {', '.join(choices)}")
        return choices[value]

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id, a list of ids or null, as a tuple."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in ids):
            raise ValueError(f"{key} is {value!r}, expected a token id, a list of them, or null")
        return tuple(ids)
