"""JAX's persistent compilation cache, switched on so that it is really used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import jax
import platformdirs
from jax.experimental.compilation_cache import compilation_cache


def use_compilation_cache(folder: Path | str | Literal[False] | None) -> None:
    """Keeps compiled programs in ``folder`` between runs, whatever their size and however fast they compiled.

    On CPUs they stand in a folder below it for each number of processors: XLA divides a program's work among as many as
    the process may use when it compiles, but JAX looks programs up without that number. A step of eight requests took
    12 % longer on two processors with a program that a process pinned to one had left there.

    Args:
        folder: None: the folder JAX is set to already, as it is; else one in the user's cache folder. False: leave JAX
            alone.

    Raises:
        ValueError: the folder can't be made.

    JAX decides once, at the first compilation, whether there is a cache; an array made before would settle it. So the
    decision is reset here. Its thresholds (one second, some bytes) would keep most programs of a small model out.
    """
    if folder is False:
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    if folder is None and jax.config.jax_compilation_cache_dir:
        return
    path = Path(folder) if folder is not None else platformdirs.user_cache_path("jaxrunner") / "compiled"
    if jax.default_backend() == "cpu":
        path = path / f"processors-{count_processors()}"
    if jax.config.jax_compilation_cache_dir == str(path):
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"compilation_cache: the folder {path} can't be made ({error.strerror}): name another, or False for none"
        ) from None
    jax.config.update("jax_compilation_cache_dir", str(path))
    compilation_cache.reset_cache()


def count_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compilations in the block neither look into the persistent cache nor write to it."""
    was = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was)
        compilation_cache.reset_cache()
