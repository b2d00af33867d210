"""A Hugging Face model folder: its JSON files and its safetensors, one file or shards named by an index."""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from jaxtyping import Shaped

from models.errors import CheckpointError
from models.regular_file import check_regular
from models.safetensors_file import SafetensorsFile, read_safetensors, stored_alike

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_JSON = 256 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: missing, unreadable, not JSON, not an object.
    """
    try:
        check_regular(path)
        if path.stat().st_size > _MAX_JSON:
            raise CheckpointError(f"{path}: is larger than {_MAX_JSON >> 20} MiB, that is no {path.name}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from None
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, numbers of thousands of digits, deep nesting
        raise CheckpointError(f"{path}: isn't valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`; a missing file is an empty object."""
    return read_json(path) if path.exists() else {}


class FolderTensors:
    """The tensors of a folder's safetensors, by name. Opening checks every header, it reads no data."""

    def __init__(self, folder: Path):
        """
        Raises:
            CheckpointError: no safetensors (pickles are refused: loading one runs code), a shard that is missing,
                broken, truncated or named outside the folder, or that lacks a tensor the index promises.
        """
        self._files = _indexed(folder) if (folder / _INDEX).exists() else _single(folder)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: file.tensors[name].shape for name, file in self._files.items()
        }

    def read_into(self, name: str, out: Shaped[np.ndarray, "..."]) -> None:
        """Reads one tensor into `out`, a contiguous array of its shape, converted to its type."""
        self._files[name].read_into(name, out)

    def stored_alike(self, name: str, other: str) -> bool:
        """Whether two tensors are the same bytes of one type and shape; they are read in pieces, none is kept."""
        return stored_alike(self._files[name], name, self._files[other], other)


def _single(folder: Path) -> dict[str, SafetensorsFile]:
    path = folder / _SINGLE
    if not path.exists():
        others = sorted(folder.glob("*.safetensors"))
        if len(others) != 1:
            raise _no_weights(folder, others)
        path = others[0]
    file = read_safetensors(path)
    return dict.fromkeys(file.tensors, file)


def _no_weights(folder: Path, others: list[Path]) -> CheckpointError:
    if others:
        return CheckpointError(
            f"{folder}: has {len(others)} safetensors files but no {_SINGLE} and no {_INDEX} that says which belong "
            "to the model; add the index or keep one file"
        )
    pickles = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
    if pickles:
        return CheckpointError(
            f"{folder}: has its weights only as pickles ({', '.join(pickles[:3])}), which run code when they're loaded "
            "and are therefore never opened; convert the model to safetensors"
        )
    return CheckpointError(f"{folder}: has no weights: neither {_SINGLE} nor {_INDEX} is there")


def _indexed(folder: Path) -> dict[str, SafetensorsFile]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / _INDEX}: has no weight_map")
    # All names are judged before the first file is opened.
    shards = {name: None for name in weight_map.values() if _check_shard_name(folder, name)}
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {_INDEX} names {len(shards)} files, missing: {', '.join(missing[:5])}; download them again"
        )
    files = {name: read_safetensors(folder / name) for name in shards}
    for tensor, shard in weight_map.items():
        if tensor not in files[shard].tensors:
            raise CheckpointError(f"{folder}: {_INDEX} says that {tensor!r} is in {shard}, which doesn't hold it")
    return {tensor: files[shard] for tensor, shard in weight_map.items()}


def _check_shard_name(folder: Path, name: Any) -> bool:
    """A shard is named relative to its folder and lies in it, whatever the system's idea of a path."""
    if isinstance(name, str):
        outside = any(
            path.is_absolute() or path.drive or path.root or ".." in path.parts
            for path in (PurePosixPath(name), PureWindowsPath(name))
        )
        if not outside and name.endswith(".safetensors") and "\0" not in name:
            return True
    raise CheckpointError(
        f"{folder / _INDEX}: names the file {name!r}, which isn't a .safetensors file inside the folder; refused"
    )
