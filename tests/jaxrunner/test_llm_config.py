"""What follows from the options that a user of LLM leaves open."""

import re

import pytest

from jaxrunner import LLM, loading
from jaxrunner.llm_config import LLMConfig
from tests.jaxrunner.chain import successor_logits, write_chain

BUCKETS = "a tuple of integers, a ladder's name, a .json file or None"


def test_defaults_on_cpu_are_few_shapes_compiled_when_met():
    config = LLMConfig().runner_config(2048, "cpu")
    assert (config.max_model_len, config.max_num_reqs, config.max_num_batched_tokens) == (2048, 64, 2048)
    assert config.shapes().tokens == (1, 8, 32, 128, 512, 2048) and config.warmup == "lazy"
    assert config.shapes().logits == (1, 8, 32, 64)


def test_defaults_elsewhere_are_powers_of_two_compiled_ahead():
    config = LLMConfig().runner_config(131072, "gpu")
    assert (config.max_model_len, config.max_num_reqs, config.max_num_batched_tokens) == (8192, 256, 8192)
    assert config.token_buckets is None and config.warmup == "all"


def test_a_small_budget_lowers_the_number_of_sequences():
    config = LLMConfig(max_num_batched_tokens=16).runner_config(2048, "cpu")
    assert (config.max_num_reqs, config.max_num_batched_tokens) == (16, 16)


def test_many_sequences_raise_the_budget():
    config = LLMConfig(max_num_seqs=3000).runner_config(2048, "cpu")
    assert (config.max_num_reqs, config.max_num_batched_tokens) == (3000, 3000)


def test_a_budget_above_all_that_can_run_is_not_made_up():
    assert LLMConfig(max_num_seqs=2).runner_config(64, "cpu").max_num_batched_tokens == 128


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        *(("max_model_len", v, "an integer of at least 2 or None") for v in (1, 0, True)),
        *(
            (f, v, "an integer of at least 1 or None")
            for f in ("max_num_seqs", "max_num_batched_tokens")
            for v in (0, 1.5)
        ),
        *(
            ("num_gpu_blocks_override", v, "an integer of at least 2 (one block is the null block) or None")
            for v in (1, "9")
        ),
        *(("long_prefill_token_threshold", v, "an integer of at least 0") for v in (-1, None, False)),
        *(("enable_prefix_caching", v, "True or False") for v in ("no", 1)),
        ("block_size", "16", "an integer of at least 1"),
        ("gpu_memory_utilization", 0.0, "a number in (0, 1]"),
        ("cpu_cache_bytes", 1e9, "an integer of at least 1"),
        ("seed", None, "an integer"),
        ("token_buckets", 32, BUCKETS),
        ("logits_buckets", [2.5], BUCKETS),
        ("warmup", 5, "'auto', 'all', 'lazy' or a tuple of token buckets"),
        ("attention", None, "a string"),
        ("check_invariants", "yes", "True or False"),
        ("compilation_cache", 3, "a folder, None or False"),
    ],
)
def test_a_wrong_value_is_named_before_a_model_is_looked_for(option, value, expected):
    got = re.escape(repr(tuple(value) if isinstance(value, list) else value))
    with pytest.raises(ValueError, match=rf"^{option} must be {re.escape(expected)}, got {got}$"):
        LLM("there/is/no/such/model", **{option: value})


def test_more_sequences_than_tokens_are_refused_before_a_model_is_looked_for():
    with pytest.raises(ValueError, match=r"^max_num_batched_tokens \(4\) must be at least max_num_seqs \(8\)"):
        LLM("there/is/no/such/model", max_num_seqs=8, max_num_batched_tokens=4)


@pytest.mark.parametrize(
    "model_len, options, words",
    [
        (2048, {"max_model_len": 4096}, "^max_model_len 4096 is beyond the 2048 positions"),
        (1, {}, "^max_model_len must be at least 2"),
        (
            2048,
            {"token_buckets": (64,), "max_num_batched_tokens": 32},
            r"^token buckets must be from 1 to 32, got \[64\]",
        ),
    ],
)
def test_what_the_model_has_no_room_for_is_named(model_len, options, words):
    with pytest.raises(ValueError, match=words):
        LLMConfig(**options).runner_config(model_len, "cpu")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"attention": "flash"}, r"^attention must be one of \['auto', .*'reference'.*\], got 'flash'"),
        ({"token_buckets": [64], "max_num_batched_tokens": 32}, r"^token buckets must be from 1 to 32, got \[64\]"),
        ({"logits_buckets": [9], "max_num_seqs": 8}, r"^logits buckets must be from 1 to 8, got \[9\]"),
        ({"request_buckets": [9], "max_num_seqs": 8}, r"^request buckets must be from 1 to 8, got \[9\]"),
        ({"max_long_partial_prefills": 1}, "^max_long_partial_prefills .1. counts prompts longer than"),
        ({"scheduling_policy": "lifo"}, r"^scheduling_policy must be one of \['fcfs', 'priority'\], got 'lifo'"),
        ({"max_num_partial_prefills": -1}, "^max_num_partial_prefills must be an integer of at least 0, got -1"),
    ],
)
def test_what_no_model_could_serve_is_refused_before_one_is_looked_for(options, words):
    with pytest.raises(ValueError, match=words):
        LLM("there/is/no/such/model", **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_model_len": 4096}, "^max_model_len 4096 is beyond the 256 positions"),
        ({"token_buckets": [10**6]}, "^token buckets must be from 1 to"),
        ({"warmup": [77]}, r"^warmup \(77,\) must be among the token buckets"),
    ],
)
def test_what_the_model_has_no_room_for_is_refused_before_its_weights_are_read(tmp_path, monkeypatch, options, words):
    folder = write_chain(tmp_path, successor_logits(8, {}))
    monkeypatch.setattr(loading, "load_params", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match=words):
        LLM(folder, **options)


def test_lists_of_sizes_are_taken():
    """As a user writes them; the model that there isn't is what is wrong then."""
    with pytest.raises(ValueError, match="no/such/model"):
        LLM("there/is/no/such/model", token_buckets=[8, 32], logits_buckets=[4], warmup=[32])
