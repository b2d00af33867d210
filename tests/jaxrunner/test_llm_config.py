"""What follows from the options that a user of LLM leaves open."""

import pytest

from jaxrunner.llm_config import LLMConfig, spread_buckets


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
    "options, words",
    [
        ({"max_model_len": 4096}, "max_model_len 4096 is beyond the 2048 positions"),
        ({"max_model_len": 1}, "at least 2"),
        ({"max_model_len": 0}, "max_model_len must be an integer of at least 1"),
        ({"max_num_seqs": 1.5}, "max_num_seqs must be an integer"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens must be an integer"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, r"max_num_batched_tokens \(4\).*max_num_seqs \(8\)"),
        ({"num_gpu_blocks_override": 1}, "at least 2"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
    ],
)
def test_contradictions_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        LLMConfig(**options).runner_config(2048, "cpu")


@pytest.mark.parametrize("limit", [1, 5, 8, 9, 512, 8192])
def test_spread_buckets_end_at_the_limit(limit):
    sizes = spread_buckets(limit)
    assert sizes[-1] == limit and len(sizes) <= 6 and list(sizes) == sorted(set(sizes))
