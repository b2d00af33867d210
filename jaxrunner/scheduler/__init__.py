"""The embedded scheduler that drives the runner: who runs how many tokens in the next step, and when a
request ends.

``config`` holds the limits, ``plan`` writes a step down as the protocol wants it, ``scheduler`` decides.
"""

from jaxrunner.scheduler.config import SchedulerConfig
from jaxrunner.scheduler.scheduler import RequestUpdate, Scheduler

__all__ = ["RequestUpdate", "Scheduler", "SchedulerConfig"]
