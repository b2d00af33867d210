"""Costs that are measured: every bucket of a runner is timed, and its executable's needs are known."""

from flax import nnx

from jaxrunner.config import RunnerConfig
from jaxrunner.runner import ModelRunner
from jaxrunner.sweep import costs
from models import Decoder, ModelConfig
from tests.jaxrunner.step.test_padding import CONFIG as MODEL


def test_every_bucket_is_timed() -> None:
    limits = {"max_model_len": 32, "max_num_reqs": 2, "max_num_batched_tokens": 8, "block_size": 4, "num_blocks": 17}
    config = RunnerConfig(**limits, token_buckets=(2, 8), compilation_cache=False)
    runner = ModelRunner(Decoder(ModelConfig.from_hf(MODEL), rngs=nnx.Rngs(0)), config)
    told: list[tuple[int, float]] = []
    sampled = costs.measure(runner, 2, lambda size, seconds: told.append((size, seconds)))
    assert sampled.sizes == (2, 8) and told == list(zip(sampled.sizes, sampled.seconds, strict=True))
    assert all(seconds > 0 for seconds in sampled.seconds)
    made = [runner.executables.compiled[f"forward[{size}]"] for size in (2, 8)]
    assert sampled.compile_s == tuple(each.seconds for each in made)
    assert sampled.needs([2, 8])[0] == sum(sampled.compile_s)
    assert sampled.temp_bytes == tuple(each.temp_bytes for each in made)
