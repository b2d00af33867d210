"""Where the tensors of a Hugging Face checkpoint go in a Decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flax import nnx

from models.config import ModelConfig
from models.decoder import Decoder
from models.layers import DecoderLayer
from models.linear import LinearWeights

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# A multimodal checkpoint has the language model under a name of its own, which moved between transformers' versions.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_MODALITIES = tuple(
    prefix + part for prefix in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")
)
_RECOMPUTED = ".rotary_emb.inv_freq"  # old Llama checkpoints carry what the configuration already says


@dataclass(frozen=True)
class Place:
    """Where a tensor goes.

    Attributes:
        param: the parameter.
        shape: the tensor's.
        first_row: of the parameter, which may be several tensors on top of each other.
    """

    param: nnx.Param
    shape: tuple[int, ...]
    first_row: int = 0


def canonical_name(name: str, config: ModelConfig) -> str | None:
    """The name a text-only checkpoint has for this tensor; None: no part of the language model, to be passed over."""
    if name.endswith(_RECOMPUTED) or (config.architecture == "gemma3" and name.startswith(_OTHER_MODALITIES)):
        return None
    for prefix, plain in _PREFIXES.items():
        if config.architecture == "gemma3" and name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def places(decoder: Decoder) -> dict[str, Place]:
    """Place by name, for every tensor that the decoder's configuration asks for."""
    found = dict(_whole(EMBEDDING, decoder.embed_tokens.weight))
    for index, layer in enumerate(decoder.layers):
        found |= {f"model.layers.{index}.{name}": place for name, place in _layer(layer, decoder.config)}
    found |= _whole(NORM, decoder.norm.weight)
    if decoder.lm_head is not None:
        found |= _whole(HEAD, decoder.lm_head.weight)
    return found


def _layer(layer: DecoderLayer, config: ModelConfig) -> Iterator[tuple[str, Place]]:
    attention, mlp = layer.attention, layer.mlp
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield from _stacked(attention.qkv, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv})
    yield from _stacked(attention.o, {"self_attn.o_proj": config.hidden_size})
    yield from _stacked(mlp.gate_up, dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), config.intermediate_size))
    yield from _stacked(mlp.down, {"mlp.down_proj": config.hidden_size})
    norms = {
        "input_layernorm": layer.input_norm,
        "self_attn.q_norm": attention.q_norm,
        "self_attn.k_norm": attention.k_norm,
        # The same name stands for another norm where there are four of them.
        "post_attention_layernorm": layer.attention_norm or layer.mlp_input_norm,
        "pre_feedforward_layernorm": layer.mlp_input_norm if config.sandwich_norms else None,
        "post_feedforward_layernorm": layer.mlp_norm,
    }
    for name, norm in norms.items():
        if norm is not None:
            yield from _whole(f"{name}.weight", norm.weight).items()


def _whole(name: str, param: nnx.Param) -> dict[str, Place]:
    return {name: Place(param, param.get_value().shape)}


def _stacked(weights: LinearWeights, rows: dict[str, int]) -> Iterator[tuple[str, Place]]:
    first = 0
    for name, count in rows.items():
        yield f"{name}.weight", Place(weights.weight, (count, weights.weight.get_value().shape[1]), first)
        if weights.bias is not None:
            yield f"{name}.bias", Place(weights.bias, (count,), first)
        first += count
