"""The embedded scheduler that drives the runner: who runs how many tokens in the next step, and when a
request ends.

``config`` holds the limits, ``queue`` the order of service, ``prefills`` counts prompts that are under way, ``plan``
writes a step down as the protocol wants it, ``update`` reads what it brought, ``scheduler`` decides.
"""

from jaxrunner.scheduler.config import POLICIES, Policy, SchedulerConfig, check_partial_prefills
from jaxrunner.scheduler.scheduler import Scheduler
from jaxrunner.scheduler.update import RequestUpdate

__all__ = ["POLICIES", "Policy", "RequestUpdate", "check_partial_prefills", "Scheduler", "SchedulerConfig"]
