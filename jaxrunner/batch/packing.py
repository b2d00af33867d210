"""From Python's lists and dictionaries into int32 arrays, by the fastest way there is.

``struct`` packs a list of integers twice as fast as NumPy reads it, and ``itemgetter`` looks keys up twice as fast as
``map`` does. At a thousand requests a step, reading lists is most of what the host does.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64


@cache
def packer(n: int) -> Callable[..., None]:
    """pack_into(buffer, offset in bytes, *values) for n integers of 32 bits; anything else is a struct.error."""
    return struct.Struct(f"{n}i").pack_into


def pack(out: Int32[np.ndarray, "size"], values: Sequence[int], at: int = 0) -> Int32[np.ndarray, "n"]:
    """Writes ``values`` to ``out`` from ``at`` on; returns that part of ``out``."""
    n = len(values)
    packer(n)(out, 4 * at, *values)
    return out[at : at + n]


TOKENS_ROOM = 63
_ZEROS = (0,) * TOKENS_ROOM


def pack_tokens(out: Int32[np.ndarray, "size"], values: Sequence[int], at: int) -> Int32[np.ndarray, "n"]:
    """As ``pack``, for lists of any length: ``out`` needs room for ``TOKENS_ROOM`` more entries.

    Making a packer takes longer than packing. So there are some for multiples of 64 only; what is behind is zeros.
    """
    n = len(values)
    more = -n % (TOKENS_ROOM + 1)
    packer(n + more)(out, 4 * at, *values, *_ZEROS[:more])
    return out[at : at + n]


def pack_indices(out: Int64[np.ndarray, "size"], values: Sequence[int]) -> Int64[np.ndarray, "n"]:
    """As ``pack``, for an array to index with."""
    n = len(values)
    _index_packer(n)(out, 0, *values)
    return out[:n]


@cache
def _index_packer(n: int) -> Callable[..., None]:
    return struct.Struct(f"{n}q").pack_into


def pack_equal(lists: list[Any], each: int) -> Int32[np.ndarray, "n"] | None:
    """The integers of ``lists``, each of which has ``each`` of them; None if they are not plain lists of plain integers
    of 32 bits.

    marshal writes such lists as records of one length, in less than half the time that flattening them takes.
    """
    record = _list_record(each)
    try:
        data = marshal.dumps(lists, 2)
    except ValueError:
        return None
    if len(data) != _MARSHAL_HEAD + len(lists) * record.itemsize:
        return None
    n, written = len(lists), np.frombuffer(data, record, len(lists), _MARSHAL_HEAD)
    items = written["items"]
    # Up to the first thing that is something else, every label stands where it is looked for. (As strings of bytes,
    # which are compared and counted in a third of the time that arrays take.)
    if written["kind"].tobytes().count(b"[") < n or items["kind"].tobytes().count(b"i") < n * each:
        return None
    if written["count"].tobytes() != each.to_bytes(4, "little") * n:
        return None
    return items["value"].reshape(-1)


_MARSHAL_HEAD = 5  # of the list of lists: its kind and its length


@cache
def _list_record(each: int) -> np.dtype:
    item = np.dtype([("kind", "u1"), ("value", "<i4")])
    return np.dtype([("kind", "u1"), ("count", "<i4"), ("items", item, (each,))])


@cache
def equal(n: int, value: int) -> Int32[np.ndarray, "n"]:
    """n times the same; made once, not to be written."""
    out = np.full(n, value, np.int32)
    out.setflags(write=False)
    return out


def lookup(table: Any, keys: Sequence[Any]) -> Sequence[Any]:
    """[table[k] for k in keys], in one C call; KeyError or IndexError for a key that is not there."""
    if len(keys) > 1:
        return itemgetter(*keys)(table)
    return [table[k] for k in keys]


_FEW_RUNS = 3  # up to which one after the other is faster than all at once


def runs(starts: Int64[np.ndarray, "n"], lengths: Int32[np.ndarray, "n"]) -> Int64[np.ndarray, "total"]:
    """start, start + 1, ... of every run, one run after the other."""
    if len(starts) == 1:
        start = starts.item()
        return np.arange(start, start + lengths.item())
    if 0 < len(starts) <= _FEW_RUNS:
        return np.concatenate([np.arange(s, s + n) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)])
    shift = starts + lengths
    shift -= np.add.accumulate(lengths)  # as cumsum, without its Python
    out = shift.repeat(lengths)
    out += np.arange(len(out))
    return out


class Scratch:
    """An array for intermediate values, kept from step to step and made larger when a step needs it."""

    def __init__(self, size: int, dtype: type = np.int32) -> None:
        self._array: np.ndarray = np.empty(size, dtype)

    def of(self, size: int) -> np.ndarray:
        """The array, of at least ``size`` entries. What it held before is lost when it has to grow."""
        if size > len(self._array):
            self._array = np.empty(2 * size, self._array.dtype)
        return self._array
