"""Executables in a folder: compiled once, loaded by later runs without tracing, on the same kind of device only."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jaxlib
from jax.experimental import serialize_executable

import models
import pallas_kernels
from jaxrunner.compilation_cache import count_processors, without_compilation_cache

_MANIFEST = "executables.json"
# Whatever is in these decides what a program computes.
_SOURCES = (Path(__file__).parent, *(Path(package.__path__[0]) for package in (models, pallas_kernels)))


class SavedExecutablesError(ValueError):
    """Saved executables that don't fit: the message says what differs."""


class Saveable(Protocol):
    @property
    def executable(self) -> Any: ...

    @property
    def fresh(self) -> bool: ...

    @property
    def compile_anew(self) -> Callable[[], Any] | None: ...


def save_executables(folder: Path, compiled: Mapping[str, Saveable], fingerprint: Any) -> Path:
    """Writes each executable and a manifest of what they fit.

    One that XLA did not make for its entry is compiled again: what has been through a cache, XLA's CPU backend
    serialises without its functions, and what JAX finds in memory may have been.

    Args:
        fingerprint: what the programs depend on: the step's functions and the abstract arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    # A copy, since some may still be compiled in the background.
    for number, (name, entry) in enumerate(dict(compiled).items()):
        files[name] = f"{number}.bin"
        executable = entry.executable
        if not entry.fresh and entry.compile_anew is not None:
            with without_compilation_cache():
                executable = entry.compile_anew()
        payload = serialize_executable.serialize(executable)
        (folder / files[name]).write_bytes(pickle.dumps(payload))
    manifest = {**_facts(fingerprint), "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return folder


class SavedExecutables:
    """A folder of executables that fit this process.

    Attributes:
        names: of those there are.

    Raises:
        SavedExecutablesError: there are none in the folder, or they fit another device kind, number of processors, JAX
            version, model, limits or project version.
    """

    def __init__(self, folder: Path, fingerprint: Any) -> None:
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise SavedExecutablesError(f"no saved executables in {folder}: {error}") from error
        for fact, here in _facts(fingerprint).items():
            there = manifest.get(fact)
            if there != here:
                raise SavedExecutablesError(
                    f"executables in {folder} do not fit: their {fact} is {there!r}, here it is {here!r}. Compile anew"
                    " and save again"
                )
        self._folder, self._files = folder, manifest["files"]
        self.names = tuple(self._files)

    def load(self, name: str) -> Any | None:
        """The executable of that name, or None."""
        if name not in self._files:
            return None
        payload, in_tree, out_tree = pickle.loads((self._folder / self._files[name]).read_bytes())
        return serialize_executable.deserialize_and_load(payload, in_tree, out_tree)


def _facts(fingerprint: Any) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device kind": device.device_kind,
        # XLA divides a program's work among them when it compiles for CPUs.
        "number of processors": count_processors() if device.platform == "cpu" else None,
        "JAX version": jax.__version__,
        "jaxlib version": jaxlib.__version__,
        "model and limits": hashlib.sha256(repr(fingerprint).encode()).hexdigest(),
        "project sources": _sources_digest(),
    }


def _sources_digest() -> str:
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder.parent).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
