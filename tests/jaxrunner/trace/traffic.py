"""Traffic without a model, recorded: chunked prefills, prefix hits, preemption, more requests than rows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxrunner.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheManager
from jaxrunner.protocol import CachedRequestData, NewRequestData, SchedulerOutput
from jaxrunner.request import Request
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.scheduler import Scheduler, SchedulerConfig
from jaxrunner.trace import Geometry
from jaxrunner.trace.experiment import HostRunner

BLOCK = 4


def geometry(num_blocks: int = 14, max_num_reqs: int = 4, budget: int = 12, max_model_len: int = 100) -> Geometry:
    small = Geometry(max_num_reqs, max_model_len, budget, 1000, 0, (BLOCK,), (0,), (BLOCK,), num_blocks, 0, (), 0)
    return Geometry.of(small.new_batch())


def run_traffic(
    path: Path,
    num_requests: int = 12,
    seed: int = 0,
    make_runner: Callable[[Path, Geometry], HostRunner] = HostRunner,
    change_plan: Callable[[SchedulerOutput], SchedulerOutput] = lambda plan: plan,
    most_steps: int = 100_000,
    arrivals_a_step: int = 1,
    **limits: int,
) -> HostRunner:
    """Runs random requests to their end and closes the trace.

    Args:
        change_plan: what the runner is told in place of the scheduler's plan.
    """
    rng = np.random.default_rng(seed)
    g = geometry(**limits)
    runner = make_runner(path, g)
    config = SchedulerConfig(
        max_num_seqs=g.max_num_reqs, max_num_batched_tokens=g.max_num_batched_tokens, max_model_len=g.max_model_len
    )
    pool = KVCacheConfig(g.num_blocks, [KVCacheGroup([0], FullAttentionSpec(BLOCK, 1, 1))])
    scheduler = Scheduler(config, KVCacheManager(pool, True))
    shared = rng.integers(0, 1000, 9).tolist()
    requests = []
    for i in range(num_requests):
        prompt = (shared if rng.random() < 0.5 else []) + rng.integers(0, 1000, rng.integers(1, 16)).tolist()
        params = SamplingParams(temperature=0, max_tokens=int(rng.integers(1, 14)), ignore_eos=True)
        requests.append(Request(f"r{i}", prompt, params, ()))
    try:
        for _ in range(most_steps):
            if requests and rng.random() < 0.5:
                for _ in range(min(arrivals_a_step, len(requests))):
                    scheduler.add_request(requests.pop())
            if not requests and not scheduler.has_requests():
                return runner
            plan = scheduler.schedule()
            scheduler.update_from_output(plan, runner.step(change_plan(plan)))
        raise AssertionError("the traffic did not end")
    finally:
        runner.recorder.close()


def two_groups(folder: Path) -> Path:
    """A trace of three steps: two cache groups, the first addressed in halves by its kernel, and rows with drafts."""
    small = Geometry(3, 32, 16, 100, 0, (2, 8), (0, 0), (4, 8), 20, 2, (), 0)
    path = folder / "groups.jsonl"
    runner = HostRunner(path, Geometry.of(small.new_batch()))

    def step(computed: dict[str, int], outputs: dict[str, int], drafts: dict[str, list[int]]) -> None:
        counts = {r: 1 + len(drafts.get(r, [])) for r in computed}
        cached = CachedRequestData(
            [*computed], set(), [None] * len(computed), [*computed.values()], [*outputs.values()]
        )
        runner.step(SchedulerOutput([], cached, counts, sum(counts.values()), drafts))

    new = [NewRequestData("a", [1, 2, 3, 4, 5], ([1, 2, 3], [4, 5])), NewRequestData("b", [7, 8], ([4, 5], [6]))]
    runner.step(SchedulerOutput(new, num_scheduled_tokens={"a": 5, "b": 2}, total_num_scheduled_tokens=7))
    step({"a": 5, "b": 2}, {"a": 1, "b": 1}, {"a": [9, 9]})
    step({"a": 6, "b": 3}, {"a": 2, "b": 2}, {"b": [11]})  # both drafts of a were refused
    runner.recorder.close()
    return path
