"""A GGUF file read in Hugging Face's words is the Hugging Face checkpoint it was converted from."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from models.errors import CheckpointError
from models.gguf_file import read_gguf
from models.gguf_model import hf_config
from models.gguf_tensors import GGUFTensors
from tests.models.tiny_checkpoints import BASE, CONFIGS, random_tensors, write_gguf


def read(source, name: str, dtype=np.float32) -> np.ndarray:
    out = np.empty(source.shapes[name], dtype)
    source.read_into(name, out)
    return out


def written(path: Path, config, tensors=None, metadata=None, extra=None):
    tensors = random_tensors(config) if tensors is None else tensors
    return read_gguf(write_gguf(path / "m.gguf", config, tensors, metadata, extra))


@pytest.mark.parametrize("arch", CONFIGS)
def test_weights_are_those_of_the_hugging_face_checkpoint(tmp_path, arch):
    """llama's q and k rows un-permuted, qwen's and gemma's left alone, gemma's norms less one."""
    config, tensors = CONFIGS[arch], random_tensors(CONFIGS[arch])
    file = written(tmp_path, config, tensors)
    source = GGUFTensors(file, hf_config(file))
    assert source.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        exact = 1e-7 if arch == "gemma3" and "norm" in name else 0  # (w + 1) - 1 in float32
        np.testing.assert_allclose(read(source, name), tensor, rtol=0, atol=exact)
        if not exact:
            np.testing.assert_array_equal(read(source, name, ml_dtypes.bfloat16), tensor.astype(ml_dtypes.bfloat16))


def test_the_converter_of_these_tests_does_permute(tmp_path):
    """Or the test above would prove nothing."""
    tensors = random_tensors(CONFIGS["llama"])
    file = written(tmp_path, CONFIGS["llama"], tensors)
    for projection, ours in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        raw = file.read_tensor(f"blk.0.{projection}.weight")
        assert not np.array_equal(raw, tensors[f"model.layers.0.self_attn.{ours}.weight"])
        np.testing.assert_array_equal(raw[1], tensors[f"model.layers.0.self_attn.{ours}.weight"][4])


def test_gemma_norms_lose_their_one_before_they_are_rounded(tmp_path):
    norm = np.full(BASE["hidden_size"], 1e-4, np.float32)
    file = written(
        tmp_path,
        CONFIGS["gemma3"],
        {"model.norm.weight": norm, "model.embed_tokens.weight": np.ones((320, 32), np.float32)},
    )
    rounded = read(GGUFTensors(file, hf_config(file)), "model.norm.weight", ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(rounded, norm, rtol=0.01)


@pytest.mark.parametrize("arch", CONFIGS)
def test_configuration_is_that_of_the_hugging_face_checkpoint(tmp_path, arch):
    config = hf_config(written(tmp_path, CONFIGS[arch]))
    for key, value in CONFIGS[arch].items():
        assert config[key] == value, key


def test_gemma3_gets_the_constants_that_no_file_holds(tmp_path):
    config = hf_config(written(tmp_path, CONFIGS["gemma3"], metadata={"gemma3.rope.freq_base": None}))
    assert (config["rope_local_base_freq"], config["sliding_window_pattern"]) == (1e4, 6)
    assert (config["rope_theta"], config["query_pre_attn_scalar"]) == (1e6, 16)
    large = CONFIGS["gemma3"] | {"num_hidden_layers": 62, "hidden_size": 64}
    tensors = {"model.norm.weight": np.ones(64, np.float32)}
    assert hf_config(written(tmp_path, large, tensors))["query_pre_attn_scalar"] == 16 == 64 // 4


def test_tied_where_there_is_no_output_matrix(tmp_path):
    tensors = random_tensors(CONFIGS["llama"])
    assert hf_config(written(tmp_path, CONFIGS["llama"], tensors))["tie_word_embeddings"] is False
    del tensors["lm_head.weight"]
    assert hf_config(written(tmp_path, CONFIGS["llama"], tensors))["tie_word_embeddings"] is True


def test_llama_with_biases_and_mistral_with_a_window(tmp_path):
    config = CONFIGS["llama"] | {"sliding_window": 16}
    tensors = random_tensors(config)
    rng = np.random.default_rng(1)
    for name, size in (("q", 32), ("k", 16), ("v", 16)):
        tensors[f"model.layers.0.self_attn.{name}_proj.bias"] = rng.standard_normal(size).astype(np.float32)
    file = written(tmp_path, config, tensors)
    config = hf_config(file)
    assert (config["model_type"], config["sliding_window"], config["attention_bias"]) == ("mistral", 16, True)
    for name in tensors:
        np.testing.assert_array_equal(read(GGUFTensors(file, config), name), tensors[name])


def test_head_size_of_its_own_and_defaults(tmp_path):
    metadata = {
        "llama.attention.key_length": None,
        "llama.attention.value_length": None,
        "llama.rope.freq_base": None,
        "llama.attention.head_count_kv": None,
    }
    config = hf_config(written(tmp_path, CONFIGS["llama"], metadata=metadata))
    assert (config["head_dim"], config["rope_theta"], config["num_key_value_heads"]) == (8, 1e4, 4)
    assert hf_config(written(tmp_path, CONFIGS["qwen3"]))["head_dim"] == 16


def test_vocabulary_size_is_the_number_of_tokens(tmp_path):
    """A mismatch with the embedding is then found where shapes are compared."""
    metadata = {"tokenizer.ggml.tokens": [str(n) for n in range(99)]}
    assert hf_config(written(tmp_path, CONFIGS["llama"], metadata=metadata))["vocab_size"] == 99
    metadata = {"llama.vocab_size": None}
    assert hf_config(written(tmp_path, CONFIGS["llama"], metadata=metadata))["vocab_size"] == 320


def llama3_divisors(theta: float, head_dim: int, factor: float, low=1.0, high=4.0, original=8192) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * pair / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path, factor):
    config = CONFIGS["llama"] | {"head_dim": 64, "rope_theta": 500000.0}
    divisors = llama3_divisors(500000.0, 64, factor)
    assert len(set(divisors.tolist())) > 3  # short, long, and some between
    file = written(tmp_path, config, extra={"rope_freqs.weight": divisors})
    config = hf_config(file)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in GGUFTensors(file, config).shapes


@pytest.mark.parametrize(
    "divisors", [llama3_divisors(1e4, 8, 8.0, low=2.0, original=64), np.ones(3, np.float32), -np.ones(4, np.float32)]
)
def test_other_scaling_by_divisors_is_refused_by_name(tmp_path, divisors):
    with pytest.raises(CheckpointError, match="rope_freqs.weight isn't Llama 3's scaling"):
        hf_config(written(tmp_path, CONFIGS["llama"], extra={"rope_freqs.weight": divisors}))


def test_scaling_by_keys(tmp_path):
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0}
    config = hf_config(written(tmp_path, CONFIGS["llama"], metadata=metadata))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    config = hf_config(written(tmp_path, CONFIGS["llama"], metadata={"llama.rope.scale_linear": 4.0}))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    config = hf_config(written(tmp_path, CONFIGS["llama"], metadata={"llama.rope.scaling.type": "none"}))
    assert config["rope_scaling"] is None
    with pytest.raises(CheckpointError, match="longrope"):
        hf_config(written(tmp_path, CONFIGS["llama"], extra={"rope_factors_long.weight": np.ones(4, np.float32)}))


@pytest.mark.parametrize(
    "metadata, words",
    [
        ({"general.architecture": "rwkv"}, "architecture 'rwkv' isn't supported; GGUF files are read for llama, qwen2"),
        ({"general.architecture": 7}, "expected a value of type str"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.block_count": None}, "lacks 'llama.block_count'"),
        ({"llama.block_count": "two"}, "'llama.block_count' is 'two', expected a value of type int"),
        ({"llama.block_count": True}, "expected a value of type int"),
        ({"llama.attention.head_count": 0}, "expected at least 1"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
        ({"llama.attention.value_length": 4}, "differs from the head size 8"),
        ({"llama.rope.dimension_count": 4}, "differs from the head size 8"),
        ({"llama.rope.freq_base": "much"}, "expected a value of type float"),
    ],
)
def test_what_can_not_be_read_is_named(tmp_path, metadata, words):
    path = write_gguf(tmp_path / "m.gguf", CONFIGS["llama"], random_tensors(CONFIGS["llama"]), metadata)
    with pytest.raises(CheckpointError, match=words):
        hf_config(read_gguf(path))


def test_counts_per_layer_are_fine_if_all_agree(tmp_path):
    metadata = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [48, 48]}
    config = hf_config(written(tmp_path, CONFIGS["llama"], metadata=metadata))
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (2, 48)


def test_gemma3_without_a_window_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="sliding_window"):
        hf_config(written(tmp_path, CONFIGS["gemma3"], metadata={"gemma3.attention.sliding_window": None}))


@pytest.mark.parametrize(
    "name", ["blk.0.ssm_in.weight", "blk.00.attn_q.weight", "blk.x.attn_q.weight", "vision.weight"]
)
def test_a_tensor_of_another_architecture_is_named(tmp_path, name):
    file = written(tmp_path, CONFIGS["llama"], extra={name: np.ones(8, np.float32)})
    with pytest.raises(CheckpointError, match=f"'{name}' isn't part of a llama"):
        GGUFTensors(file, hf_config(file))


def test_rows_that_the_heads_can_not_share(tmp_path):
    tensors = {"model.layers.0.self_attn.q_proj.weight": np.ones((32, 32), np.float32)}
    file = written(tmp_path, CONFIGS["llama"], tensors, metadata={"llama.attention.head_count": 5})
    with pytest.raises(CheckpointError, match="32 rows, which 5 heads can't share"):
        read(GGUFTensors(file, hf_config(file)), "model.layers.0.self_attn.q_proj.weight")


def test_numbers_stored_in_float32_read_as_written(tmp_path):
    config = hf_config(written(tmp_path, CONFIGS["llama"] | {"rms_norm_eps": 1e-6}))
    assert config["rms_norm_eps"] == 1e-6
    assert json.dumps(config)
