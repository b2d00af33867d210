"""Running a workload on an engine and writing down what happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jaxrunner.bench.events import RequestEvents, RunLog, StepEvent
from jaxrunner.bench.metrics import SEGMENTS
from jaxrunner.bench.workload import BenchRequest
from jaxrunner.sampling_params import SamplingParams


def drive(
    llm: Any,
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    on_step: Callable[[int, int], None] | None = None,
    step_context: Callable[[int], AbstractContextManager[Any]] | None = None,
) -> RunLog:
    """Hands each request to the engine at its time and steps until all have ended.

    Args:
        llm: an ``LLM`` without unfinished requests.
        times: seconds from the start, ascending; one a request. A request that comes while a step runs waits for its
            end, and its latency counts from its own time.
        max_concurrency: requests in the engine at once; later ones wait outside, and wait from their arrival on.
        on_step: told of tokens and of requests that ended, for a progress bar.
        step_context: entered around each step, told its number; for a profiler.

    Returns:
        The log, times from the first arrival on.
    """
    engine, runner = llm.engine, llm.runner
    log = RunLog()
    by_id: dict[str, RequestEvents] = {}
    prompts = []
    for i, (request, arrival) in enumerate(zip(requests, times, strict=True)):
        params = SamplingParams(
            temperature=temperature,
            seed=seed + i,
            max_tokens=request.num_output_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        events = RequestEvents(f"bench-{i}", len(request.token_ids), arrival)
        prompts.append(llm.inputs.process({"prompt_token_ids": request.token_ids}, params))
        by_id[events.request_id] = events
        log.requests.append(events)
    clock, waiting, running = time.perf_counter, 0, 0
    step_context = step_context or (lambda number: nullcontext())
    start, compilations = clock(), runner.counter.compilations
    while waiting < len(requests) or running:
        now = clock() - start
        while waiting < len(requests) and times[waiting] <= now and running < (max_concurrency or len(requests)):
            engine.add_request(f"bench-{waiting}", prompts[waiting])
            waiting, running = waiting + 1, running + 1
        if not running:
            time.sleep(max(times[waiting] - now, 0.0))
            continue
        before = runner.times.as_dict()
        with step_context(len(log.steps)):
            began = clock() - start
            result = engine.step()
            ended = clock() - start
        finished = _take(result, by_id, ended)
        running -= finished
        log.steps.append(_step_event(llm, began, ended, before))
        if on_step is not None:
            on_step(sum(len(d.token_ids) for d in result.deltas), finished)
    log.duration = max((r.finished or 0.0) for r in log.requests)
    log.num_compilations = runner.counter.compilations - compilations
    return log


def _take(result: Any, by_id: dict[str, RequestEvents], now: float) -> int:
    for delta in result.deltas:
        if delta.token_ids:
            by_id[delta.request_id].outputs.append((now, len(delta.token_ids)))
    for output in result.finished:
        events = by_id[output.request_id]
        events.finished, events.finish_reason = now, output.outputs[0].finish_reason
        events.num_cached_tokens = output.num_cached_tokens or 0
        events.num_preemptions = output.metrics.num_preemptions if output.metrics else 0
    return len(result.finished)


def _step_event(llm: Any, began: float, ended: float, before: dict[str, float]) -> StepEvent:
    scheduler, after = llm.engine.scheduler, llm.runner.times.as_dict()
    grown = {name: after[name] - before[name] for name in after}
    return StepEvent(
        began,
        ended,
        int(grown["tokens"]),
        int(grown["padded_tokens"]),
        scheduler.num_waiting,
        len(scheduler.running),
        scheduler.usage_in_step,
        {name: grown[name] for parts in SEGMENTS.values() for name in parts},
    )
