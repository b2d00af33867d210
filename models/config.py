"""What a model is: sizes and features, and no framework's spelling of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from models.hf_config import read_hf_config
from models.rope import RopeConfig
from models.sizes import LIMITS, check_number, check_size
from pallas_kernels import AttentionLayer


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's sizes and features. Checked when made, so that no array is ever sized by nonsense.

    Attributes:
        architecture: the family: "llama", "qwen2", "qwen3", "mistral" or "gemma3".
        layer_windows: per layer, how many keys a query sees, its own included; None: all before it.
        rope: rotation of queries and keys; ``local_rope``, if given, is that of the layers with a window.
        qkv_bias, o_bias, mlp_bias: which projections add a bias.
        qk_norm: queries and keys are normalised per head before their rotation.
        sandwich_norms: the outputs of attention and MLP are normalised, too.
        norm_plus_one: norms multiply by 1 + weight.
        embed_scale: token embeddings are multiplied by it, once it is rounded to the parameters' dtype.
        attention_scale: what scores are multiplied by.
        attn_soft_cap, logits_soft_cap: cap c turns x into c * tanh(x / c); None: no cap.

    Raises:
        ValueError: a size out of range, or sizes that contradict each other.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    attention_scale: float
    local_rope: RopeConfig | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_plus_one: bool = False
    embed_scale: float | None = None
    attn_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            check_size(getattr(self, name), limit, name)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} isn't a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}, expected an even number: rotations turn pairs of dimensions"
            )
        check_size(self.num_heads * self.head_dim, LIMITS["intermediate_size"], "num_heads * head_dim")
        if len(self.layer_windows) != self.num_layers:
            raise ValueError(f"layer_windows has {len(self.layer_windows)} entries for {self.num_layers} layers")
        for window in self.layer_windows:
            if window is not None and window < 1:
                raise ValueError(f"a window is {window}, expected at least 1 (a query always sees its own key) or None")
        for name in ("rms_norm_eps", "attention_scale", "embed_scale", "attn_soft_cap", "logits_soft_cap"):
            if (value := getattr(self, name)) is not None:
                check_number(value, name)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """The configuration that a Hugging Face config.json describes, in the words of transformers 4 or 5.

        A multimodal Gemma 3's text model is taken.

        Raises:
            ValueError: an architecture, rope type or feature that isn't supported (the message lists what is), a
                missing or mistyped entry, or sizes that make no sense.
        """
        return cls(**read_hf_config(config))

    @property
    def num_parameters(self) -> int:
        """Numbers in the model, norms and biases included."""
        e, f, d = self.hidden_size, self.intermediate_size, self.head_dim
        q, qkv = self.num_heads * d, (self.num_heads + 2 * self.num_kv_heads) * d
        layer = (qkv + q) * e + 3 * f * e + (4 if self.sandwich_norms else 2) * e + (2 * d if self.qk_norm else 0)
        layer += qkv * self.qkv_bias + e * self.o_bias + (2 * f + e) * self.mlp_bias
        return self.num_layers * layer + self.vocab_size * e * (1 if self.tie_word_embeddings else 2) + e

    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """What the kernels need to know of each layer. All share one cache group: windows only limit what is read."""
        return tuple(
            AttentionLayer(
                name=f"layers.{index}.attention",
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.attention_scale,
                window=window,
                soft_cap=self.attn_soft_cap,
            )
            for index, window in enumerate(self.layer_windows)
        )
