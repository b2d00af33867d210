"""Each thing that machine code must or must not have, missing or present once."""

import pytest

from pallas_kernels.configurations import (
    ASYNC_COPIES,
    IN_PLACE,
    TENSOR_CORES,
    TMA_LOADS,
    WGMMA,
    WIDE_LOADS,
    KernelConfiguration,
)
from pallas_kernels.gpus import GPUS
from scripts.gpu.verdict import row_of, scalar_loop

GOOD_SASS = {"HGMMA": 12, "UTMALDG": 8, "LDGSTS.128": 4, "LDG.128": 2, "LDG.32": 3, "total": 100}
MAIN_LOOP = {"HGMMA": 12, "UTMALDG": 8, "LDG.32": 2, "other": 40}


def kernel(**changes):
    good = {
        "name": "attend",
        "registers": 168,
        "spill_bytes": 0,
        "shared_bytes": 100_000,
        "serialised": False,
        "sass": GOOD_SASS,
        "loops": [MAIN_LOOP],
        "ptx": "a.ptx",
    }
    return good | changes


def judged(needs, kernels, target="h200", **answer):
    configuration = KernelConfiguration("paged_attention", "mosaic", "d128", lambda: 0, (), needs=frozenset(needs))
    answer = {"compile_s": 1.23456, "aliased": 0, "donated": 0, "copies": []} | answer | {"kernels": kernels}
    return row_of(configuration, target, GPUS[target], answer)


EVERYTHING = {TENSOR_CORES, WGMMA, TMA_LOADS, ASYNC_COPIES, WIDE_LOADS}


def test_a_good_kernel():
    assert judged(EVERYTHING, [kernel()]) == {
        "kernel": "paged_attention",
        "implementation": "mosaic",
        "target": "h200",
        "config": "d128",
        "registers": 168,
        "spill_bytes": 0,
        "shared_bytes": 100_000,
        "sass": GOOD_SASS,
        "compile_s": 1.235,
        "ok": True,
        "why": "",
        "ptx": "a.ptx",
    }


def test_two_kernels_make_one_row():
    merge = kernel(name="merge", registers=40, shared_bytes=0, sass={"LDG.128": 4, "total": 30}, ptx="b.ptx")
    row = judged(EVERYTHING, [merge, kernel()])
    assert row["ok"] and row["registers"] == 168 and row["shared_bytes"] == 100_000 and row["ptx"] == "a.ptx"
    assert row["sass"]["LDG.128"] == 6 and row["sass"]["total"] == 130


@pytest.mark.parametrize(
    "needs, changes, words",
    [
        (set(), {"spill_bytes": 8}, "attend spills 8 bytes"),
        (set(), {"sass": GOOD_SASS | {"LDL": 2, "STL": 1}}, "attend has 3 instructions on local memory"),
        (set(), {"shared_bytes": 232_449}, "wants 232449 of 232448 bytes"),
        ({TENSOR_CORES}, {"sass": {"LDG.128": 2, "total": 3}}, "no tensor-core instruction"),
        ({WGMMA}, {"sass": {"HMMA": 32, "total": 40}}, "0 wgmma and 32 mma"),
        ({WGMMA}, {"sass": GOOD_SASS | {"HMMA": 8}}, "a product isn't done by wgmma"),
        ({WGMMA}, {"serialised": True}, "ptxas runs the wgmma of attend one after the other"),
        ({TMA_LOADS}, {"sass": {"LDGSTS.128": 2, "total": 3}}, "no TMA load"),
        ({ASYNC_COPIES}, {"sass": {"LDGSTS.32": 2, "LDG.128": 1, "total": 3}}, "no 16-byte asynchronous copy"),
        ({WIDE_LOADS}, {"sass": {"LDG.64": 2, "total": 3}, "loops": []}, "no 16-byte load"),
        ({WIDE_LOADS}, {"loops": [MAIN_LOOP, {"LDG.16": 4, "other": 9}]}, "loads 4 single elements in an inner loop"),
        ({WIDE_LOADS}, {"loops": [{"HMMA": 8, "LDG.32": 6, "LDG.128": 2}]}, "loads 6 words and 2 vectors"),
    ],
)
def test_what_is_wrong_is_named(needs, changes, words):
    row = judged(needs, [kernel(**changes)])
    assert not row["ok"] and words in row["why"]


def test_other_gpus_have_other_products():
    # Hopper's wgmma is asked of Hopper alone.
    assert judged({WGMMA}, [kernel(sass={"HMMA": 8, "total": 9})], target="a100")["ok"]
    assert judged({WGMMA}, [kernel(sass={"UTCMMA": 8, "total": 9})], target="b200")["ok"]
    assert "wants 100000 of" not in judged(set(), [kernel()], target="l4")["why"]
    assert "wants 101377 of 101376" in judged(set(), [kernel(shared_bytes=101_377)], target="l4")["why"]


def test_in_place():
    assert judged({IN_PLACE}, [kernel()], donated=2, aliased=2)["ok"]
    assert "1 of 2 donated" in judged({IN_PLACE}, [kernel()], donated=2, aliased=1)["why"]
    assert "0 of 0 donated" in judged({IN_PLACE}, [kernel()])["why"]
    assert "1 copies" in judged({IN_PLACE}, [kernel()], donated=2, aliased=2, copies=["%copy.1 = ..."])["why"]


def test_nothing_compiled():
    assert "no Pallas kernel" in judged(set(), [])["why"]
    row = judged(set(), [], error="ValueError: no")
    assert row["why"] == "ValueError: no" and not row["ok"] and row["ptx"] is None and row["registers"] == 0


def test_table_entries_beside_vectors_are_no_scalar_loop():
    assert scalar_loop({"HMMA": 8, "LDG.32": 2, "LDGSTS.32": 2, "LDGSTS.128": 8}) == ""
    assert scalar_loop({"LDG.32": 4, "other": 3}) == ""  # a search in a table of words
