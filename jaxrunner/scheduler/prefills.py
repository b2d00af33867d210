"""How many requests may be in the middle of their prompt at the same time."""

from __future__ import annotations

from enum import Enum

from jaxrunner.scheduler.config import SchedulerConfig
from jaxrunner.scheduler.plan import StepPlan


class Admission(Enum):
    """What a waiting request's turn comes to."""

    STARTS = "starts"
    WAITS = "waits"  # and so does everybody behind it
    STEPS_ASIDE = "steps aside"  # waits, and those behind it may go first


class PartialPrefills:
    """Counts the prompts that a step leaves unfinished, and says whether there may be one more.

    Without limits nothing is counted.
    """

    def __init__(self, config: SchedulerConfig, plan: StepPlan) -> None:
        self._config = config
        self._limited = bool(config.max_num_partial_prefills or config.max_long_partial_prefills)
        self._all = self._long = 0
        if self._limited:
            for request, count in zip(plan.requests, plan.counts, strict=True):
                self.add(request.num_tokens - request.num_computed_tokens, count)

    def add(self, remaining: int, count: int) -> None:
        """A request gets ``count`` of the ``remaining`` tokens that it has to compute."""
        if count < remaining:
            self._all += 1
            self._long += self._is_long(remaining)

    def admission(self, remaining: int, count: int) -> Admission:
        """Whether a request may start that has ``remaining`` tokens to compute and would get ``count`` in this step."""
        config = self._config
        if not self._limited or count == remaining:
            return Admission.STARTS
        if 0 < config.max_num_partial_prefills <= self._all:
            return Admission.WAITS
        if 0 < config.max_long_partial_prefills <= self._long and self._is_long(remaining):
            return Admission.STEPS_ASIDE
        return Admission.STARTS

    def _is_long(self, remaining: int) -> bool:
        return 0 < self._config.long_prefill_token_threshold < remaining
