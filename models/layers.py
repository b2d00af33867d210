"""What a decoder is made of: norm, attention, MLP, and the layer that joins them."""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.linear import LinearWeights, linear
from models.parameters import Initializer
from pallas_kernels import AttentionLayer, HeadNorms, KVCache, RopeTable, StepAttention, norm_and_rope, rms_norm


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, or * (1 + weight). Computed in float32, returned in x's dtype.

    Attributes:
        weight: [size]; the last dimension of x is normalised.
    """

    def __init__(self, make: Initializer, config: ModelConfig, size: int) -> None:
        self.eps, self.plus_one = config.rms_norm_eps, config.norm_plus_one
        self.weight = make.constant((size,), 0.0 if self.plus_one else 1.0)

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        return rms_norm(x, self.weight[...], self.eps, self.plus_one)


class Attention(nnx.Module):
    """Projections before and behind a kernel that keeps the keys and values.

    Attributes:
        name: prefix of its projections' names.
        qkv: queries, keys and values in one projection, in this order.
        q_norm, k_norm: of each head before its rotation, or None.
    """

    def __init__(self, make: Initializer, config: ModelConfig, layer: AttentionLayer, name: str) -> None:
        self.layer, self.name = layer, name
        q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        self.qkv = LinearWeights(make, config.hidden_size, q + 2 * kv, config.qkv_bias)
        self.o = LinearWeights(make, q, config.hidden_size, config.o_bias)
        self.q_norm = RMSNorm(make, config, layer.head_dim) if config.qk_norm else None
        self.k_norm = RMSNorm(make, config, layer.head_dim) if config.qk_norm else None

    def project(
        self, x: Float[Array, "T E"]
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T Hkv D"], Float[Array, "T Hkv D"]]:
        """Queries, keys and values, neither normalised nor rotated yet."""
        layer, num_tokens = self.layer, x.shape[0]
        qkv = linear(f"{self.name}.qkv", self.qkv, x).reshape(num_tokens, -1, layer.head_dim)
        k_begin, v_begin = layer.num_heads, layer.num_heads + layer.num_kv_heads
        return qkv[:, :k_begin], qkv[:, k_begin:v_begin], qkv[:, v_begin:]

    @property
    def norms(self) -> HeadNorms | None:
        """Those of query and key heads, as the kernel takes them that applies them."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight[...], self.k_norm.weight[...], self.q_norm.eps, self.q_norm.plus_one)

    def output(self, out: Float[Array, "T H D"]) -> Float[Array, "T E"]:
        return linear(f"{self.name}.o", self.o, out.reshape(out.shape[0], -1))


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)), gate and up in one projection, in this order."""

    def __init__(self, make: Initializer, config: ModelConfig, name: str) -> None:
        self.name, self.size, self.activation = name, config.intermediate_size, config.activation
        self.gate_up = LinearWeights(make, config.hidden_size, 2 * self.size, config.mlp_bias)
        self.down = LinearWeights(make, self.size, config.hidden_size, config.mlp_bias)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        gate_up = linear(f"{self.name}.gate_up", self.gate_up, x)
        gate, up = gate_up[:, : self.size], gate_up[:, self.size :]
        gate = jax.nn.gelu(gate, approximate=True) if self.activation == "gelu_tanh" else jax.nn.silu(gate)
        return linear(f"{self.name}.down", self.down, gate * up)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each on a normalised copy of the stream and added to it.

    Attributes:
        input_norm, mlp_input_norm: before attention and before the MLP.
        attention_norm, mlp_norm: of what they give, before it's added; None without sandwich norms.
    """

    def __init__(self, make: Initializer, config: ModelConfig, index: int, layer: AttentionLayer) -> None:
        size = config.hidden_size
        self.input_norm = RMSNorm(make, config, size)
        self.attention = Attention(make, config, layer, f"layers.{index}")
        self.attention_norm = RMSNorm(make, config, size) if config.sandwich_norms else None
        self.mlp_input_norm = RMSNorm(make, config, size)
        self.mlp = MLP(make, config, f"layers.{index}")
        self.mlp_norm = RMSNorm(make, config, size) if config.sandwich_norms else None

    def __call__(
        self, x: Float[Array, "T E"], table: RopeTable, cache: KVCache, attention: StepAttention
    ) -> tuple[Float[Array, "T E"], KVCache]:
        q, k, v = self.attention.project(self.input_norm(x))
        out, cache = attention(q, k, v, cache, self.attention.layer, rope=table, norms=self.attention.norms)
        return self.after_attention(x, out), cache

    def before_attention(
        self, x: Float[Array, "T E"], table: RopeTable
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T Hkv D"], Float[Array, "T Hkv D"]]:
        """The dense half before attention: queries, keys and values of the stream, normalised and rotated."""
        q, k, v = self.attention.project(self.input_norm(x))
        return *norm_and_rope(q, k, table, self.attention.norms), v

    def after_attention(self, x: Float[Array, "T E"], attended: Float[Array, "T H D"]) -> Float[Array, "T E"]:
        """The dense half behind it: what attention gave and the MLP, added to the stream."""
        out = self.attention.output(attended)
        x = x + (out if self.attention_norm is None else self.attention_norm(out))
        out = self.mlp(self.mlp_input_norm(x))
        return x + (out if self.mlp_norm is None else self.mlp_norm(out))
