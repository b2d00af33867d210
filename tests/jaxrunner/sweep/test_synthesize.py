"""Steps out of arrivals alone: every token is computed once, within the limits, and more load means fuller steps."""

import pytest

from jaxrunner.arrival_trace import Arrival
from jaxrunner.scheduler import SchedulerConfig
from jaxrunner.sweep import StepTime, synthesize

ARRIVALS = [Arrival(0.1 * i, 1 + 37 * i % 90, 1 + i % 7) for i in range(40)]
CONFIG = SchedulerConfig(8, 32, 128)


def test_every_token_is_computed_once_within_the_limits() -> None:
    steps = synthesize(ARRIVALS, CONFIG)
    # The last output token of a request is sampled, never fed in.
    assert sum(s.tokens for s in steps) == sum(a.num_prompt_tokens + a.num_output_tokens - 1 for a in ARRIVALS)
    assert all(1 <= s.requests <= 8 and s.requests <= s.tokens <= 32 for s in steps)
    assert all(s.logits_rows == s.requests and s.max_query <= s.tokens - s.requests + 1 for s in steps)
    assert max(s.max_len for s in steps) == max(a.num_prompt_tokens + a.num_output_tokens - 1 for a in ARRIVALS)


def test_a_faster_trace_has_fewer_and_fuller_steps() -> None:
    slow, fast = synthesize(ARRIVALS, CONFIG), synthesize(ARRIVALS, CONFIG, speed=50)
    assert len(fast) < len(slow)
    assert max(s.requests for s in fast) > max(s.requests for s in slow)
    longer = synthesize(ARRIVALS, CONFIG, step_time=StepTime(base=10.0))  # all have come before the first step ends
    assert len(longer) <= len(fast)


def test_a_long_prompt_is_cut_and_steps_can_be_limited() -> None:
    steps = synthesize([Arrival(0, 1000, 5)], CONFIG)
    assert sum(s.tokens for s in steps) == 127 and steps[-1].max_len == 127
    assert len(synthesize(ARRIVALS, CONFIG, max_steps=3)) == 3


def test_crowded_caches_preempt_and_still_finish() -> None:
    seen: list[int] = []
    steps = synthesize(ARRIVALS, CONFIG, speed=100, num_blocks=9, on_step=seen.append)
    assert seen[-1] == len(ARRIVALS)
    assert sum(s.tokens for s in steps) >= sum(a.num_prompt_tokens + a.num_output_tokens - 1 for a in ARRIVALS)


def test_no_arrivals_no_steps() -> None:
    assert synthesize([], CONFIG) == []
    with pytest.raises(ValueError, match="speed must be above 0, got 0"):
        synthesize(ARRIVALS, CONFIG, speed=0)
    with pytest.raises(ValueError, match="max_num_seqs"):
        SchedulerConfig(0, 1, 2)
