"""Hugging Face folders: single files and shards, and what makes a folder refused without opening a file too many."""

import json
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from models.errors import CheckpointError
from models.hf_folder import FolderTensors, read_json
from tests.models.tiny_checkpoints import CONFIGS, random_tensors, write_folder

CONFIG = CONFIGS["llama"]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path):
    return write_folder(tmp_path / "model", CONFIG, random_tensors(CONFIG), shards=3)


@pytest.fixture
def opened(monkeypatch):
    """Paths of all files that are opened from now on."""
    paths: list[str] = []
    real = Path.open

    def spy(self, *arguments, **keywords):
        paths.append(str(self))
        return real(self, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", spy)
    return paths


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 3])
def test_all_tensors_of_one_file_or_many(tmp_path, shards):
    tensors = random_tensors(CONFIG)
    folder = FolderTensors(write_folder(tmp_path, CONFIG, tensors, shards))
    assert folder.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        out = np.empty_like(tensor)
        folder.read_into(name, out)
        np.testing.assert_array_equal(out, tensor)


def test_a_single_file_may_have_any_name(tmp_path):
    write_folder(tmp_path, CONFIG, random_tensors(CONFIG))
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert "model.norm.weight" in FolderTensors(tmp_path).shapes
    (tmp_path / "other.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="2 safetensors files but no model.safetensors"):
        FolderTensors(tmp_path)


def test_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing: model-00002-of-00003.safetensors"):
        FolderTensors(sharded)


def test_truncated_shard_is_named(sharded):
    shard = sharded / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1024])
    with pytest.raises(CheckpointError, match="model-00003-of-00003.safetensors: the data is truncated"):
        FolderTensors(sharded)


def test_shard_without_its_tensor_is_named(sharded):
    edit_index(sharded, lambda weights: weights.update({"model.extra.weight": "model-00001-of-00003.safetensors"}))
    with pytest.raises(CheckpointError, match="'model.extra.weight' is in model-00001-of-00003.safetensors"):
        FolderTensors(sharded)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "..\\outside.safetensors",
        "{absolute}",
        "C:\\outside.safetensors",
        "C:outside.safetensors",
        "\\\\server\\share\\outside.safetensors",
        "outside.bin",
        "model\0.safetensors",
        "",
        7,
        None,
    ],
)
def test_a_path_out_of_the_folder_is_refused_before_anything_is_opened(sharded, opened, name):
    outside = sharded.parent / "outside.safetensors"
    outside.write_bytes((sharded / "model-00001-of-00003.safetensors").read_bytes())
    if name == "{absolute}":
        name = str(outside)
    edit_index(sharded, lambda weights: weights.update({"model.norm.weight": name}))
    opened.clear()
    with pytest.raises(CheckpointError, match="isn't a .safetensors file inside the folder; refused"):
        FolderTensors(sharded)
    assert not [path for path in opened if path.endswith((".safetensors", ".bin"))]


def test_shards_in_a_folder_below_and_links_of_a_cache_are_fine(sharded, tmp_path):
    """huggingface_hub's cache is made of links to files elsewhere, which the user's own machine put there."""
    (sharded / "below").mkdir()
    first = sharded / "model-00001-of-00003.safetensors"
    first.rename(sharded / "below" / "first.safetensors")
    second = sharded / "model-00002-of-00003.safetensors"
    second.rename(tmp_path / "blob")
    second.symlink_to(tmp_path / "blob")
    edit_index(
        sharded,
        lambda weights: weights.update({t: "below/first.safetensors" for t, f in weights.items() if f == first.name}),
    )
    folder = FolderTensors(sharded)
    assert folder.shapes.keys() == random_tensors(CONFIG).keys()


class Marker:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_alone_are_refused_and_never_loaded(tmp_path, name):
    marker = tmp_path / "marker"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / name).write_bytes(pickle.dumps(Marker(marker)))
    with pytest.raises(CheckpointError, match=f"only as pickles \\({name}\\), which run code"):
        FolderTensors(folder)
    assert not marker.exists()


def test_a_folder_without_weights_says_what_it_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match="neither model.safetensors nor model.safetensors.index.json"):
        FolderTensors(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}', "[]", "{", "[" * 100_000])
def test_a_broken_index_is_refused(sharded, index):
    (sharded / INDEX).write_text(index)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=INDEX):
        FolderTensors(sharded)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    "text, words", [("", "valid JSON"), ("[]", "a JSON list"), ('{"a": ' + "9" * 5000 + "}", "JSON"), ("\xff", "JSON")]
)
def test_json_that_is_no_object(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match=words):
        read_json(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="config.json is missing"):
        read_json(path)
