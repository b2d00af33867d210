"""resolve_model: paths, fetched names and hub ids, and errors that say what there is and how to get more."""

import huggingface_hub.constants
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

import models.resolve
from models.errors import ModelNotFoundError
from models.registry import DEFAULT_MODEL, MODELS
from models.resolve import resolve_model


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Caches of our own, and a hub that can't be reached."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_to_hub_cache(home, repo: str, *files: str):
    """What huggingface_hub's cache looks like after a download."""
    folder = home / "hub" / f"models--{repo.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    for file in files:
        (folder / "snapshots" / commit / file).write_text("{}")
    return folder / "snapshots" / commit


def test_existing_paths_are_themselves(home):
    (home / "folder").mkdir()
    (home / "folder" / "file.gguf").write_bytes(b"")
    assert resolve_model(home / "folder") == home / "folder"
    assert resolve_model("folder/file.gguf").samefile(home / "folder" / "file.gguf")


def test_a_home_path_is_expanded(home, monkeypatch):
    (home / "file.gguf").write_bytes(b"")
    monkeypatch.setenv("HOME", str(home))
    assert resolve_model("~/file.gguf") == home / "file.gguf"


def test_fetched_names(home):
    folder = home / "cache" / "jaxrunner" / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "weights.gguf").write_bytes(b"")
    assert resolve_model("mine") == folder / "weights.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_a_registered_model_that_is_not_here_says_how_to_get_it(name):
    with pytest.raises(ModelNotFoundError, match=f"`python scripts/fetch_model.py {name}`"):
        resolve_model(name)


def test_hub_ids_come_from_the_hubs_cache(home):
    snapshot = add_to_hub_cache(home, "org/name", "config.json", "model.safetensors")
    assert resolve_model("org/name").samefile(snapshot)


def test_hub_repositories_without_a_config_are_explained(home):
    add_to_hub_cache(home, "org/quants", "model.gguf")
    with pytest.raises(ModelNotFoundError, match="no config.json.*GGUF.*hf download org/quants FILE.gguf"):
        resolve_model("org/quants")


def test_the_offline_switch_is_respected_and_the_error_lists_what_there_is(home, monkeypatch):
    add_to_hub_cache(home, "org/name", "config.json")
    folder = home / "cache" / "jaxrunner" / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "weights.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("org/other")
    text = str(caught.value)
    for words in ("org/other", "offline", "  mine", "  org/name (Hugging Face cache)", DEFAULT_MODEL, "hf download"):
        assert words.lower() in text.lower()


def test_an_unreachable_hub_is_one_clear_error(monkeypatch):
    def unreachable(*arguments, **keywords):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelNotFoundError, match="can't get 'org/name'.*ConnectionError: Name or service not known"):
        resolve_model("org/name")


@pytest.mark.parametrize(
    "kind, words",
    [
        (RepositoryNotFoundError, "Check how it is spelt; if it is private, log in with `hf auth login`"),
        (GatedRepoError, "Ask for access at https://huggingface.co/org/name, then log in"),
        (LocalEntryNotFoundError, "With a network, `hf download org/name` brings it"),
    ],
)
def test_each_reason_has_its_own_advice(monkeypatch, kind, words):
    def refuse(*arguments, **keywords):
        raise kind.__new__(kind, "no")  # without the response of a server, which __init__ wants

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match=words):
        resolve_model("org/name")


def test_of_a_repository_only_the_files_of_one_format_are_downloaded(home, monkeypatch):
    there = ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"]
    there += ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/model.onnx", "README.md"]
    asked = []

    def download(repo, allow_patterns, ignore_patterns):
        files = filter_repo_objects(there + others, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        asked.extend(files)
        (home / "config.json").write_text("{}")
        return str(home)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name") == home
    assert sorted(asked) == sorted(there)


@pytest.mark.parametrize("name", [None, 7, b"org/name"])
def test_what_is_no_name_at_all(name):
    with pytest.raises(ModelNotFoundError, match="a model must be named by a string or a path, got"):
        resolve_model(name)


@pytest.mark.parametrize(
    "name", ["", "nonesuch", "./org/name", "/nowhere/model", "absent/model.gguf", "a/b/c", "a b/c", "x" * 5000, "a\0b"]
)
def test_anything_else_never_asks_the_hub(name, monkeypatch):
    monkeypatch.setattr(models.resolve, "_from_hub", lambda repo: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name)
    assert f"can't find the model {name!r}" in str(caught.value)
    assert f"To be had with `python scripts/fetch_model.py NAME`: {', '.join(MODELS)}" in str(caught.value)
