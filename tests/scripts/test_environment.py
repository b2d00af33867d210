"""scripts/_environment.sh: whose .venv it may empty. Nothing is installed: its Python makes empty environments."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "_environment.sh"


@pytest.fixture
def project(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").touch()
    # A Python whose environments are made in no time, and in which pip fails as fast.
    base = tmp_path / "base-python"
    base.write_text(
        f'#!/bin/sh\nif [ "$1 $2" != "-m venv" ]; then exec {sys.executable} "$@"; fi\n'
        'mkdir "$3/bin"; ln -s "$(command -v false)" "$3/bin/python"\n'
    )
    base.chmod(0o755)
    return tmp_path


def set_up(project):
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source {project}/scripts/_environment.sh"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": str(project / "base-python")},
    )


def no_python(folder):
    (folder / "bin").mkdir(parents=True)


def no_pip(folder):
    venv.create(folder, with_pip=False, symlinks=True)


@pytest.mark.parametrize(
    "make, words", [(no_python, "has no working Python 3.12 or newer"), (no_pip, "has no pip")], ids=["python", "pip"]
)
def test_an_environment_of_the_users_own_is_never_emptied(project, make, words):
    make(project / ".venv")
    (project / ".venv" / "theirs").touch()
    done = set_up(project)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {project}/.venv {words}, and this script didn't make it: move or delete it")
    assert (project / ".venv" / "theirs").exists()


def test_one_of_its_own_that_was_left_unfinished_is_made_anew(project):
    no_pip(project / ".venv")
    for name in ("old", "jaxrunner-made", "jaxrunner-unfinished"):
        (project / ".venv" / name).touch()
    done = set_up(project)
    assert ".venv was left unfinished, starting over" in done.stderr and "pip failed" in done.stderr
    names = [path.name for path in (project / ".venv").iterdir()]
    assert "old" not in names and {"bin", "jaxrunner-made", "jaxrunner-unfinished"} <= set(names)
