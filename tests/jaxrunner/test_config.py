"""A runner's configuration names the field that is wrong, what it has and what it should have."""

import re
from pathlib import Path
from typing import Any

import pytest

from jaxrunner.config import RunnerConfig

BASE: dict[str, Any] = {"max_num_reqs": 4, "max_num_batched_tokens": 32}
BUCKETS = "a tuple of integers, a ladder's name, a .json file or None"
FILE = "a file in a folder that exists"
SIZE = "an integer of at least 1"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        *((f, v, SIZE) for f in ("max_model_len", "max_num_reqs", "max_num_batched_tokens") for v in (0, 2.5, True)),
        *((f, v, SIZE) for f in ("block_size", "cpu_cache_bytes") for v in (-1, "16", False)),
        *(("num_blocks", v, "an integer of at least 2 (one block is the null block) or None") for v in (1, 2.5, "9")),
        *(("gpu_memory_utilization", v, "a number in (0, 1]") for v in (0, 1.5, "a", True, float("nan"), None)),
        *(("seed", v, "an integer") for v in ("x", 1.0, None, True)),
        *((f, v, BUCKETS) for f in ("token_buckets", "logits_buckets", "request_buckets") for v in (3, (2.5,))),
        *(("warmup", v, "'all', 'lazy' or a tuple of token buckets") for v in ("some", 5, (2.5,), None, True)),
        *(("attention", v, "a string") for v in (None, 3)),
        *((f, v, "True or False") for f in ("check_invariants", "validate") for v in ("no", 1, None)),
        *((f, v, FILE) for f in ("trace", "record_shapes") for v in ("no/such/folder/file", "/", 3)),
        *(("compilation_cache", v, "a folder, None or False") for v in (3, True, 0)),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must be {re.escape(expected)}.*, got {re.escape(repr(value))}$"):
        RunnerConfig(**BASE | {field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_batched_tokens": 2}, r"^max_num_batched_tokens \(2\) must be at least max_num_reqs \(4\)"),
        ({"warmup": (5,)}, r"^warmup \(5,\) must be among the token buckets \(1, 2, 4, 8, 16, 32\)"),
        ({"token_buckets": (64,)}, r"^token buckets must be from 1 to 32, got \[64\]"),
        ({"logits_buckets": (0,)}, r"^logits buckets must be from 1 to 4, got \[0\]"),
        ({"request_buckets": (5,)}, r"^request buckets must be from 1 to 4, got \[5\]"),
        (
            {"record_shapes": "a.jsonl.gz"},
            r"^record_shapes must be a file in a folder that exists, whose name doesn't end in .gz",
        ),
    ],
)
def test_contradictions_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunnerConfig(**BASE | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_blocks": 2, "gpu_memory_utilization": 1, "seed": -1, "warmup": (32,), "token_buckets": (3, 7)},
        {"compilation_cache": False, "warmup": "all", "logits_buckets": (4,)},
        {"compilation_cache": "folder", "warmup": ()},
        {"compilation_cache": Path("folder"), "num_blocks": None},
    ],
)
def test_right_values_are_kept(fields: dict) -> None:
    config = RunnerConfig(**BASE | fields)
    assert {name: getattr(config, name) for name in fields} == fields
