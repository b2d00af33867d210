"""A checkpoint, opened: configuration, tokenizer and a stream of tensors, whatever the format.

Opening reads headers and JSON only, and checks all that can be checked from them. Tensors follow one at a time.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Shaped
from numpy.typing import DTypeLike

from models.config import ModelConfig
from models.errors import CheckpointError
from models.gguf_file import read_gguf
from models.gguf_model import hf_config
from models.gguf_tensors import GGUFTensors
from models.gguf_tokenizer import gguf_tokenizer
from models.hf_folder import FolderTensors, read_json, read_optional_json
from models.hf_tokenizer import folder_tokenizer
from models.tokenizer import Tokenizer


class TensorSource(Protocol):
    """Tensors by their Hugging Face names."""

    shapes: Mapping[str, tuple[int, ...]]

    def read_into(self, name: str, out: Shaped[np.ndarray, "..."]) -> None: ...

    def stored_alike(self, name: str, other: str) -> bool: ...


class Checkpoint:
    """An opened checkpoint.

    Attributes:
        source: the folder or file.
        config: the model's configuration; its eos_token_ids hold those of generation_config.json as well.
        generation_config: generation_config.json, {} if there's none.
        shapes: shape by tensor name, from the headers.
    """

    def __init__(
        self,
        source: Path,
        config: dict[str, Any],
        tensors: TensorSource,
        make_tokenizer: Callable[[], Tokenizer | None],
        generation_config: dict[str, Any] | None = None,
    ):
        self.source = str(source)
        self.generation_config = generation_config or {}
        self._tensors, self._make_tokenizer = tensors, make_tokenizer
        self.shapes = tensors.shapes
        parsed = ModelConfig.from_hf(config)
        more = _token_ids(self.generation_config.get("eos_token_id"), f"{source}: generation_config.json")
        ids = tuple(dict.fromkeys((*parsed.eos_token_ids, *more)))
        self.config = dataclasses.replace(parsed, eos_token_ids=ids)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, built at first use (0.2 to 3 s); None if it carries none.

        Raises:
            TokenizerError: it carries one that can't be read.
        """
        return self._make_tokenizer()

    def eos_token_ids(self, tokenizer: Tokenizer | None) -> tuple[int, ...]:
        """All ids that end a text: those of config, generation_config and tokenizer (its own or another) together.

        Ids beyond the vocabulary, which some configurations name, are left out: the model can't produce them.
        """
        own = tokenizer.eos_token_ids if tokenizer else ()
        known = dict.fromkeys((*self.config.eos_token_ids, *own))
        return tuple(index for index in known if index < self.config.vocab_size)

    @property
    def names(self) -> list[str]:
        """The tensors' names, layer by layer, so that what a model fuses is complete before the next begins."""

        def layer_first(name: str) -> tuple[int, str]:
            return next((int(part) for part in name.split(".") if part.isdecimal() and len(part) < 6), -1), name

        return sorted(self.shapes, key=layer_first)

    def read_into(self, name: str, out: Shaped[np.ndarray, "..."]) -> None:
        """Reads one tensor into `out`, a contiguous array of its shape, in `out`'s type and with little else in memory.

        Raises:
            CheckpointError: it's stored in a type that isn't supported, or the file changed since it was opened.
        """
        self._tensors.read_into(name, out)

    def stored_alike(self, name: str, other: str) -> bool:
        """Whether two tensors are known to be equal because they are stored as the same bytes. Keeps neither.

        Raises:
            CheckpointError: the file changed since it was opened.
        """
        return self._tensors.stored_alike(name, other)

    def tensors(self, dtype: DTypeLike = np.float32) -> Iterator[tuple[str, Shaped[np.ndarray, "..."]]]:
        """All tensors as (name, array in `dtype`), read one at a time, none kept. Raises as `read_into` does."""
        for name in self.names:
            out = np.empty(self.shapes[name], dtype)
            self.read_into(name, out)
            yield name, out


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder or a .gguf file, reading headers only.

    Raises:
        CheckpointError: missing, broken, hostile or of a kind that isn't read; the message says which and why.
        ValueError: the configuration describes a model that isn't supported, or one that contradicts the tensors.
    """
    path = Path(path)
    if path.is_dir():
        generation = read_optional_json(path / "generation_config.json")
        return Checkpoint(
            path, read_json(path / "config.json"), FolderTensors(path), lambda: folder_tokenizer(path), generation
        )
    if not path.exists():
        raise CheckpointError(f"{path} doesn't exist")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: holds tensors only; give the folder that has config.json beside it")
    file = read_gguf(path)
    config = hf_config(file)
    return Checkpoint(path, config, GGUFTensors(file, config), lambda: gguf_tokenizer(file))


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    """eos_token_id as JSON may have it: nothing, a number, or a list of numbers."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in values):
        raise CheckpointError(f"{where}: eos_token_id is {value!r}, expected a token id or a list of them")
    return tuple(values)
