"""Safetensors files: a strict check of the header, and tensors read piece by piece.

A file is 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, and the data. Everything is
checked against the file's size before memory is allocated. Tensors are read with plain reads: a mapped file, as the
safetensors library has it, would count the whole checkpoint towards the process's memory a second time.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from numpy.typing import DTypeLike

from models.errors import CheckpointError
from models.flat_view import flat_view
from models.regular_file import check_regular

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Types that a header may name but that are no plain weights: bits per value, so that spans can be checked.
_OTHER_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32}
_OTHER_BITS |= {"I64": 64, "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "C64": 64}
_MAX_HEADER = 100_000_000
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class SafetensorsTensor:
    """One entry of the header; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """A checked header. Nothing of the data is read before `read_tensor`."""

    path: Path
    tensors: Mapping[str, SafetensorsTensor]

    def read_tensor(self, name: str, dtype: DTypeLike = np.float32) -> Shaped[np.ndarray, "..."]:
        """Read one tensor as `dtype`. Raises as `read_into` does."""
        out = np.empty(self.tensors[name].shape, dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: Shaped[np.ndarray, "..."]) -> None:
        """Read one tensor into `out`, a contiguous array of its shape, converted to its type (nearest, ties to even).

        Takes less than 1 MB beside it.

        Raises:
            KeyError: no tensor has that name.
            CheckpointError: it's stored as integers or in 8 bits, or the file shrank since it was opened.
        """
        tensor = self.tensors[name]
        stored = _DTYPES.get(tensor.dtype)
        if stored is None:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is stored as {tensor.dtype}; {', '.join(_DTYPES)} are supported"
            )
        flat = flat_view(out, tensor.shape)
        step = _CHUNK_BYTES // stored.itemsize
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            for start in range(0, flat.size, step):
                part = flat[start : start + step]
                # In its own type, it's read to where it stays; otherwise it's converted on the way.
                piece = part if part.dtype == stored else np.empty(part.size, stored)
                if file.readinto(piece.view(np.uint8).data) != piece.nbytes:
                    raise CheckpointError(f"{self.path}: the file ends inside tensor {name!r}")
                if piece is not part:
                    part[...] = piece


def stored_alike(file: SafetensorsFile, name: str, other: SafetensorsFile, other_name: str) -> bool:
    """Whether two tensors are the same bytes of one type and shape, read side by side in pieces of less than 1 MB.

    Raises:
        KeyError: no tensor has that name.
        CheckpointError: a file shrank since it was opened.
    """
    a, b = file.tensors[name], other.tensors[other_name]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with file.path.open("rb") as left, other.path.open("rb") as right:
        left.seek(a.offset)
        right.seek(b.offset)
        for start in range(0, a.nbytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, a.nbytes - start)
            pieces = left.read(size), right.read(size)
            for at, label, piece in zip((file, other), (name, other_name), pieces, strict=True):
                if len(piece) != size:
                    raise CheckpointError(f"{at.path}: the file ends inside tensor {label!r}")
            if pieces[0] != pieces[1]:
                return False
    return True


def read_safetensors(path: str | Path) -> SafetensorsFile:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: the header's length exceeds the file, it isn't a JSON object of the right form, a span isn't
            shape × dtype, spans overlap or leave gaps, or the data is shorter or longer than the spans say.
    """
    path = Path(path)
    try:
        check_regular(path)
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(8)
            (length,) = struct.unpack("<Q", head) if len(head) == 8 else (0,)
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{path}: announces a header of {length} bytes, the file has {size} (at most {_MAX_HEADER} are "
                    "read); it's truncated or no safetensors file"
                )
            header = _parse_json(path, file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from None
    data_start = 8 + length
    tensors = {name: _entry(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"}
    _check_spans(path, list(tensors.values()), data_start, size)
    return SafetensorsFile(path, tensors)


def _parse_json(path: Path, data: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise CheckpointError(f"{path}: a name appears twice in the header")
        return entries

    try:
        header = json.loads(data.decode(), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, numbers of thousands of digits, deep nesting
        raise CheckpointError(f"{path}: the header isn't JSON ({type(error).__name__}); the file is broken") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a JSON {type(header).__name__}, expected an object")
    return header


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(path: Path, name: str, entry: Any, data_start: int) -> SafetensorsTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if (
        not isinstance(dtype, str)
        or not (isinstance(shape, list) and all(_is_count(n) for n in shape))
        or not (isinstance(span, list) and len(span) == 2 and all(_is_count(n) for n in span))
    ):
        raise CheckpointError(f"{path}: the header's entry for {name!r} is malformed: {str(entry)[:200]}")
    bits = _DTYPES[dtype].itemsize * 8 if dtype in _DTYPES else _OTHER_BITS.get(dtype)
    if bits is None:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown dtype {dtype[:40]!r}")
    begin, end = span
    need = math.prod(shape) * bits
    if (end - begin) * 8 != need:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {shape} in {dtype} needs {need // 8} bytes, its span [{begin}, {end}) "
            f"has {end - begin}"
        )
    return SafetensorsTensor(name, dtype, tuple(shape), data_start + begin, end - begin)


def _check_spans(path: Path, tensors: list[SafetensorsTensor], data_start: int, size: int) -> None:
    """The spans must cover the data exactly: no overlap, no gap, nothing missing, nothing behind."""
    end = data_start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            kind = "overlaps the one before it" if tensor.offset < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {tensor.name!r} {kind} (data offset {tensor.offset - data_start})")
        end += tensor.nbytes
    if end != size:
        what = "truncated" if size < end else "followed by bytes that belong to no tensor"
        raise CheckpointError(f"{path}: the data is {what}: the header tells of {end} bytes, the file has {size}")
