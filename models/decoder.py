"""The decoder: one definition for every family, its features chosen by configuration."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from models.config import ModelConfig
from models.layers import DecoderLayer, RMSNorm
from models.linear import LinearWeights, linear
from models.parameters import Initializer
from models.rope import RopeTable, rope_table
from pallas_kernels import KVCache, StepAttention


class Decoder(nnx.Module):
    """A decoder-only language model over a stream of tokens, its layers unrolled.

    Requests are packed into one token dimension; which token is whose, only the attention knows.

    Args:
        config: what to build.
        dtype: of all parameters, and of the stream of hidden states.
        rngs: source of random parameters. None: parameters are shapes without memory, for
            ``models.assign`` to fill or for ahead-of-time compilation.

    Attributes:
        config, dtype: as given.
        embed_tokens: [V, E]; the head as well, where the configuration ties them.
        layers: L of them.
        norm: the last norm.
        lm_head: [V, E], or None if tied.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs | None = None) -> None:
        self.config, self.dtype = config, jnp.dtype(dtype)
        make = Initializer(self.dtype, rngs)
        self.embed_tokens = LinearWeights(make, config.hidden_size, config.vocab_size)
        self.layers = nnx.List(
            DecoderLayer(make, config, index, layer) for index, layer in enumerate(config.attention_layers())
        )
        self.norm = RMSNorm(make, config, config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else LinearWeights(make, config.hidden_size, config.vocab_size)

    def __call__(
        self,
        tokens: Int[Array, "T"] | Float[Array, "T E"],
        positions: Int[Array, "T"],
        kv_caches: Sequence[KVCache],
        attention: Sequence[StepAttention],
    ) -> tuple[Float[Array, "T E"], tuple[KVCache, ...]]:
        """Runs all layers over the tokens; their keys and values go into the caches.

        Args:
            tokens: ids, all of the vocabulary; or embeddings, used as they are (Gemma's scale included).
            positions: of each token in its request.
            kv_caches: one per layer. Donate them: the returned ones replace them.
            attention: one per cache group; a layer uses that of its ``AttentionLayer.group``.

        Returns:
            Hidden states after the final norm, in the model's dtype, and the caches.
        """
        config = self.config
        if len(kv_caches) != config.num_layers:
            raise ValueError(f"got {len(kv_caches)} KV caches for {config.num_layers} layers")
        x = self.embed(tokens) if jnp.issubdtype(tokens.dtype, jnp.integer) else tokens.astype(self.dtype)
        tables = self.rope_tables(positions)
        updated = []
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            facts = layer.attention.layer
            x, cache = layer(x, self.table_of(layer, tables), cache, attention[facts.group])
            updated.append(cache)
        return self.norm(x), tuple(updated)

    def rope_tables(self, positions: Int[Array, "T"]) -> tuple[RopeTable, ...]:
        """The rotations of a step: of all layers, and of those with a window where they have their own."""
        config = self.config
        ropes = (config.rope,) if config.local_rope is None else (config.rope, config.local_rope)
        return tuple(rope_table(rope, config.head_dim, positions) for rope in ropes)

    def table_of(self, layer: DecoderLayer, tables: tuple[RopeTable, ...]) -> RopeTable:
        """The one of ``rope_tables`` that a layer rotates by."""
        return tables[0] if layer.attention.layer.window is None else tables[-1]

    def embed(self, token_ids: Int[Array, "T"]) -> Float[Array, "T E"]:
        """Embeddings of tokens, scaled if the configuration says so.

        The scale is rounded to the parameters' dtype before it multiplies, as transformers does: for a hidden size of
        1152 it is 34.0 in bfloat16, and the nearest float32 to 33.9411 in float32.
        """
        x = jnp.take(self.embed_tokens.weight[...], token_ids, axis=0, mode="clip")
        return x if self.config.embed_scale is None else x * jnp.asarray(self.config.embed_scale, self.dtype)

    def compute_logits(self, hidden: Float[Array, "S E"]) -> Float32[Array, "S V"]:
        """Logits of hidden states as ``__call__`` returns them, soft-capped if the configuration says so."""
        weights = self.embed_tokens if self.lm_head is None else self.lm_head
        logits = linear("lm_head", weights, hidden, out_dtype=jnp.float32)
        cap = self.config.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
