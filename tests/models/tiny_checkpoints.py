"""Tiny random checkpoints for tests: one set of weights, written as a Hugging Face folder and as a GGUF file."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_act": "silu",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": BASE | {"model_type": "llama"},
    "qwen2": BASE | {"model_type": "qwen2", "use_sliding_window": False},
    "qwen3": BASE | {"model_type": "qwen3", "head_dim": 16},
    "gemma3": {key: value for key, value in BASE.items() if key != "hidden_act"}
    | {
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}


def random_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Weights by their Hugging Face names: products scaled by fan-in, norms and biases far from 1 and 0."""
    rng = np.random.default_rng(seed)
    e, f, d, v = config["hidden_size"], config["intermediate_size"], config["head_dim"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    kind = config["model_type"]

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (rng.standard_normal(size) * 0.3 + (0 if kind == "gemma3_text" else 1)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(v, e), "model.norm.weight": norm(e)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = weight(v, e)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, shape in {"q": (q, e), "k": (kv, e), "v": (kv, e), "o": (e, q)}.items():
            tensors[f"{at}self_attn.{name}_proj.weight"] = weight(*shape)
            if kind == "qwen2" and name != "o":
                tensors[f"{at}self_attn.{name}_proj.bias"] = weight(shape[0]) * 3
        for name, shape in {"gate": (f, e), "up": (f, e), "down": (e, f)}.items():
            tensors[f"{at}mlp.{name}_proj.weight"] = weight(*shape)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if kind == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            tensors[f"{at}{name}.weight"] = norm(e)
        if kind in ("gemma3_text", "qwen3"):
            tensors[f"{at}self_attn.q_norm.weight"] = norm(d)
            tensors[f"{at}self_attn.k_norm.weight"] = norm(d)
    return tensors


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """A Hugging Face folder: config.json and one safetensors file, or `shards` of them with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    where = {tensor: names[n % shards] for n, tensor in enumerate(tensors)}
    for name in names:
        save_file({t: tensors[t] for t in tensors if where[t] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


_GGUF_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_GGUF_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: Tensors,
    metadata: dict[str, Any] | None = None,
    extra_tensors: Tensors | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter makes it: llama's q and k rows interleaved, Gemma's norms plus one.

    `metadata` adds keys, or replaces them; None as a value leaves the key out.
    """
    arch = {"gemma3_text": "gemma3", "mistral": "llama"}.get(config["model_type"], config["model_type"])
    keys: dict[str, Any] = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        f"{arch}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
    }
    if "sliding_window" in config:
        keys[f"{arch}.attention.sliding_window"] = config["sliding_window"]
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (keys | (metadata or {})).items():
        _add_key(writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(_gguf_name(name, arch), _gguf_values(name, tensor, arch, config))
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def _gguf_name(name: str, arch: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    if rest == "post_attention_layernorm":
        return f"blk.{layer}.{'post_attention_norm' if arch == 'gemma3' else 'ffn_norm'}.{kind}"
    return f"blk.{layer}.{_GGUF_BLOCK[rest]}.{kind}"


def _gguf_values(name: str, tensor: np.ndarray, arch: str, config: dict[str, Any]) -> np.ndarray:
    if arch == "gemma3" and "norm" in name:
        return tensor + np.float32(1)
    for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if arch == "llama" and projection in name:
            halves = tensor.reshape(config[heads], 2, -1, *tensor.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    return tensor


def byte_level_vocabulary() -> dict[str, Any]:
    """GGUF keys of a byte-level BPE vocabulary of 320: specials, all bytes, a few merges."""
    characters = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144)]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ hello"]
    specials = ["<|end|>", "<s>", "</s>"]
    tokens = specials + [chr(c) for c in characters] + [merge.replace(" ", "") for merge in merges]
    tokens += [f"[unused{n}]" for n in range(320 - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in specials else 5 if t.startswith("[unused") else 1 for t in tokens],
        "tokenizer.ggml.merges": merges,
    }


def sentencepiece_vocabulary() -> dict[str, Any]:
    """GGUF keys of a SentencePiece vocabulary of 320: specials, bytes, pieces with scores. No tokenizer.ggml.pre."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor"]
    pieces += ["ld", "▁world", "▁a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(len(pieces) - len(p) * 20 + n) for n, p in enumerate(pieces)]
    padding = 320 - len(tokens)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + [f"[unused{n}]" for n in range(padding)],
        "tokenizer.ggml.token_type": types + [5] * padding,
        "tokenizer.ggml.scores": scores + [-1e6] * padding,
        "tokenizer.ggml.unknown_token_id": 0,
    }
