"""How many blocks there are: on devices that state a limit, and on those that state none."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrunner.config import RunnerConfig
from jaxrunner.kv_cache.allocate import allocate_caches, bytes_per_block, plan_caches
from pallas_kernels import AttentionLayer

# Two layers of 1 and 3 heads: K and V of 4 tokens of 8 float32 each, so 256 and 768 bytes a block.
LAYERS = [AttentionLayer(f"layer {heads}", 6, heads, 8, 1.0) for heads in (1, 3)]
BLOCK = 1024
GIB = 2**30


def device(**stats: int) -> Any:
    """A device with these memory_stats(); without any, one that has none to give."""
    return SimpleNamespace(memory_stats=lambda: stats or None, device_kind="Fake H1", platform="fake")


def config(**more: Any) -> RunnerConfig:
    return RunnerConfig(**{"max_model_len": 30, "max_num_reqs": 5, "max_num_batched_tokens": 8, "block_size": 4} | more)


def never() -> int:
    raise AssertionError("temporaries cost a compilation: they must not be asked for here")


def test_bytes_of_a_block_are_k_and_v_of_every_layer() -> None:
    assert bytes_per_block(LAYERS, 4, jnp.dtype("float32")) == BLOCK
    assert bytes_per_block(LAYERS, 4, jnp.dtype("bfloat16")) == BLOCK // 2
    assert bytes_per_block(LAYERS, 16, jnp.dtype("float32")) == BLOCK * 4


def test_the_configured_number_is_taken_without_asking_the_device() -> None:
    plan = plan_caches(config(num_blocks=7), LAYERS, jnp.dtype("float32"), never, SimpleNamespace())
    assert (plan.num_blocks, plan.bytes_per_block, plan.why) == (7, BLOCK, "7 blocks, as configured")


def test_a_limit_is_shared_by_what_is_there_temporaries_and_blocks() -> None:
    """0.75 x 1 GiB, less what is in use and the temporaries, in whole blocks."""
    there, temporaries = 100_000_000, 7_000_001
    stats = device(bytes_limit=GIB, bytes_in_use=there)
    plan = plan_caches(config(gpu_memory_utilization=0.75), LAYERS, jnp.dtype("float32"), lambda: temporaries, stats)
    assert plan.num_blocks == (GIB * 3 // 4 - there - temporaries) // BLOCK
    blocks = plan.num_blocks
    assert blocks * BLOCK + there + temporaries <= GIB * 3 // 4 < (blocks + 1) * BLOCK + there + temporaries
    assert plan.why == (
        f"{blocks} blocks of 1024 bytes: 0.75 x {GIB} bytes of Fake H1 - {there} in use - {temporaries} of temporaries"
    )


def test_without_a_limit_there_is_enough_for_every_request_at_full_length() -> None:
    """5 requests of 30 tokens: 8 blocks each, and the null block."""
    plan = plan_caches(config(), LAYERS, jnp.dtype("float32"), never, device())
    assert plan.num_blocks == 41
    assert plan.why == (
        f"41 blocks of 1024 bytes: fake states no limit, so enough for 5 requests of 30 tokens, and at most {GIB} bytes"
    )


def test_statistics_without_a_limit_are_no_limit() -> None:
    assert plan_caches(config(), LAYERS, jnp.dtype("float32"), never, device(bytes_in_use=5)).num_blocks == 41


@pytest.mark.parametrize(("limit", "blocks"), [(10 * BLOCK, 10), (11 * BLOCK - 1, 10), (2 * BLOCK, 2)])
def test_without_a_limit_the_configuration_sets_one(limit: int, blocks: int) -> None:
    plan = plan_caches(config(cpu_cache_bytes=limit), LAYERS, jnp.dtype("float32"), never, device())
    assert plan.num_blocks == blocks


@pytest.mark.parametrize(
    ("given", "stats", "why"),
    [
        ({"cpu_cache_bytes": 2 * BLOCK - 1}, {}, "1 blocks of 1024 bytes: fake states no limit"),
        (
            {"gpu_memory_utilization": 0.5},
            {"bytes_limit": 8 * BLOCK, "bytes_in_use": 2 * BLOCK},
            "1 blocks of 1024 bytes: 0.5 x 8192 bytes of Fake H1 - 2048 in use - 1000 of temporaries",
        ),
        (
            {},
            {"bytes_limit": 8 * BLOCK, "bytes_in_use": 8 * BLOCK},
            "-2 blocks of 1024 bytes: 0.9 x 8192 bytes of Fake H1 - 8192 in use - 1000 of temporaries",
        ),
    ],
)
def test_no_room_says_why_and_what_would_help(given: dict, stats: dict, why: str) -> None:
    with pytest.raises(ValueError) as error:
        plan_caches(config(**given), LAYERS, jnp.dtype("float32"), lambda: 1000, device(**stats))
    message = str(error.value)
    assert message.startswith(f"no room for a KV cache ({why}")
    for option in ("max_num_batched_tokens", "gpu_memory_utilization", "cpu_cache_bytes", "num_blocks"):
        assert option in message


def test_allocated_caches_are_what_the_plan_counted() -> None:
    caches = allocate_caches(LAYERS, 3, 4, jnp.dtype("bfloat16"))
    assert [cache.k.shape for cache in caches] == [cache.v.shape for cache in caches] == [(3, 4, 1, 8), (3, 4, 3, 8)]
    assert sum(array.nbytes for cache in caches for array in cache) == 3 * BLOCK // 2
    assert not any(array.any() for cache in caches for array in cache)


def test_more_than_the_machine_has_is_refused_and_not_tried() -> None:
    words = r"takes \d+\.\d GiB \(1024 bytes each\), and this machine has .* num_gpu_blocks_override"
    with pytest.raises(ValueError, match=words):
        allocate_caches(LAYERS, 2**40, 4, jnp.dtype("float32"))


def test_what_the_device_has_no_room_for_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise jax.errors.JaxRuntimeError(reason)

    monkeypatch.setattr(jnp, "zeros", full)
    reason = "RESOURCE_EXHAUSTED: Out of memory"
    with pytest.raises(ValueError, match="of 3 blocks .* has no room for them: lower num_blocks"):
        allocate_caches(LAYERS, 3, 4, jnp.dtype("float32"))
    reason = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        allocate_caches(LAYERS, 3, 4, jnp.dtype("float32"))
