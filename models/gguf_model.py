"""A GGUF file's configuration in the words of a Hugging Face config.json, so that one reader of those serves both."""

import math
from typing import Any, TypeVar

import numpy as np

from models.errors import CheckpointError
from models.gguf_file import GGUFFile

_T = TypeVar("_T")

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

ROPE_FACTORS = "rope_freqs.weight"


class Fields:
    """Typed access to a file's metadata: a hostile file can put any type under any key."""

    def __init__(self, file: GGUFFile):
        self.path, self.metadata = file.path, file.metadata

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """The value of `key`, which must be a `kind` (an int also serves as a float); absent: `default` or an error."""
        value = self.metadata.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: the metadata lacks {key!r}, which this model can't be read without")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.path}: {key!r} is {value!r}, expected a value of type {kind.__name__}")
        return value

    def optional(self, key: str, kind: type[_T]) -> _T | None:
        return self.get(key, kind) if key in self.metadata else None

    def one_number(self, key: str, default: int | None = None) -> int:
        """A count that some files store per layer: it must be the same for all."""
        value = self.metadata.get(key)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            if (value != value[0]).any():
                raise CheckpointError(f"{self.path}: {key!r} differs from layer to layer, which isn't supported")
            return int(value[0])
        return self.get(key, int, default)


def architecture(file: GGUFFile) -> str:
    """The file's architecture, if it's one that can be loaded.

    Raises:
        CheckpointError: another one (the message names it), or a variant of it with experts.
    """
    fields = Fields(file)
    name = fields.get("general.architecture", str)
    if name not in MODEL_TYPES:
        raise CheckpointError(
            f"{file.path}: architecture {name!r} isn't supported; GGUF files are read for {', '.join(MODEL_TYPES)}"
        )
    if fields.get(f"{name}.expert_count", int, 0) > 0:
        raise CheckpointError(f"{file.path}: a {name} with experts (mixture of experts) isn't supported")
    return name


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The file's configuration in the words of a config.json.

    Raises:
        CheckpointError: something is missing, of a wrong type, or names a variant that isn't supported.
    """
    arch, fields = architecture(file), Fields(file)

    def key(name: str) -> str:
        return f"{arch}.{name}"

    heads = fields.one_number(key("attention.head_count"))
    hidden = fields.get(key("embedding_length"), int)
    if heads < 1:
        raise CheckpointError(f"{file.path}: {key('attention.head_count')!r} is {heads}, expected at least 1")
    head_dim = fields.get(key("attention.key_length"), int, hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key(name), int, head_dim) != head_dim:
            raise CheckpointError(f"{file.path}: {key(name)!r} differs from the head size {head_dim}: not supported")
    theta = _short(fields.get(key("rope.freq_base"), float, 1e6 if arch == "gemma3" else 1e4))
    config: dict[str, Any] = {
        "model_type": MODEL_TYPES[arch],
        "vocab_size": _vocab_size(file, arch),
        "hidden_size": hidden,
        "intermediate_size": fields.one_number(key("feed_forward_length")),
        "num_hidden_layers": fields.get(key("block_count"), int),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.one_number(key("attention.head_count_kv"), heads),
        "head_dim": head_dim,
        "rms_norm_eps": _short(fields.get(key("attention.layer_norm_rms_epsilon"), float)),
        "max_position_embeddings": fields.get(key("context_length"), int),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, arch, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": fields.optional("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": fields.optional("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": fields.optional("tokenizer.ggml.padding_token_id", int),
    }
    window = fields.optional(key("attention.sliding_window"), int)
    if arch == "gemma3":
        config |= _gemma3(file, config, window)
    else:
        config["hidden_act"] = "silu"
        if arch == "llama":  # Mistral's files call themselves llama, too
            config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
            if window:
                config |= {"model_type": "mistral", "sliding_window": window}
        else:
            config["use_sliding_window"] = False
    return config


def _gemma3(file: GGUFFile, config: dict[str, Any], window: int | None) -> dict[str, Any]:
    """Gemma 3's constants that no GGUF key holds: five local layers to one global, a local rope base of 1e4."""
    if window is None:
        raise CheckpointError(f"{file.path}: the metadata lacks 'gemma3.attention.sliding_window'")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    # The 27B model, which only its depth tells from the others, scales queries by hidden size per head.
    scalar = config["hidden_size"] // heads if layers == 62 else config["head_dim"]
    return {
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": scalar,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": Fields(file).optional("gemma3.final_logit_softcapping", float),
    }


def _short(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, where the file's float32 reads 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _vocab_size(file: GGUFFile, arch: str) -> int:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        return len(tokens)
    embedding = file.tensors.get("token_embd.weight")
    return Fields(file).get(f"{arch}.vocab_size", int, embedding.shape[0] if embedding else None)


def _rope_scaling(file: GGUFFile, arch: str, theta: float, head_dim: int) -> dict[str, Any] | None:
    fields = Fields(file)
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise CheckpointError(f"{file.path}: has {name}: longrope scaling isn't supported")
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, theta, head_dim)
    kind = fields.get(f"{arch}.rope.scaling.type", str, "none")
    old_factor = fields.optional(f"{arch}.rope.scale_linear", float)
    if kind == "none":
        return None if old_factor in (None, 1.0) else {"rope_type": "linear", "factor": old_factor}
    return {"rope_type": kind, "factor": _short(fields.get(f"{arch}.rope.scaling.factor", float))}


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, which the file holds only as the divisors it gives.

    All of Meta's Llama 3 models differ in the factor alone, so it's read off and the rest is checked.
    """
    divisors = file.read_tensor(ROPE_FACTORS).astype(np.float64)
    low, high, original = 1.0, 4.0, 8192
    factor = float(divisors.max())
    if divisors.shape == (head_dim // 2,) and factor >= 1:
        wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        if np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(
        f"{file.path}: {ROPE_FACTORS} isn't Llama 3's scaling (low 1, high 4, original context 8192): not supported"
    )
