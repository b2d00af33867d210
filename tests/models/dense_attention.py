"""Attention of one whole sequence, by the textbook and without paging: an independent stand-in for the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models import Decoder, merge, split
from pallas_kernels import AttentionLayer, KVCache, norm_and_rope


def dense_attention(
    q: Array,
    k: Array,
    v: Array,
    cache: KVCache,
    layer: AttentionLayer,
    sinks: Array | None = None,
    rope=None,
    norms=None,
):
    """What a model calls in place of a StepAttention. The tokens are all there is: the cache is left alone."""
    assert sinks is None
    if rope is not None:
        q, k = norm_and_rope(q, k, rope, norms)
    repeat = layer.num_heads // layer.num_kv_heads
    keys, values = jnp.repeat(k, repeat, axis=1), jnp.repeat(v, repeat, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, keys, precision="highest") * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * jnp.tanh(scores / layer.soft_cap)
    distance = np.arange(len(q))[:, None] - np.arange(len(q))[None, :]
    seen = (distance >= 0) & (distance < (layer.window or len(q)))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, values, precision="highest"), cache


def no_caches(decoder: Decoder) -> tuple[KVCache, ...]:
    """As many as the model has layers, all empty."""
    return (KVCache(jnp.zeros(0), jnp.zeros(0)),) * decoder.config.num_layers


def dense_logits(decoder: Decoder, ids: np.ndarray) -> np.ndarray:
    """Logits of every position of one sequence."""
    definition, params = split(decoder)

    @jax.jit
    def run(params, tokens):
        model = merge(definition, params)
        positions = jnp.arange(len(tokens), dtype=jnp.int32)
        hidden, _ = model(tokens, positions, no_caches(decoder), [dense_attention])
        return model.compute_logits(hidden)

    return np.asarray(run(params, ids))
