"""GGUF files: the header's contents, and tensors read and dequantised piece by piece (by the `gguf` library)."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from numpy.typing import DTypeLike

from models.errors import CheckpointError
from models.flat_view import flat_view
from models.gguf_header import GGUFTensor, HeaderParser, block_sizes
from models.regular_file import check_regular

# Tensors are dequantised this many values at a time: the temporaries stay small whatever the tensor's size. With four
# times as many, the allocator gets fresh pages from the system each time, and loading takes half as long again.
_CHUNK_VALUES = 1 << 16


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header. Nothing of the tensors' data is read before `read_tensor`."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def read_tensor(self, name: str, dtype: DTypeLike = np.float32) -> Shaped[np.ndarray, "..."]:
        """Dequantise one tensor to `dtype` (float32, or rounded from it). Raises as `read_into` does."""
        out = np.empty(self.tensors[name].shape, dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: Shaped[np.ndarray, "..."]) -> None:
        """Dequantise one tensor into `out`, a contiguous array of its shape. Takes about 1 MB beside it.

        Raises:
            KeyError: no tensor has that name.
            CheckpointError: the file shrank since it was opened.
        """
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        block, block_bytes = block_sizes(tensor.type_id)
        kind = GGMLQuantizationType(tensor.type_id)
        flat = flat_view(out, tensor.shape)
        chunk = max(1, _CHUNK_VALUES // block)
        blocks = flat.size // block
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            for start in range(0, blocks, chunk):
                count = min(chunk, blocks - start)
                data = file.read(count * block_bytes)
                if len(data) != count * block_bytes:
                    raise CheckpointError(f"{self.path}: the file ends inside tensor {name!r}")
                # One long row: gguf works through rows in groups of 16, with Python in between.
                values = dequantize(np.frombuffer(data, np.uint8).reshape(1, -1), kind)
                flat[start * block : (start + count) * block] = values.reshape(-1)


def read_gguf(path: str | Path) -> GGUFFile:
    """Parse and check the header of a GGUF file (versions 2 and 3, little endian).

    Raises:
        CheckpointError: not a GGUF file, another version, a part of a split model, or a header whose counts, lengths,
            types or offsets don't fit the file. Nothing larger than the file is ever allocated.
    """
    path = Path(path)
    try:
        check_regular(path)
        if path.is_file() and path.stat().st_size == 0:
            raise CheckpointError(f"{path}: is empty")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return GGUFFile(path, *HeaderParser(path, data).parse())
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from None
