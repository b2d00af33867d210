"""ParameterLoader: tensors in any order into fused parameters, and nothing that doesn't fit."""

import logging
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import models.assign
from models import Decoder, ModelConfig, split
from models.assign import ParameterLoader
from models.errors import CheckpointError
from tests.models.dense_attention import dense_logits
from tests.models.fixtures import decoder_from, fixture

TOLERANCE = 1e-4


def parameters(decoder: Decoder) -> dict[str, jax.Array]:
    definition, params = split(decoder)
    return dict(zip(definition.names, params, strict=True))


def loader_for(config, dtype=jnp.float32) -> ParameterLoader:
    return ParameterLoader(Decoder(ModelConfig.from_hf(config), dtype=dtype))


def test_any_order_gives_the_same_parameters():
    config, tensors, _, _ = fixture("llama3_rope")
    names = list(tensors)
    random.Random(0).shuffle(names)
    expected = parameters(decoder_from(config, tensors))
    for name, param in parameters(decoder_from(config, {name: tensors[name] for name in names})).items():
        assert np.array_equal(param, expected[name]), name


def test_fused_parameters_hold_their_tensors_on_top_of_each_other():
    config, tensors, _, _ = fixture("qwen2")
    params = parameters(decoder_from(config, tensors))
    at = "model.layers.1."
    for ours, theirs in {
        "layers.1.attention.qkv.weight": [f"{at}self_attn.{x}_proj.weight" for x in "qkv"],
        "layers.1.attention.qkv.bias": [f"{at}self_attn.{x}_proj.bias" for x in "qkv"],
        "layers.1.mlp.gate_up.weight": [f"{at}mlp.{x}_proj.weight" for x in ("gate", "up")],
    }.items():
        assert np.array_equal(params[ours], np.concatenate([tensors[name] for name in theirs])), ours


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_stored_types_are_converted_once(stored, dtype):
    config, tensors, _, _ = fixture("qwen3")
    stored_tensors = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    params = parameters(decoder_from(config, stored_tensors, dtype))
    assert {param.dtype for param in params.values()} == {jnp.dtype(dtype)}
    embedding = stored_tensors["model.embed_tokens.weight"].astype(np.dtype(dtype))
    assert np.array_equal(params["embed_tokens.weight"], embedding)


def test_each_parameter_is_in_memory_once(monkeypatch):
    """On a CPU the buffer that tensors are written to becomes the parameter; elsewhere it is freed."""
    addresses = []
    allocate = models.assign._aligned

    def recording(shape, dtype):
        buffer = allocate(shape, dtype)
        addresses.append((buffer.ctypes.data, buffer.nbytes))
        return buffer

    monkeypatch.setattr(models.assign, "_aligned", recording)
    config, tensors, _, _ = fixture("llama")
    params = parameters(decoder_from(config, tensors, jnp.bfloat16))
    assert sum(size for _, size in addresses) == sum(param.nbytes for param in params.values())
    if jax.default_backend() == "cpu":
        used = sorted(param.unsafe_buffer_pointer() for param in params.values())
        assert used == sorted(address for address, _ in addresses)


def test_sharding_is_that_asked_for():
    config, tensors, _, _ = fixture("llama")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    loader = ParameterLoader(Decoder(ModelConfig.from_hf(config)), sharding)
    for name, tensor in tensors.items():
        loader.assign(name, tensor)
    assert {param.sharding for param in parameters(loader.finish()).values()} == {sharding}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "lacks model.layers.1.mlp.up_proj.weight"),
        ({"model.norm.weight": None, "lm_head.weight": None}, "lacks lm_head.weight, model.norm.weight"),
        ({"lm_head.weight": None}, r"lacks lm_head.weight; the head isn't tied \(tie_word_embeddings is false\)"),
        (
            {"model.layers.2.input_layernorm.weight": (40,)},
            "'model.layers.2.input_layernorm.weight' isn't part of a llama",
        ),
        ({"model.layers.0.self_attn.q_proj.bias": (64,)}, r"q_proj.bias' isn't part of .*qkv_bias=False"),
        (
            {"model.embed_tokens.weight": (99, 40)},
            r"embed_tokens.weight' has shape \(99, 40\), .* asks for \(256, 40\)",
        ),
        ({"model.layers.0.self_attn.k_proj.weight": (64, 40)}, r"has shape \(64, 40\), .* asks for \(32, 40\)"),
        ({"model.norm.weight": (1, 40)}, r"has shape \(1, 40\)"),
    ],
)
def test_what_does_not_fit_is_named_before_and_while_loading(change, words):
    config, tensors, _, _ = fixture("llama")
    for name, shape in change.items():
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = np.zeros(shape, np.float32)
    with pytest.raises(CheckpointError, match=words):
        loader_for(config).check({name: tensor.shape for name, tensor in tensors.items()})
    with pytest.raises(CheckpointError, match=words):
        decoder_from(config, tensors)


def test_check_passes_what_can_be_loaded():
    for name in ("llama", "llama3_rope", "gemma3"):
        config, tensors, _, _ = fixture(name)
        loader_for(config).check({name: tensor.shape for name, tensor in tensors.items()})


def test_many_missing_tensors_are_counted():
    with pytest.raises(CheckpointError, match="lacks lm_head.weight, .* and 16 more"):
        loader_for(fixture("llama").config).finish()


def test_a_tensor_must_come_once_and_be_of_floating_point():
    config, tensors, _, _ = fixture("llama")
    loader = loader_for(config)
    loader.assign("model.norm.weight", tensors["model.norm.weight"])
    with pytest.raises(CheckpointError, match="'model.norm.weight' comes twice"):
        loader.assign("model.norm.weight", tensors["model.norm.weight"])
    with pytest.raises(CheckpointError, match="'model.embed_tokens.weight' is of type int8, expected one of float16"):
        loader.assign("model.embed_tokens.weight", np.zeros((256, 40), np.int8))


def test_tied_heads(caplog):
    config, tensors, ids, expected = fixture("llama3_rope")
    assert "lm_head.weight" not in tensors and config["tie_word_embeddings"]
    embedding = tensors["model.embed_tokens.weight"]

    copied = decoder_from(config, tensors | {"lm_head.weight": embedding.copy()})
    assert copied.lm_head is None and not caplog.records
    np.testing.assert_allclose(dense_logits(copied, ids), expected, atol=TOLERANCE)

    # As transformers 5: where the two differ, the configuration is what's wrong.
    with caplog.at_level(logging.WARNING):
        other = decoder_from(config, {"lm_head.weight": -embedding} | tensors)
    assert "another lm_head.weight: it is used" in caplog.text
    assert not other.config.tie_word_embeddings and sum(p.size for p in split(other)[1]) == other.config.num_parameters
    np.testing.assert_allclose(dense_logits(other, ids), -expected, atol=TOLERANCE)


def test_gemma3_without_the_flag_is_tied():
    config, tensors, ids, expected = fixture("gemma3")
    del config["tie_word_embeddings"]
    np.testing.assert_allclose(dense_logits(decoder_from(config, tensors), ids), expected, atol=TOLERANCE)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_language_model_of_a_multimodal_checkpoint(prefix):
    config, tensors, ids, expected = fixture("gemma3")
    renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for other in ("vision_tower.x", "model.vision_tower.x", "multi_modal_projector.y"):
        renamed[other] = np.zeros(3, np.float32)
    whole = {"model_type": "gemma3", "text_config": config, "vision_config": {}}
    np.testing.assert_allclose(dense_logits(decoder_from(whole, renamed), ids), expected, atol=TOLERANCE)
    with pytest.raises(CheckpointError, match="'vision_tower.x' isn't part of a llama"):
        loader_for(fixture("llama").config).assign("vision_tower.x", np.zeros(3, np.float32))


def test_frequencies_that_old_checkpoints_carry_are_passed_over():
    config, tensors, _, _ = fixture("llama")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    decoder_from(config, tensors)
