"""The persistent cache keeps small and quick programs too, also in a folder that JAX was set to before."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxrunner.compilation_cache import count_processors, use_compilation_cache

NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def jax_of_a_user(tmp_path: Path) -> Iterator[Path]:
    """JAX as JAX_COMPILATION_CACHE_DIR alone leaves it."""
    was = {name: getattr(jax.config, name) for name in NAMES}
    for name, value in zip(NAMES, (str(tmp_path), 1.0, 0), strict=True):
        jax.config.update(name, value)
    yield tmp_path
    for name, value in was.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("given", [None, "same", "other"])
def test_every_program_is_kept(jax_of_a_user: Path, given: str | None) -> None:
    folder = None if given is None else jax_of_a_user if given == "same" else jax_of_a_user / "other"
    use_compilation_cache(folder)
    expected = jax_of_a_user if folder is None else folder / f"processors-{count_processors()}"
    assert [getattr(jax.config, name) for name in NAMES] == [str(expected), 0.0, 0]


def test_programs_divided_among_other_numbers_of_processors_are_kept_apart(
    jax_of_a_user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = set()
    for processors in ({0}, {0, 1, 5}, {3}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, processors=processors: processors, raising=False)
        use_compilation_cache(jax_of_a_user / "other")
        folders.add(jax.config.jax_compilation_cache_dir)
    assert folders == {str(jax_of_a_user / "other" / f"processors-{n}") for n in (1, 3)}


def test_false_leaves_jax_alone(jax_of_a_user: Path) -> None:
    use_compilation_cache(False)
    assert [getattr(jax.config, name) for name in NAMES] == [str(jax_of_a_user), 1.0, 0]


def test_a_folder_that_can_not_be_made_is_named(jax_of_a_user: Path) -> None:
    (jax_of_a_user / "file").touch()
    with pytest.raises(ValueError, match="compilation_cache: the folder .*below.* can't be made .*Not a directory"):
        use_compilation_cache(jax_of_a_user / "file" / "below")
    assert jax.config.jax_compilation_cache_dir == str(jax_of_a_user)
