"""The header of a GGUF file, parsed strictly.

It's parsed here rather than by `gguf.GGUFReader`, for two reasons: every count, length and offset is checked against
the file's size before anything is allocated, and the 49,152 strings of a small vocabulary alone took the library 2.2 s
(here, 0.1 s). The layout is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table. `shape` is in NumPy's order (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    nbytes: int


def block_sizes(type_id: int) -> tuple[int, int]:
    """Values and bytes in one block of a quantisation type."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]


class HeaderParser:
    """A cursor over the mapped file. Every step checks that it stays inside."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.size, self.at = path, data, len(data), 0

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; the file is broken, truncated, or not what it claims to be")

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        """Metadata by key, and the tensor table by name."""
        if self.data[:4] != b"GGUF":
            raise CheckpointError(f"{self.path}: begins with {self.data[:4]!r}, a GGUF file begins with b'GGUF'")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            why = "a big-endian file" if version in (2 << 24, 3 << 24) else "only versions 2 and 3 are supported"
            raise CheckpointError(f"{self.path}: GGUF version {version}: {why}; convert the model anew with llama.cpp")
        num_tensors, num_keys = self.scalar("Q"), self.scalar("Q")
        # The least that a key (length, type, one byte) and a tensor (length, dims, one dim, type, offset) can take.
        if num_keys * 13 + num_tensors * 32 > self.size - self.at:
            raise self.fail(f"the header announces {num_keys} keys and {num_tensors} tensors in {self.size} bytes")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string("a key")
            if key in metadata:
                raise self.fail(f"key {key!r} appears twice")
            metadata[key] = self.value(self.scalar("I"), key)
        if metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{self.path}: is one part of a model split into {metadata['split.count']} files; "
                "join the parts first: llama-gguf-split --merge FIRST_PART OUTPUT"
            )
        return metadata, self.tensor_table(num_tensors, metadata.get("general.alignment", 32))

    def take(self, count: int, what: str) -> int:
        """Move on by `count` bytes; returns where they start."""
        start = self.at
        if count > self.size - start:
            raise self.fail(f"{what} takes {count} bytes at offset {start}, the file has {self.size}")
        self.at = start + count
        return start

    def scalar(self, kind: str) -> Any:
        return struct.unpack_from("<" + kind, self.data, self.take(struct.calcsize("<" + kind), "a number"))[0]

    def string(self, what: str) -> str:
        length = self.scalar("Q")
        start = self.take(length, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} at offset {start} is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.fail(f"key {key!r} has value type {kind}, there are types 0 to 12")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return self.strings(count, key)
        if kind not in _SCALARS:
            raise self.fail(f"key {key!r} is an array of type {kind}; arrays of numbers and strings are supported")
        start = self.take(count * struct.calcsize("<" + _SCALARS[kind]), f"the array of {key!r}")
        return np.frombuffer(self.data[start : self.at], np.dtype(_SCALARS[kind]).newbyteorder("<"))

    def strings(self, count: int, key: str) -> list[str]:
        """An array of strings: the one loop that is long (a vocabulary), so it inlines `string`."""
        if count * 8 > self.size - self.at:
            raise self.fail(f"the array of {key!r} announces {count} strings")
        data, at, size = self.data, self.at, self.size
        length_at = struct.Struct("<Q").unpack_from
        out = []
        try:
            for _ in range(count):
                (length,) = length_at(data, at)
                end = at + 8 + length
                if end > size:
                    raise self.fail(f"a string of {key!r} takes {length} bytes at offset {at}, the file has {size}")
                out.append(data[at + 8 : end].decode())
                at = end
        except struct.error:
            raise self.fail(f"the array of {key!r} ends after {len(out)} of {count} strings") from None
        except UnicodeDecodeError:
            raise self.fail(f"string {len(out)} of {key!r} is not UTF-8") from None
        self.at = at
        return out

    def tensor_table(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {alignment!r}, it must be a power of two of at least 8")
        entries = []
        for _ in range(count):
            name = self.string("a tensor's name")
            dims = self.scalar("I")
            if not 1 <= dims <= 4:
                raise self.fail(f"tensor {name!r} has {dims} dimensions, 1 to 4 are allowed")
            shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
            entries.append((name, shape, self.scalar("I"), self.scalar("Q")))
        data_start = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise self.fail(f"tensor {name!r} appears twice")
            nbytes = self.tensor_bytes(name, shape, type_id)
            if offset % alignment or data_start + offset + nbytes > self.size:
                raise self.fail(
                    f"tensor {name!r} takes {nbytes} bytes at data offset {offset} (alignment {alignment}), "
                    f"the data is {max(0, self.size - data_start)} bytes long"
                )
            tensors[name] = GGUFTensor(name, shape, type_id, data_start + offset, nbytes)
        end, previous = 0, ""
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            if tensor.offset < end:
                raise self.fail(f"tensors {previous!r} and {tensor.name!r} overlap")
            end, previous = tensor.offset + tensor.nbytes, tensor.name
        return tensors

    def tensor_bytes(self, name: str, shape: tuple[int, ...], type_id: int) -> int:
        from gguf.constants import GGMLQuantizationType

        if type_id not in GGMLQuantizationType.__members__.values():
            raise self.fail(f"tensor {name!r} has quantisation type {type_id}, which the gguf library doesn't know")
        if not _can_dequantize(type_id):
            kind = GGMLQuantizationType(type_id).name
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is stored as {kind}, which the gguf library can't dequantise; "
                "take a file in another quantisation, such as Q8_0 or Q4_K_M"
            )
        block, block_bytes = block_sizes(type_id)
        values = math.prod(shape)
        if values == 0 or shape[-1] % block:
            raise self.fail(f"tensor {name!r} of shape {shape} doesn't divide into blocks of {block} values")
        return values // block * block_bytes


@cache
def _can_dequantize(type_id: int) -> bool:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    block_bytes = block_sizes(type_id)[1]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), GGMLQuantizationType(type_id))
    except NotImplementedError:
        return False
    return True
