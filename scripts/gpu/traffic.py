"""Bytes that a program's Pallas kernels move, by the shapes that they are called with."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_BYTES |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_TARGETS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")


def kernel_bytes(hlo: str, in_place: Sequence[tuple[int, ...]]) -> int:
    """Bytes read and written by all Pallas kernels of a program, but for arrays of the shapes `in_place`.

    Each argument and each result counts whole and once. That is what a kernel moves which goes through its arrays; of
    a cache or a block table it reads what the step's lengths say, so their shapes belong into `in_place`.
    """
    moved = 0
    for line in hlo.splitlines():
        if not any(f'custom_call_target="{target}"' in line for target in _TARGETS):
            continue
        results = line.partition(" custom-call(")[0].partition(" = ")[2]
        operands = re.search(r"operand_layout_constraints=\{(.*?)\}, \w+=", line)
        for dtype, dims in _ARRAY.findall(results) + (_ARRAY.findall(operands[1]) if operands else []):
            shape = tuple(int(n) for n in dims.split(",") if n)
            if shape not in in_place:
                moved += _BYTES.get(dtype, 0) * math.prod(shape)
    return moved


def least_bytes(tokens: int, keys: int, heads: int, kv_heads: int, head_dim: int, itemsize: int = 2) -> int:
    """What a layer must move between its projections: the product for queries, keys and values read, keys and values
    written into the cache, every key and value of every request read, the result written.

    Args:
        keys: of all requests together, this step's included; those are on the chip already when they are attended to.
    """
    projection, result = tokens * (heads + 2 * kv_heads), tokens * heads
    return itemsize * head_dim * (projection + 2 * tokens * kv_heads + 2 * (keys - tokens) * kv_heads + result)
