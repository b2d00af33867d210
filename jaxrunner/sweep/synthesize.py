"""Step shapes of a day of traffic, from its arrivals alone: the embedded scheduler runs, a model does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxrunner.arrival_trace import Arrival
from jaxrunner.kv_cache.manager import KVCacheManager
from jaxrunner.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from jaxrunner.protocol import ModelRunnerOutput, SchedulerOutput
from jaxrunner.request import Request
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.scheduler import Scheduler, SchedulerConfig
from jaxrunner.shape_record import StepRecord

_BLOCK = 16


@dataclass(frozen=True)
class StepTime:
    """Seconds that a step of n tokens is taken to last: ``base + n * per_token``. Sets how many requests meet.

    The defaults are of the size of an 8B model on one H200: 16 GB of weights at 4.8 TB/s, 16 G operations a token at
    half of 989 T/s, and some time for all else. They are assumptions of the simulation, not measurements.
    """

    base: float = 5e-3
    per_token: float = 32e-6


def synthesize(
    arrivals: Sequence[Arrival],
    config: SchedulerConfig,
    *,
    step_time: StepTime | None = None,
    speed: float = 1.0,
    num_blocks: int | None = None,
    max_steps: int | None = None,
    on_step: Callable[[int], None] = lambda finished: None,
) -> list[StepRecord]:
    """Runs a trace's requests through the scheduler on a clock of its own, and gives every step's shape.

    Prompts share nothing. A prompt that leaves no room for its output is cut to the limits of ``config``.

    Args:
        speed: the trace's seconds that pass in one of the clock's: 2 doubles the load.
        num_blocks: KV-cache blocks of 16 tokens. None: enough, so that nothing is preempted.
        max_steps: stop after so many.
        on_step: told after each step how many requests have come to their end.

    Raises:
        ValueError: a speed that isn't above 0.
    """
    if not speed > 0:
        raise ValueError(f"speed must be above 0, got {speed}")
    time_of = step_time if step_time is not None else StepTime()
    enough = 1 + config.max_num_seqs * -(-config.max_model_len // _BLOCK)
    group = KVCacheGroup([0], FullAttentionSpec(_BLOCK, 1, 1))
    scheduler = Scheduler(config, KVCacheManager(KVCacheConfig(num_blocks or enough, [group]), False))
    queue, now, arrived, finished = list(arrivals), 0.0, 0, 0
    records: list[StepRecord] = []
    while max_steps is None or len(records) < max_steps:
        if not scheduler.has_unfinished_requests():
            if arrived == len(queue):
                break
            now = max(now, queue[arrived].time / speed)
        while arrived < len(queue) and queue[arrived].time / speed <= now:
            scheduler.add_request(_request(arrived, queue[arrived], config.max_model_len))
            arrived += 1
        plan = scheduler.schedule()
        record, output = _run(scheduler, plan)
        records.append(record)
        now += time_of.base + time_of.per_token * record.tokens
        finished += sum(update.finish_reason is not None for update in scheduler.update_from_output(plan, output))
        on_step(finished)
    return records


def _request(number: int, arrival: Arrival, max_model_len: int) -> Request:
    prompt = min(arrival.num_prompt_tokens, max_model_len - 1)
    params = SamplingParams(max_tokens=arrival.num_output_tokens, ignore_eos=True, detokenize=False)
    return Request(str(number), [1] * prompt, params, arrival_time=arrival.time)


def _run(scheduler: Scheduler, plan: SchedulerOutput) -> tuple[StepRecord, ModelRunnerOutput]:
    """The step's shape, and an output as if a model had sampled token 1 for every request that is due one."""
    counts = plan.num_scheduled_tokens
    sampled, longest = [], 0
    for req_id, count in counts.items():
        request = scheduler.requests[req_id]
        end = request.num_computed_tokens + count
        longest = max(longest, end)
        sampled.append([1] if end == request.num_tokens else [])
    record = StepRecord(sum(counts.values()), len(counts), len(counts), max(counts.values()), longest)
    ids = list(counts)
    return record, ModelRunnerOutput(ids, {req_id: row for row, req_id in enumerate(ids)}, sampled)
