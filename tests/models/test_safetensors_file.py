"""The safetensors reader: conversions are right, and a header that doesn't fit its file is refused at once."""

import json
import struct
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import models.safetensors_file
from models.errors import CheckpointError
from models.safetensors_file import read_safetensors


def file(header, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = file({"__metadata__": {"format": "pt"}, "a": entry([2, 2], 0, 16), "b": entry([3], 16, 28)}, bytes(range(28)))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_every_float_type_into_float32_and_bfloat16(tmp_path, monkeypatch, dtype):
    """What the library wrote, read in pieces that don't divide the tensor."""
    monkeypatch.setattr(models.safetensors_file, "_CHUNK_BYTES", 1000)
    rng = np.random.default_rng(0)
    tensors = {"x": rng.standard_normal((37, 41)).astype(dtype), "y": np.array(3, dtype), "z": np.zeros((0, 4), dtype)}
    save_file(tensors, tmp_path / "t.safetensors")
    read = read_safetensors(tmp_path / "t.safetensors")
    for name, tensor in tensors.items():
        for target in (np.float32, ml_dtypes.bfloat16):
            got = read.read_tensor(name, target)
            assert got.dtype == target and got.shape == tensor.shape
            np.testing.assert_array_equal(got, tensor.astype(target))


@pytest.mark.parametrize("target", [np.float32, ml_dtypes.bfloat16])
def test_a_file_that_shrinks_later_is_noticed(tmp_path, target):
    path = tmp_path / "t.safetensors"
    save_file({"x": np.ones(100, np.float32)}, path)
    read = read_safetensors(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="ends inside tensor 'x'"):
        read.read_tensor("x", target)


def test_rounds_to_nearest_even(tmp_path):
    halfway = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)  # between two bfloat16 neighbours
    save_file({"x": halfway}, tmp_path / "t.safetensors")
    rounded = read_safetensors(tmp_path / "t.safetensors").read_tensor("x", ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded.astype(np.float32), np.array([1, 1 + 2**-6], np.float32))


def test_integers_are_refused_when_read_not_when_listed(tmp_path):
    path = tmp_path / "t.safetensors"
    save_file({"ids": np.arange(3), "x": np.ones(2, np.float32)}, path)
    read = read_safetensors(path)
    np.testing.assert_array_equal(read.read_tensor("x"), [1, 1])
    with pytest.raises(CheckpointError, match="'ids' is stored as I64"):
        read.read_tensor("ids")


TWO = {"a": entry([4], 0, 16), "b": entry([4], 16, 32)}
BROKEN = {
    "empty": (b"", "announces a header of 0 bytes"),
    "seven bytes": (bytes(7), "announces a header of 0 bytes"),
    "header of 2^63 bytes": (file({}, length=1 << 63), f"announces a header of {1 << 63} bytes"),
    "header of 2^64-1 bytes": (file({}, length=2**64 - 1), "announces a header"),
    "header beyond the file": (file({}, length=1000), "announces a header of 1000 bytes"),
    "not JSON": (file(b"{abc}"), "isn't JSON"),
    "not UTF-8": (file(b'{"\xff": 1}'), "isn't JSON"),
    "nested 100,000 deep": (file(b"[" * 100_000), "isn't JSON"),
    "a number of 5,000 digits": (file(b'{"a": ' + b"9" * 5000 + b"}"), "isn't JSON"),
    "a list": (file([]), "JSON list"),
    "name twice": (file(b'{"a": 1, "a": 2}'), "twice"),
    "entry is a number": (file({"a": 1}), "'a' is malformed"),
    "no shape": (file({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)), "malformed"),
    "negative size": (file({"a": entry([-1], 0, 4)}, bytes(4)), "malformed"),
    "size is a float": (file({"a": entry([1.0], 0, 4)}, bytes(4)), "malformed"),
    "size is true": (file({"a": entry([True], 0, 4)}, bytes(4)), "malformed"),
    "three offsets": (file({"a": {**entry([1], 0, 4), "data_offsets": [0, 2, 4]}}, bytes(4)), "malformed"),
    "offset of 2^70": (file({"a": entry([1], 0, 1 << 70)}, bytes(4)), "malformed"),
    "unknown dtype": (file({"a": entry([1], 0, 4, "Q4")}, bytes(4)), "unknown dtype 'Q4'"),
    "ends before it begins": (file({"a": entry([1], 4, 0)}, bytes(4)), "needs 4 bytes"),
    "span too short": (file({"a": entry([4], 0, 8)}, bytes(8)), "needs 16 bytes"),
    "span too long": (file({"a": entry([4], 0, 32)}, bytes(32)), "needs 16 bytes"),
    "2^80 values": (file({"a": entry([1 << 40, 1 << 40], 0, 16)}, bytes(16)), "needs"),
    "overlap": (file({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, bytes(24)), "'b' overlaps"),
    "same span twice": (file({"a": entry([4], 0, 16), "b": entry([4], 0, 16)}, bytes(16)), "overlaps"),
    "gap": (file({"a": entry([4], 0, 16), "b": entry([4], 20, 36)}, bytes(36)), "leaves a gap"),
    "data cut": (file(TWO, bytes(31)), "truncated"),
    "no data": (file(TWO), "truncated"),
    "data too long": (file(TWO, bytes(33)), "belong to no tensor"),
    "a terabyte announced": (file({"a": entry([1 << 38], 0, 1 << 40)}, bytes(64)), "truncated"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_or_hostile_header_is_refused_at_once(tmp_path, name):
    data, words = BROKEN[name]
    path = tmp_path / "t.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(CheckpointError) as caught:
            read_safetensors(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert time.perf_counter() - start < 1
    assert peak < 2_000_000


@given(data=st.data())
@settings(max_examples=300)
def test_any_damage_is_a_checkpoint_error_or_harmless(tmp_path_factory, data):
    damaged = bytearray(GOOD[: data.draw(st.integers(0, len(GOOD)), label="length")])
    for _ in range(data.draw(st.integers(0, 4), label="changes")):
        if damaged:
            place = data.draw(st.integers(0, len(damaged) - 1))
            damaged[place] = data.draw(st.sampled_from(b'0159[]{}",:-e' + bytes([0, 0x7F, 0xFF])))
    path = tmp_path_factory.mktemp("damaged") / "t.safetensors"
    path.write_bytes(damaged)
    try:
        read = read_safetensors(path)
    except CheckpointError:
        return
    for name, tensor in read.tensors.items():
        if tensor.dtype.startswith(("F", "BF")):
            assert read.read_tensor(name).shape == tensor.shape
