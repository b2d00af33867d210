"""Checkpoints whose output is scripted: greedy decoding follows a chain of tokens that the test wrote.

The embedding of token t is the t-th unit vector, attention and MLP add nothing, and the last norm leaves a unit vector
as it is. So the logits after token t are column t of the head, whatever came before.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers

EPS = 1e-5


def successor_logits(vocab_size: int, successor: Mapping[int, int], height: float = 20.0) -> np.ndarray:
    """float32 [V, V]: row t holds the logits after token t; a token without a successor goes to itself plus one."""
    logits = np.zeros((vocab_size, vocab_size), np.float32)
    for token in range(vocab_size):
        logits[token, successor.get(token, (token + 1) % vocab_size)] = height
    return logits


def chain(*tokens: int) -> dict[int, int]:
    """The successors that make greedy decoding emit ``tokens`` one after another. No token may stand twice."""
    assert len(set(tokens)) == len(tokens)
    return dict(zip(tokens, tokens[1:], strict=False))


def write_chain(
    folder: Path,
    logits: np.ndarray,
    tokenizer: tokenizers.Tokenizer | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a Hugging Face folder.

    Args:
        logits: float32 [V, V]: row t holds the logits after token t.
    """
    v = len(logits)
    heads, head_dim, mlp = 2, 8, 8
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": v,
        "hidden_size": v,
        "intermediate_size": mlp,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": None,  # left out, it would be 2
        **(config or {}),
    }
    rng = np.random.default_rng(0)
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": np.eye(v),
        "model.norm.weight": np.full(v, np.sqrt(1 / v + EPS)),
        "lm_head.weight": logits.T,
        f"{layer}input_layernorm.weight": np.ones(v),
        f"{layer}post_attention_layernorm.weight": np.ones(v),
        f"{layer}self_attn.o_proj.weight": np.zeros((v, heads * head_dim)),
        f"{layer}mlp.gate_proj.weight": rng.standard_normal((mlp, v)),
        f"{layer}mlp.up_proj.weight": rng.standard_normal((mlp, v)),
        f"{layer}mlp.down_proj.weight": np.zeros((v, mlp)),
    }
    tensors |= {f"{layer}self_attn.{n}_proj.weight": rng.standard_normal((heads * head_dim, v)) for n in "qkv"}
    save_file({n: np.ascontiguousarray(a, np.float32) for n, a in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(facts))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config or {}))
    return folder


def word_tokenizer(words: Sequence[str]) -> tokenizers.Tokenizer:
    """Token i is ``words[i]``; texts are split at spaces, and decoding joins the words as they are."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def byte_level_tokenizer(extra: Sequence[str] = (), pairs: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """A token for each byte (ids in the order of their printable names), then tokens of more bytes that no text is
    encoded to, then the ``extra`` special ones.
    """
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *pairs]
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(extra))
    return tokenizer


def sentencepiece_tokenizer(pieces: Sequence[str]) -> tokenizers.Tokenizer:
    """The 256 byte tokens <0x00> to <0xFF> (token i is byte i), then ``pieces``, whose spaces are written as ▁."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {piece: 256 + i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token=None))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
