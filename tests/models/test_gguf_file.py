"""The GGUF reader: what a good file holds, and that no broken or hostile one gets further than a clear error."""

import struct
import time
import tracemalloc

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models.gguf_file
from models.errors import CheckpointError
from models.gguf_file import read_gguf


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(keys=(), tensors=(), data=b"", magic=b"GGUF", version=3, num_keys=None, num_tensors=None) -> bytes:
    head = magic + struct.pack("<I", version)
    head += struct.pack(
        "<QQ", len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


GOOD = file(
    keys=[
        key("general.architecture", 8, string("llama")),
        key("n", 4, struct.pack("<I", 7)),
        key("eps", 6, struct.pack("<f", 0.5)),
        key("flag", 7, b"\1"),
        key("names", 9, array(8, 3, string("a") + string("") + string("ä"))),
        key("scores", 9, array(6, 2, struct.pack("<2f", 1, -2))),
    ],
    tensors=[tensor("x", [4, 2]), tensor("y", [3], offset=32)],
    data=np.arange(8, dtype="<f4").tobytes() + np.arange(3, dtype="<f4").tobytes(),
)


@pytest.fixture
def write(tmp_path):
    def write(data: bytes):
        path = tmp_path / "file.gguf"
        path.write_bytes(data)
        return path

    return write


def test_reads_metadata_and_tensors(write):
    parsed = read_gguf(write(GOOD))
    scores = parsed.metadata.pop("scores")
    assert parsed.metadata == {
        "general.architecture": "llama",
        "n": 7,
        "eps": 0.5,
        "flag": True,
        "names": ["a", "", "ä"],
    }
    np.testing.assert_array_equal(scores, np.array([1, -2], np.float32))
    np.testing.assert_array_equal(parsed.read_tensor("x"), np.arange(8, dtype=np.float32).reshape(2, 4))
    np.testing.assert_array_equal(parsed.read_tensor("y"), np.arange(3, dtype=np.float32))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "Q2_K"])
def test_dequantises_as_the_library_does(tmp_path, monkeypatch, kind):
    """In pieces that don't divide the tensor, and rounded once for bfloat16."""
    quant = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    rng = np.random.default_rng(0)
    rows, row_bytes = 7, 768 // block * block_bytes
    if kind in ("F32", "F16"):
        raw = rng.standard_normal((rows, 768)).astype(f"<f{block_bytes}").view(np.uint8)
    else:
        raw = rng.integers(0, 60, (rows, row_bytes), dtype=np.uint8)  # below 0x7C: no scale is NaN or infinite
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.dequantize(raw, quant).reshape(rows, 768)
    monkeypatch.setattr(models.gguf_file, "_CHUNK_VALUES", 1000)
    parsed = read_gguf(tmp_path / "q.gguf")
    assert parsed.tensors["t"].shape == (rows, 768)
    np.testing.assert_array_equal(parsed.read_tensor("t"), expected)
    np.testing.assert_array_equal(parsed.read_tensor("t", ml_dtypes.bfloat16), expected.astype(ml_dtypes.bfloat16))


HUGE = 1 << 60
BROKEN = {
    "empty": (b"", "empty"),
    "magic": (file(magic=b"PK\3\4"), "begins with"),
    "cut after the magic": (b"GGUF\3\0", "a number takes 4 bytes"),
    "version 1": (file(version=1), "version 1"),
    "big endian": (file(version=3 << 24), "big-endian"),
    "2^60 keys": (file(num_keys=HUGE), f"announces {HUGE} keys"),
    "2^60 tensors": (file(num_tensors=HUGE), f"and {HUGE} tensors"),
    "2^64-1 of both": (file(num_keys=2**64 - 1, num_tensors=2**64 - 1), "announces"),
    "key of 2^63 bytes": (file([struct.pack("<Q", 1 << 63) + bytes(64)]), "a key takes"),
    "string of 2^62 bytes": (file([key("k", 8, struct.pack("<Q", 1 << 62))]), "the value of 'k' takes"),
    "2^60 numbers": (file([key("k", 9, array(4, HUGE))]), "array of 'k' takes"),
    "2^60 strings": (file([key("k", 9, array(8, HUGE))]), f"announces {HUGE} strings"),
    "a string in an array of 2^63 bytes": (
        file([key("k", 9, array(8, 2, string("a") + struct.pack("<Q", 1 << 63)))]),
        "a string of 'k' takes",
    ),
    "strings cut": (file([key("k", 9, array(8, 3, string("a" * 40) * 2))]).rstrip(b"\0") + b"\1", "ends after 2 of 3"),
    "array of arrays": (file([key("k", 9, array(9, 1, array(4, 1, bytes(4))))]), "array of type 9"),
    "unknown value type": (file([key("k", 77, bytes(8))]), "value type 77"),
    "not UTF-8": (file([key("k", 8, string(b"\xff\xfe"))]), "not UTF-8"),
    "strings not UTF-8": (file([key("k", 9, array(8, 1, string(b"\xff")))]), "string 0 of 'k' is not UTF-8"),
    "key twice": (file([key("k", 7, b"\1")] * 2), "'k' appears twice"),
    "alignment 3": (file([key("general.alignment", 4, struct.pack("<I", 3))]), "power of two"),
    "alignment is text": (file([key("general.alignment", 8, string("32"))]), "power of two"),
    "no dimensions": (file(tensors=[tensor("x", [])]), "0 dimensions"),
    "five dimensions": (file(tensors=[tensor("x", [1] * 5)]), "5 dimensions"),
    "2^31 dimensions": (file(tensors=[string("x") + struct.pack("<I", 1 << 31) + bytes(40)]), "dimensions"),
    "2^80 values": (file(tensors=[tensor("x", [1 << 40, 1 << 40])]), f"takes {4 << 80} bytes"),
    "no values": (file(tensors=[tensor("x", [0])], data=bytes(64)), "doesn't divide"),
    "offset beyond the file": (file(tensors=[tensor("x", [4], offset=1 << 50)], data=bytes(64)), "takes 16 bytes"),
    "offset wraps 64 bits": (file(tensors=[tensor("x", [4], offset=2**64 - 32)], data=bytes(64)), "takes 16 bytes"),
    "misaligned offset": (file(tensors=[tensor("x", [4], offset=4)], data=bytes(64)), "data offset 4"),
    "data cut": (file(tensors=[tensor("x", [256])], data=bytes(1023)), "takes 1024 bytes"),
    "overlap": (file(tensors=[tensor("x", [16]), tensor("y", [4], offset=32)], data=bytes(64)), "overlap"),
    "tensor twice": (file(tensors=[tensor("x", [4]), tensor("x", [4], offset=32)], data=bytes(64)), "twice"),
    "unknown quantisation": (file(tensors=[tensor("x", [4], kind=99)], data=bytes(64)), "quantisation type 99"),
    "removed quantisation": (file(tensors=[tensor("x", [32], kind=4)], data=bytes(64)), "quantisation type 4"),
    "integers": (file(tensors=[tensor("x", [4], kind=26)], data=bytes(64)), "stored as I32"),
    "half a block": (file(tensors=[tensor("x", [33], kind=8)], data=bytes(64)), "blocks of 32"),
    "one of three files": (file([key("split.count", 2, struct.pack("<H", 3))]), "split into 3 files"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_or_hostile_header_is_refused_at_once(write, name):
    data, words = BROKEN[name]
    path = write(data)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(CheckpointError) as caught:
            read_gguf(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert time.perf_counter() - start < 1
    assert peak < 2_000_000


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="can't be read"):
            read_gguf(path)


def test_a_file_that_shrinks_later_is_noticed(write):
    path = write(GOOD)
    parsed = read_gguf(path)
    path.write_bytes(GOOD[:-4])
    with pytest.raises(CheckpointError, match="ends inside tensor 'y'"):
        parsed.read_tensor("y")


@given(data=st.data())
@settings(max_examples=300)
def test_any_damage_is_a_checkpoint_error_or_harmless(tmp_path_factory, data):
    """Cut anywhere, or a few bytes changed: either it still reads, or the one kind of error says what's wrong."""
    damaged = bytearray(GOOD[: data.draw(st.integers(0, len(GOOD)), label="length")])
    for _ in range(data.draw(st.integers(0, 4), label="changes")):
        if damaged:
            place = data.draw(st.integers(0, len(damaged) - 1))
            damaged[place] = data.draw(st.sampled_from([0, 1, 8, 9, 0x7F, 0x80, 0xFF]))
    path = tmp_path_factory.mktemp("damaged") / "file.gguf"
    path.write_bytes(damaged)
    try:
        parsed = read_gguf(path)
    except CheckpointError:
        return
    for name in parsed.tensors:
        parsed.read_tensor(name)
