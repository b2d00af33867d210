"""Numbers of a run. Definitions are those of vLLM's bench, so that figures can be compared.

For a request that arrived at a and got its tokens at t_1 <= ... <= t_N:

TTFT  time to first token           t_1 - a
TPOT  time per output token         (t_N - t_1) / (N - 1); undefined for N < 2, and left out
ITL   inter-token latency           t_i - t_(i-1), a sequence: every gap between two outputs of a request
E2E   end-to-end latency            t_N - a

Tokens that came together (drafts accepted in one step) are one output: one gap, as a user sees it. Throughput counts
committed output tokens of finished requests over the run's duration. Goodput is the rate of requests that meet every
given objective; where TPOT is undefined, it meets any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxrunner.bench.events import RequestEvents, RunLog

PERCENTILES = (50, 90, 95, 99)
SEGMENTS = {"preprocess": ("update", "prepare", "dispatch"), "forward": ("wait",), "postprocess": ("record",)}


@dataclass(frozen=True, slots=True)
class SLO:
    """Service level objectives, in milliseconds; None: no such objective."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> SLO:
        """From "ttft:200 tpot:50 e2el:3000", as vLLM's --goodput.

        Raises:
            ValueError: another name, or no positive number.
        """
        values: dict[str, float] = {}
        for text in texts:
            name, _, number = text.partition(":")
            try:
                value = float(number)
            except ValueError:
                value = 0.0
            if name not in ("ttft", "tpot", "e2el") or not value > 0:
                raise ValueError(
                    f"an objective must be like ttft:200, tpot:50 or e2el:3000 (milliseconds), got {text!r}"
                )
            values[name] = value
        return cls(**values)

    def met_by(self, ttft: float, tpot: float | None, e2el: float) -> bool:
        """Is it, by a request with these latencies in seconds?"""
        limits = ((self.ttft, ttft), (self.tpot, tpot), (self.e2el, e2el))
        return all(limit is None or value is None or value * 1000 <= limit for limit, value in limits)


@dataclass(frozen=True, slots=True)
class Summary:
    """A distribution in milliseconds. Percentiles are interpolated linearly."""

    count: int
    mean: float
    median: float
    std: float
    percentiles: dict[str, float]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Summary | None:
        """None of nothing."""
        if not seconds:
            return None
        ms = np.asarray(seconds, np.float64) * 1000
        percentiles = {f"p{p}": float(v) for p, v in zip(PERCENTILES, np.percentile(ms, PERCENTILES), strict=True)}
        return cls(len(ms), float(ms.mean()), float(np.median(ms)), float(ms.std()), percentiles)


@dataclass(frozen=True, slots=True)
class Metrics:
    """All numbers of a run.

    Attributes:
        completed, failed: requests that ended, and that did not within the run.
        request_throughput, output_throughput, total_token_throughput: per second.
        request_goodput: requests per second that meet the objectives; None without objectives.
        padding_waste: padded tokens that were none, of all padded tokens.
        segments_ms: preprocess, forward, postprocess of a step.
    """

    completed: int
    failed: int
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    cached_input_tokens: int
    draft_tokens: int
    accepted_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_ms: Summary | None
    e2el_ms: Summary | None
    steps: int
    padding_waste: float
    max_queue_depth: int
    mean_queue_depth: float
    mean_kv_usage: float
    peak_kv_usage: float
    preemptions: int
    compilations: int
    segments_ms: dict[str, Summary | None]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def latencies(request: RequestEvents) -> tuple[float, float | None, list[float], float]:
    """(TTFT, TPOT or None, ITLs, E2E) of a request that got tokens, in seconds."""
    times = [time for time, _ in request.outputs]
    first, last, n = times[0], times[-1], request.num_output_tokens
    tpot = (last - first) / (n - 1) if n > 1 else None
    return (
        first - request.arrival,
        tpot,
        [b - a for a, b in zip(times, times[1:], strict=False)],
        last - request.arrival,
    )


def compute_metrics(log: RunLog, slo: SLO | None = None) -> Metrics:
    """What follows from a run's events.

    Raises:
        ValueError: the run has no duration.
    """
    if not log.duration > 0:
        raise ValueError(f"a run's duration must be above 0, got {log.duration}: nothing was run")
    done = [r for r in log.requests if r.finished is not None and r.outputs]
    ttfts, tpots, itls, e2els, good = [], [], [], [], 0
    for request in done:
        ttft, tpot, gaps, e2el = latencies(request)
        ttfts.append(ttft)
        e2els.append(e2el)
        itls += gaps
        if tpot is not None:
            tpots.append(tpot)
        good += slo is not None and slo.met_by(ttft, tpot, e2el)
    inputs, outputs = sum(r.num_prompt_tokens for r in done), sum(r.num_output_tokens for r in done)
    padded, used = sum(s.num_padded_tokens for s in log.steps), sum(s.num_tokens for s in log.steps)
    busy = sum(s.end - s.start for s in log.steps) or 1.0

    def over_time(values: Sequence[float]) -> float:
        """Mean over the time that steps took: a long step weighs more."""
        return sum(v * (s.end - s.start) for v, s in zip(values, log.steps, strict=True)) / busy

    waiting, usage = [float(s.num_waiting) for s in log.steps], [s.kv_usage for s in log.steps]
    return Metrics(
        completed=len(done),
        failed=len(log.requests) - len(done),
        duration_s=log.duration,
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        cached_input_tokens=sum(r.num_cached_tokens for r in done),
        draft_tokens=log.num_draft_tokens,
        accepted_tokens=log.num_accepted_tokens,
        request_throughput=len(done) / log.duration,
        output_throughput=outputs / log.duration,
        total_token_throughput=(inputs + outputs) / log.duration,
        request_goodput=None if slo is None else good / log.duration,
        ttft_ms=Summary.of(ttfts),
        tpot_ms=Summary.of(tpots),
        itl_ms=Summary.of(itls),
        e2el_ms=Summary.of(e2els),
        steps=len(log.steps),
        padding_waste=(padded - used) / padded if padded else 0.0,
        max_queue_depth=int(max(waiting, default=0)),
        mean_queue_depth=over_time(waiting),
        mean_kv_usage=over_time(usage),
        peak_kv_usage=max(usage, default=0.0),
        preemptions=sum(r.num_preemptions for r in log.requests),
        compilations=log.num_compilations,
        segments_ms={
            name: Summary.of([sum(s.segments.get(p, 0.0) for p in parts) for s in log.steps if s.segments])
            for name, parts in SEGMENTS.items()
        },
    )
