"""The bench's numbers: against values worked out by hand, and against another computation of the same random log."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrunner.bench import SLO, RequestEvents, RunLog, StepEvent, compute_metrics


def hand_made() -> RunLog:
    segments = {"update": 0.01, "prepare": 0.02, "dispatch": 0.03, "wait": 0.5, "record": 0.04}
    return RunLog(
        requests=[
            # Arrives at 1, tokens at 2, 2.5, 4 (two at once): 4 tokens.
            RequestEvents("a", 10, 1.0, [(2.0, 1), (2.5, 1), (4.0, 2)], 4.0, "length", num_cached_tokens=4),
            RequestEvents("b", 5, 2.0, [(4.0, 1)], 4.0, "length", num_preemptions=1),  # a single token: no TPOT
            RequestEvents("c", 7, 3.0, [(4.0, 1)]),  # never ended
        ],
        steps=[
            StepEvent(1.0, 2.0, 10, 16, 0, 1, 0.25, segments),
            StepEvent(2.0, 5.0, 6, 16, 2, 1, 0.5, segments),
        ],
        duration=5.0,
        num_draft_tokens=3,
        num_accepted_tokens=1,
        num_compilations=2,
    )


def test_the_numbers_worked_out_by_hand():
    m = compute_metrics(hand_made(), SLO(ttft=1500.0, tpot=700.0))
    assert (m.completed, m.failed) == (2, 1)
    assert (m.total_input_tokens, m.total_output_tokens, m.cached_input_tokens) == (15, 5, 4)
    assert m.request_throughput == pytest.approx(0.4)
    assert m.output_throughput == pytest.approx(1.0) and m.total_token_throughput == pytest.approx(4.0)
    assert (m.ttft_ms.mean, m.ttft_ms.median) == pytest.approx((1500.0, 1500.0))  # 1.0 and 2.0 s
    assert m.ttft_ms.percentiles["p90"] == pytest.approx(1900.0)
    assert m.tpot_ms.count == 1 and m.tpot_ms.mean == pytest.approx(2000 / 3)  # (4.0 - 2.0) / (4 - 1)
    assert m.itl_ms.count == 2 and m.itl_ms.mean == pytest.approx(1000.0)  # 0.5 and 1.5 s
    assert m.e2el_ms.mean == pytest.approx(2500.0)  # 3.0 and 2.0 s
    assert m.request_goodput == pytest.approx(0.2)  # a: 1000 ms and 667 ms; b: 2000 ms is too late
    assert m.padding_waste == pytest.approx(0.5)
    assert (m.max_queue_depth, m.mean_queue_depth) == (2, pytest.approx(1.5))
    assert m.mean_kv_usage == pytest.approx((0.25 + 3 * 0.5) / 4) and m.peak_kv_usage == 0.5
    assert (m.preemptions, m.compilations, m.draft_tokens, m.accepted_tokens) == (1, 2, 3, 1)
    assert m.segments_ms["preprocess"].mean == pytest.approx(60.0)
    assert m.segments_ms["forward"].mean == pytest.approx(500.0)
    assert m.segments_ms["postprocess"].mean == pytest.approx(40.0)


def test_an_undefined_tpot_meets_every_objective_and_a_missed_one_does_not():
    log = hand_made()
    assert compute_metrics(log, SLO(tpot=1.0)).request_goodput == pytest.approx(0.2)  # b alone
    assert compute_metrics(log, SLO(e2el=2500.0)).request_goodput == pytest.approx(0.2)
    assert compute_metrics(log).request_goodput is None
    with pytest.raises(ValueError, match="duration"):
        compute_metrics(RunLog())


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=50)
def test_they_agree_with_another_computation(counts: list[list[int]], seed: int):
    """Plain Python over a list of single tokens, each with its time."""
    rng = np.random.default_rng(seed)
    log, tokens = RunLog(duration=100.0), []
    for i, steps in enumerate(counts):
        arrival = float(rng.uniform(0, 10))
        times = (arrival + np.cumsum(rng.uniform(0.01, 1, len(steps)))).tolist()
        outputs = list(zip(times, steps, strict=True))
        log.requests.append(RequestEvents(str(i), 3, arrival, outputs, times[-1], "length"))
        tokens.append((arrival, [t for t, n in outputs for _ in range(n)]))
    m = compute_metrics(log)
    assert m.output_throughput == pytest.approx(sum(len(ts) for _, ts in tokens) / 100)
    assert m.ttft_ms.mean == pytest.approx(1000 * statistics.fmean(ts[0] - a for a, ts in tokens))
    assert m.e2el_ms.median == pytest.approx(1000 * statistics.median(ts[-1] - a for a, ts in tokens))
    tpots = [(ts[-1] - ts[0]) / (len(ts) - 1) for _, ts in tokens if len(ts) > 1]
    assert (m.tpot_ms is None) == (not tpots)
    if tpots:
        assert m.tpot_ms.mean == pytest.approx(1000 * statistics.fmean(tpots))
    gaps = [b - a for _, ts in tokens for a, b in zip(sorted(set(ts)), sorted(set(ts))[1:], strict=False)]
    assert (m.itl_ms.count if m.itl_ms else 0) == len(gaps)
    if gaps:
        ordered = sorted(gaps)
        at = 0.99 * (len(ordered) - 1)  # linear between the two nearest ranks
        low = int(at)
        p99 = ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])
        assert m.itl_ms.percentiles["p99"] == pytest.approx(1000 * p99)


def test_objectives_are_read_as_vllm_writes_them():
    assert SLO.parse(["ttft:200", "tpot:50.5"]) == SLO(ttft=200.0, tpot=50.5)
    for wrong in ("ttft", "ttft:x", "itl:3", "tpot:0"):
        with pytest.raises(ValueError, match="must be like"):
            SLO.parse([wrong])
