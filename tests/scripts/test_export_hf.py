"""scripts/export_hf.py: what it writes is the same model in another format."""

import numpy as np
import pytest

from models.checkpoint import open_checkpoint
from scripts import export_hf
from tests.models.tiny_checkpoints import CONFIGS, byte_level_vocabulary, random_tensors, write_folder, write_gguf


def test_the_folder_holds_the_models_weights_configuration_and_tokenizer(tmp_path, capsys):
    source = tmp_path / "tiny.gguf"
    write_gguf(source, CONFIGS["llama"], random_tensors(CONFIGS["llama"]), metadata=byte_level_vocabulary())
    folder = tmp_path / "new" / "tiny"
    assert export_hf.main([str(source), str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    before, after = open_checkpoint(source), open_checkpoint(folder)
    assert after.config == before.config
    theirs = dict(after.tensors())
    for name, tensor in before.tensors():
        assert np.array_equal(theirs.pop(name), tensor), name
    assert not theirs
    assert after.tokenizer.encode("any text") == before.tokenizer.encode("any text")


def test_a_folder_is_left_where_it_is(tmp_path):
    folder = write_folder(tmp_path / "model", CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    assert export_hf.export(str(folder), tmp_path / "copy") == folder
    assert not (tmp_path / "copy").exists()


def test_what_is_wrong_is_said_in_one_message(tmp_path, capsys):
    assert export_hf.main(["no-such-model", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("export_hf: can't find the model 'no-such-model'")
    with pytest.raises(SystemExit):
        export_hf.main(["no-such-model"])
    assert "'no-such-model' has none" in capsys.readouterr().err
