"""Two thousand steps of mixed traffic after warm-up, across every bucket's edge, with new members all the time: nothing
compiles. Counted by JAX's own events, not by ours.
"""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from jaxrunner import runner as runner_module
from jaxrunner.config import RunnerConfig
from jaxrunner.kv_cache.manager import KVCacheManager
from jaxrunner.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from jaxrunner.request import Request
from jaxrunner.runner import ModelRunner
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.scheduler import Scheduler, SchedulerConfig
from models import Decoder, ModelConfig
from tests.jaxrunner.plans import compilations
from tests.jaxrunner.step.test_padding import CONFIG as MODEL

STEPS, REQS, BUDGET, LENGTH, BLOCK = 2000, 5, 24, 48, 4
CONFIG = RunnerConfig(
    max_model_len=LENGTH,
    max_num_reqs=REQS,
    max_num_batched_tokens=BUDGET,
    token_buckets=(1, 4, 9),
    logits_buckets=(2,),
    block_size=BLOCK,
    num_blocks=14,
    warmup="all",
    compilation_cache=False,
)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(Decoder(ModelConfig.from_hf(MODEL), rngs=nnx.Rngs(0)), CONFIG)


def test_two_thousand_steps_compile_nothing(runner: ModelRunner) -> None:
    rng = np.random.default_rng(0)
    group = KVCacheGroup([0], FullAttentionSpec(BLOCK, 2, 16))
    # Few blocks: requests are preempted and come back, and share blocks of common beginnings.
    manager = KVCacheManager(KVCacheConfig(CONFIG.num_blocks, [group]), True)
    scheduler = Scheduler(SchedulerConfig(REQS, BUDGET, LENGTH), manager)
    numbers = itertools.count()

    def request() -> Request:
        number = next(numbers)
        length = int(rng.integers(1, 40))
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 12)),
            temperature=float(number % 3),
            top_k=number % 4,
            repetition_penalty=1.0 + 0.1 * (number % 2),
            ignore_eos=True,
            detokenize=False,
        )
        return Request(str(number), rng.integers(1, 60, length).tolist(), params)

    seen: list[int] = []
    members: set[frozenset[str]] = set()
    with compilations() as events:
        for step in range(STEPS):
            # Quiet times, one request after the other, and times with more than can run.
            wanted = 1 if step // 40 % 3 == 0 else 1 + int(rng.integers(0, 2 * REQS))
            while len(scheduler.requests) < wanted:
                scheduler.add_request(request())
            plan = scheduler.schedule()
            scheduler.update_from_output(plan, runner.execute_model(plan))
            seen.append(plan.total_num_scheduled_tokens)
            members.add(frozenset(plan.num_scheduled_tokens))
    assert events == [] and runner.compilations == 0 and runner.executables.late == 0
    edges = runner.shapes.tokens
    assert edges == (1, 4, 9, 24)
    assert set(seen) >= {
        size for edge in edges for size in (edge, min(edge + 1, BUDGET))
    }  # at every edge and behind it
    assert len(members) > 400 and scheduler.num_preemptions > 0


@pytest.mark.parametrize("place", ["uploads_ahead", "edit_blocks", "record_tokens", "runner_output"])
def test_what_compiles_in_a_step_is_counted(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A helper that compiles behind the executables' back would not go unseen, wherever in a step: before its inputs
    are prepared, in the dispatch, and when its results are read.
    """
    runner.reset()
    owner = runner.executables if place == "edit_blocks" else runner_module
    helper = getattr(owner, place)

    def compiles(*arguments):
        jax.jit(lambda x: x * 1.25 - 3).lower(np.zeros(3, np.float32)).compile()
        return helper(*arguments)

    monkeypatch.setattr(owner, place, compiles)
    scheduler = Scheduler(
        SchedulerConfig(REQS, BUDGET, LENGTH),
        KVCacheManager(KVCacheConfig(CONFIG.num_blocks, [KVCacheGroup([0], FullAttentionSpec(BLOCK, 2, 16))]), False),
    )
    scheduler.add_request(Request("a", [1, 2], SamplingParams(max_tokens=1, detokenize=False)))
    before = runner.compilations
    plan = scheduler.schedule()
    runner.execute_model(replace(plan, block_copies=([(1, 2)],)))
    assert runner.compilations == before + 1
    runner.compilations = before
