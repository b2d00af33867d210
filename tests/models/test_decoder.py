"""Models against transformers' logits, and what a definition promises beside them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models.decoder
import models.layers
from models import Decoder, ModelConfig, merge, split
from tests.models.dense_attention import dense_attention, dense_logits, no_caches
from tests.models.fixtures import NAMES, decoder_from, fixture
from tests.models.paged_run import paged_logits

TOLERANCE = 1e-4
TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_transformers(name):
    config, tensors, ids, expected = fixture(name)
    np.testing.assert_allclose(dense_logits(decoder_from(config, tensors), ids), expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_logits_in_chunks_and_single_tokens_beside_another_request(name):
    config, tensors, ids, expected = fixture(name)
    # The second request lags behind: chunks of both, decodes of one beside chunks of the other, one alone.
    steps = [[8, 0], [8, 7], [8, 8], [5, 8], *[[1, 4]] * 4, [1, 1], *[[1, 0]] * 6]
    first, second = paged_logits(decoder_from(config, tensors), [ids, ids], steps)
    np.testing.assert_allclose(first, expected, atol=TOLERANCE)
    np.testing.assert_allclose(second, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_window_holds_the_query_and_the_keys_before_it(name):
    """Window 8: a token 8 back changes nothing, one 7 back does."""
    config, tensors, ids, _ = fixture(name)
    config = config | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    one_layer = {name: tensor for name, tensor in tensors.items() if "layers." not in name or "layers.0." in name}
    decoder = decoder_from(config, one_layer)
    query = 20

    def with_another_token(at: int) -> np.ndarray:
        other = ids.copy()
        other[at] = (other[at] + 1) % config["vocab_size"]
        return other

    requests = [ids, with_another_token(query - 8), with_another_token(query - 7)]
    plain, outside, inside = (logits[query] for logits in paged_logits(decoder, requests, [[5, 5, 5]] * 8))
    np.testing.assert_allclose(outside, plain, atol=1e-6)
    assert not np.allclose(inside, plain, atol=1e-3)


def test_embeddings_serve_in_place_of_ids():
    config, tensors, ids, expected = fixture("gemma3")
    decoder = decoder_from(config, tensors)
    embeddings = decoder.embed(jnp.asarray(ids))
    hidden, _ = decoder(embeddings, jnp.arange(len(ids)), no_caches(decoder), [dense_attention])
    np.testing.assert_allclose(decoder.compute_logits(hidden), expected, atol=TOLERANCE)


@pytest.mark.parametrize("dtype, scale", [(jnp.bfloat16, 34.0), (jnp.float32, float(np.float32(1152**0.5)))])
def test_embedding_scale_is_rounded_to_the_parameters_dtype(dtype, scale):
    config = TINY | {"model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 1, "head_dim": 8}
    decoder = Decoder(ModelConfig.from_hf(config), dtype=dtype, rngs=nnx.Rngs(0))
    decoder.embed_tokens.weight.set_value(jnp.ones((64, 1152), dtype))
    assert set(np.asarray(decoder.embed(jnp.arange(3)), np.float64).ravel()) == {scale}


def test_bfloat16_model_has_float32_logits_near_the_float32_models():
    config, tensors, ids, expected = fixture("qwen3")
    decoder = decoder_from(config, tensors, jnp.bfloat16)
    logits = dense_logits(decoder, ids)
    assert logits.dtype == np.float32 and decoder.dtype == jnp.bfloat16
    difference = np.abs(logits - expected)
    assert 1e-4 < difference.mean() < 0.05 and difference.max() < 0.3


def test_every_projection_goes_through_the_seam_under_its_own_name(monkeypatch):
    names = []

    def recording(name, weights, x, out_dtype=None):
        names.append(name)
        return original(name, weights, x, out_dtype)

    original = models.layers.linear
    monkeypatch.setattr(models.layers, "linear", recording)
    monkeypatch.setattr(models.decoder, "linear", recording)
    decoder = Decoder(ModelConfig.from_hf(TINY), rngs=nnx.Rngs(0))
    dense_logits(decoder, np.arange(4))
    assert names == [f"layers.{i}.{part}" for i in range(2) for part in ("qkv", "o", "gate_up", "down")] + ["lm_head"]


def test_split_gives_a_flat_tuple_that_merge_takes_inside_jit():
    config = ModelConfig.from_hf(TINY | {"num_hidden_layers": 12})
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    definition, params = split(decoder)
    assert isinstance(params, tuple) and all(isinstance(param, jax.Array) for param in params)
    assert sum(param.size for param in params) == config.num_parameters
    assert len(set(definition.names)) == len(definition.names) == len(params)
    shapes = dict(zip(definition.names, (param.shape for param in params), strict=True))
    assert shapes["layers.11.mlp.down.weight"] == (32, 48) and shapes["embed_tokens.weight"] == (64, 32)
    # A definition can key a cache of compiled steps: made from equal models, it is equal.
    same, _ = split(Decoder(config, rngs=nnx.Rngs(1)))
    assert same == definition and hash(same) == hash(definition)

    hidden = jnp.ones((2, 32))
    merged = jax.jit(lambda params, x: merge(definition, params).compute_logits(x))(params, hidden)
    np.testing.assert_allclose(merged, decoder.compute_logits(hidden), atol=1e-6)


def test_model_without_rngs_takes_no_memory():
    config = ModelConfig.from_hf(TINY | {"hidden_size": 2**14, "num_hidden_layers": 80, "vocab_size": 2**17})
    _, params = split(Decoder(config, dtype=jnp.bfloat16))
    assert all(isinstance(param, jax.ShapeDtypeStruct) and param.dtype == jnp.bfloat16 for param in params)


def test_attention_soft_cap_reaches_the_kernels():
    config, tensors, ids, expected = fixture("gemma3")
    decoder = decoder_from(config | {"attn_logit_softcapping": 0.5}, tensors)
    assert {layer.soft_cap for layer in decoder.config.attention_layers()} == {0.5}
    assert np.abs(dense_logits(decoder, ids) - expected).max() > 0.1


def test_wrong_number_of_caches_is_refused():
    decoder = Decoder(ModelConfig.from_hf(TINY), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="1 KV caches for 2 layers"):
        decoder(jnp.arange(4), jnp.arange(4), no_caches(decoder)[:1], [dense_attention])


def test_layers_use_the_attention_of_their_group(monkeypatch):
    layers = ModelConfig.from_hf(TINY).attention_layers()
    grouped = tuple(dataclasses.replace(layer, group=index) for index, layer in enumerate(layers))
    monkeypatch.setattr(ModelConfig, "attention_layers", lambda self: grouped)
    decoder = Decoder(ModelConfig.from_hf(TINY), rngs=nnx.Rngs(0))
    called = []

    def group(index):
        def attend(q, k, v, cache, layer, **rotation):
            called.append((index, layer.group))
            return dense_attention(q, k, v, cache, layer, **rotation)

        return attend

    decoder(jnp.arange(4), jnp.arange(4), no_caches(decoder), [group(0), group(1)])
    assert called == [(0, 0), (1, 1)]
