"""Checkpoints as a whole: the same model from both formats, streamed in little memory, wrong ones refused early."""

import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import models.assign
from models.checkpoint import open_checkpoint
from models.errors import CheckpointError
from models.gguf_file import read_gguf
from models.gguf_tokenizer import build_backend
from models.weights import load_params
from tests.models.tiny_checkpoints import (
    CONFIGS,
    byte_level_vocabulary,
    random_tensors,
    sentencepiece_vocabulary,
    write_folder,
    write_gguf,
)

ROOT = Path(__file__).parents[2]


def parameters(decoder) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(decoder))
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", CONFIGS)
def test_both_formats_load_to_the_same_parameters(tmp_path, arch, dtype):
    """llama with 4 query and 2 key heads: its file's rows are permuted. Gemma: its file's norms are plus one."""
    config, tensors = CONFIGS[arch], random_tensors(CONFIGS[arch])
    folder = open_checkpoint(write_folder(tmp_path / "folder", config, tensors, shards=2))
    file = open_checkpoint(write_gguf(tmp_path / "file.gguf", config, tensors))
    assert file.config == folder.config
    left, right = parameters(load_params(folder, dtype)), parameters(load_params(file, dtype))
    assert left.keys() == right.keys() and len(left) > 10
    for name, value in left.items():
        assert value.dtype == dtype
        if arch == "gemma3" and "norm" in name:  # (w + 1) - 1 in float32, before any rounding
            step = 1e-7 if dtype == "float32" else 1e-2 * np.abs(value.astype(np.float32)).max()
            np.testing.assert_allclose(value.astype(np.float32), right[name].astype(np.float32), rtol=0, atol=step)
        else:
            np.testing.assert_array_equal(value, right[name])
    rounded = {value.tobytes() for value in left.values()}
    embedding = tensors["model.embed_tokens.weight"].astype(np.dtype(dtype))
    assert embedding.tobytes() in rounded


def test_the_default_model_loads(model_path):
    checkpoint = open_checkpoint(model_path("smollm2-135m-instruct"))
    decoder = load_params(checkpoint, "bfloat16")
    assert sum(value.size for value in parameters(decoder).values()) == 134_515_008
    assert checkpoint.eos_token_ids(checkpoint.tokenizer) == (2,) and checkpoint.config.tie_word_embeddings
    assert checkpoint.tokenizer is checkpoint.tokenizer and checkpoint.tokenizer.vocab_size == 49152
    assert checkpoint.source.endswith(".gguf") and checkpoint.generation_config == {}


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_stream_in_the_asked_type_layer_by_layer(tmp_path, stored):
    config = CONFIGS["llama"]
    tensors = {name: tensor.astype(stored) for name, tensor in random_tensors(config).items()}
    checkpoint = open_checkpoint(write_folder(tmp_path, config, tensors))
    for target in (np.float32, ml_dtypes.bfloat16):
        names = []
        for name, tensor in checkpoint.tensors(target):
            names.append(name)
            assert tensor.dtype == target
            np.testing.assert_array_equal(tensor, tensors[name].astype(target))
        assert sorted(names) == sorted(tensors)
        layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
        assert layers == sorted(layers)


def test_end_ids_of_config_generation_config_and_tokenizer_are_united(tmp_path):
    file = write_gguf(tmp_path / "t.gguf", CONFIGS["llama"], {}, byte_level_vocabulary())
    folder = write_folder(tmp_path / "folder", CONFIGS["llama"] | {"eos_token_id": 7}, random_tensors(CONFIGS["llama"]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 7], "temperature": 0.6}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tokenizer is None
    assert checkpoint.config.eos_token_ids == checkpoint.eos_token_ids(None) == (7, 8)
    assert checkpoint.generation_config["temperature"] == 0.6
    build_backend(read_gguf(file)).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.eos_token_ids(checkpoint.tokenizer) == (7, 8, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "8"}))
    with pytest.raises(CheckpointError, match="generation_config.json: eos_token_id is '8'"):
        open_checkpoint(folder)


def test_a_file_with_sentencepiece_and_end_of_turn(tmp_path):
    keys = sentencepiece_vocabulary() | {"tokenizer.ggml.eot_token_id": 5}
    path = write_gguf(tmp_path / "m.gguf", CONFIGS["llama"], random_tensors(CONFIGS["llama"]), keys)
    checkpoint = open_checkpoint(path)
    assert checkpoint.eos_token_ids(checkpoint.tokenizer) == (2, 5)


def refusal(path: Path) -> str:
    """What opening and loading it says, which must come quickly and without taking memory for the model."""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(ValueError) as caught:
            load_params(open_checkpoint(path))
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.perf_counter() - start < 1 and peak < 5_000_000
    return str(caught.value)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"vocab_size": 99}, ["weight", "(320, 32)", "(99, 32)"]),
        ({"hidden_size": 2**40}, ["hidden_size", str(2**40)]),
        ({"vocab_size": 2**60}, ["vocab_size", str(2**60)]),
        ({"num_hidden_layers": 2**30}, ["num_hidden_layers", str(2**30)]),
        ({"hidden_size": 64}, ["weight", "(320, 64)"]),
        ({"num_hidden_layers": 3}, ["lacks", "model.layers.2."]),
        ({"num_hidden_layers": 1}, ["model.layers.1.", "isn't part of"]),
        ({"hidden_size": -1}, ["hidden_size", "-1"]),
        ({"model_type": "mamba"}, ["mamba"]),
    ],
)
def test_configuration_and_tensors_that_contradict_are_refused_before_allocating(tmp_path, change, words):
    folder = write_folder(tmp_path, CONFIGS["llama"] | change, random_tensors(CONFIGS["llama"]))
    message = refusal(folder)
    for word in words:
        assert word in message


def test_vocabulary_and_embedding_of_a_file_must_agree(tmp_path):
    keys = byte_level_vocabulary()
    keys = {name: value[:99] if isinstance(value, list) else value for name, value in keys.items()}
    path = write_gguf(tmp_path / "m.gguf", CONFIGS["llama"], random_tensors(CONFIGS["llama"]), keys)
    message = refusal(path)
    assert str(path) in message and "(320, 32)" in message and "(99, 32)" in message


def test_rope_scaling_that_the_model_lacks_is_refused_by_name(tmp_path):
    keys = {"llama.rope.scaling.type": "invented", "llama.rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "m.gguf", CONFIGS["llama"], random_tensors(CONFIGS["llama"]), keys)
    assert "invented" in refusal(path)


def test_a_head_that_is_neither_there_nor_tied_is_named(tmp_path):
    tensors = random_tensors(CONFIGS["llama"])
    del tensors["lm_head.weight"]
    assert "lm_head.weight" in refusal(write_folder(tmp_path, CONFIGS["llama"], tensors))


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="doesn't exist"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="config.json is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="give the folder"):
        open_checkpoint(tmp_path / "model.safetensors")
    (tmp_path / "model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="begins with b'PK'"):
        open_checkpoint(tmp_path / "model.bin")


def test_another_dtype_is_refused(tmp_path):
    folder = write_folder(tmp_path, CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    with pytest.raises(ValueError, match="float16.*expected one of float32, bfloat16"):
        load_params(open_checkpoint(folder), "float16")


def test_old_rope_buffers_are_passed_over(tmp_path):
    tensors = random_tensors(CONFIGS["llama"]) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, "f4")}
    load_params(open_checkpoint(write_folder(tmp_path, CONFIGS["llama"], tensors)))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tied_head_that_is_stored_too_takes_no_memory(tmp_path, monkeypatch, shards):
    allocated = []
    allocate = models.assign._aligned
    monkeypatch.setattr(
        models.assign, "_aligned", lambda shape, dtype: allocated.append(shape) or allocate(shape, dtype)
    )
    config = CONFIGS["llama"] | {"tie_word_embeddings": True}
    tensors = random_tensors(config)
    embedding = tensors["model.embed_tokens.weight"]
    other = embedding.copy()
    other[-1, -1] += 1
    heads = []
    for number, head in enumerate((embedding, other, embedding.astype(np.float16))):
        folder = write_folder(tmp_path / str(number), config, tensors | {"lm_head.weight": head}, shards)
        allocated.clear()
        heads.append(load_params(open_checkpoint(folder)).lm_head is not None)
        assert allocated.count(embedding.shape) == (1 if head is embedding else 2)
    assert heads == [False, True, True]


MEASURE = """
import gc
import sys
import jax, gguf, numpy
from flax import nnx
from models.checkpoint import open_checkpoint
from models.weights import load_params

def memory(kind):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(kind))

jax.device_put(numpy.zeros(4)).block_until_ready()
before = memory("VmRSS")
for dtype in ("bfloat16", "float32"):
    for path in sys.argv[1:]:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew from what is in use now
        leaves = jax.tree.leaves(nnx.state(load_params(open_checkpoint(path), dtype)))
        print((memory("VmHWM") - before) / sum(leaf.nbytes for leaf in jax.block_until_ready(leaves)))
        del leaves
        gc.collect()  # a module's parts refer to each other
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from /proc")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU the weights are in its memory")
def test_peak_memory_is_under_1_3_times_the_weights(tmp_path):
    """Nine tenths of it in one tensor, stored as float32: the hardest case, a second copy of that would show.

    The folder even holds one: a head that is tied to it.
    """
    size = {"hidden_size": 512, "vocab_size": 65536, "intermediate_size": 2048, "num_attention_heads": 8}
    config = CONFIGS["llama"] | size | {"head_dim": 64, "tie_word_embeddings": True}
    tensors = random_tensors(config)
    both = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    paths = [write_folder(tmp_path / "folder", config, both), write_gguf(tmp_path / "m.gguf", config, tensors)]
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    ratios = [float(line) for line in run.stdout.split()]
    assert len(ratios) == 4 and all(0.9 < ratio < 1.3 for ratio in ratios), ratios


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path, name):
    folder = write_folder(tmp_path / "folder", CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: is a pipe, a socket or a device, expected a file"):
        _ = open_checkpoint(folder).tokenizer


def test_a_pipe_and_a_device_are_no_gguf_file(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")
    for path in (tmp_path / "m.gguf", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="is a pipe, a socket or a device"):
            open_checkpoint(path)


def test_end_ids_beyond_the_vocabulary_are_left_out(tmp_path):
    folder = write_folder(tmp_path, CONFIGS["llama"] | {"eos_token_id": [7, 320]}, random_tensors(CONFIGS["llama"]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [99999, 319]}))
    assert open_checkpoint(folder).eos_token_ids(None) == (7, 319)
