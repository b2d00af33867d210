"""Installing the GPU compiler: once, whole or not at all, and out of the environment's way."""

import importlib.metadata
import os
import subprocess
from types import SimpleNamespace

import pytest

from scripts.gpu import compiler
from scripts.gpu.compiler import TOOLS, CompilerUnavailable, ensure_compiler, find_compiler, requirements


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A pip that makes the target folder, or fails; and the commands it was called with."""
    pip = SimpleNamespace(commands=[], returncode=0)

    def run(command, **options):
        pip.commands.append(command)
        target = command[command.index("--target") + 1]
        os.makedirs(os.path.join(target, "nvidia"))
        return subprocess.CompletedProcess(command, pip.returncode, "", "no matching distribution")

    monkeypatch.setattr(compiler.subprocess, "run", run)
    monkeypatch.setattr(compiler.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    return pip


def test_it_is_installed_once(pip):
    assert find_compiler() is None
    said = []
    first = ensure_compiler(said.append)
    assert first.installed_now and (first.folder / "nvidia").is_dir() and "installing the GPU compiler" in said[0]
    again = ensure_compiler(said.append)
    assert not again.installed_now and again.folder == first.folder and len(pip.commands) == len(said) == 1
    command = pip.commands[0]
    assert "--no-deps" in command and f"nvidia-cuda-nvcc=={TOOLS['nvidia-cuda-nvcc']}" in command
    assert sorted(path.name for path in first.folder.parent.iterdir()) == [first.folder.name]


def test_a_failed_installation_leaves_nothing(pip):
    pip.returncode = 1
    with pytest.raises(CompilerUnavailable, match="no matching distribution"):
        ensure_compiler()
    assert find_compiler() is None
    pip.returncode = 0
    assert ensure_compiler().installed_now


def test_the_plugin_goes_with_the_version_of_jax(monkeypatch):
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    version = importlib.metadata.version("jax")
    assert requirements() == {"jax-cuda13-plugin": version, "jax-cuda13-pjrt": version, **TOOLS}
    monkeypatch.setattr(compiler, "find_spec", lambda name: object() if name == "jax_cuda12_plugin" else None)
    assert requirements() == TOOLS


def test_only_the_process_that_compiles_sees_it(pip, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_something_else")
    monkeypatch.setenv("HOME_OF_SOMETHING", "kept")
    made = ensure_compiler().environment(tmp_path / "dumps")
    assert str(ensure_compiler().folder) in made["PYTHONPATH"].split(os.pathsep)
    assert made["JAX_PLATFORMS"] == "cpu" and "something_else" not in made["XLA_FLAGS"]
    assert made["HOME_OF_SOMETHING"] == "kept" and (tmp_path / "dumps" / "mosaic").is_dir()
