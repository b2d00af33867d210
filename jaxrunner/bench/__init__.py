"""Measuring a running engine: workloads, arrivals, what happened, and the numbers that follow.

``events`` is the log of a run, ``metrics`` what follows from it (definitions as in vLLM's bench), ``workload`` makes
prompts, ``arrivals`` says when they come, ``drive`` runs them, ``report`` prints and writes.
"""

from jaxrunner.bench.arrivals import arrival_times
from jaxrunner.bench.drive import drive
from jaxrunner.bench.events import RequestEvents, RunLog, StepEvent
from jaxrunner.bench.metrics import SLO, Metrics, compute_metrics
from jaxrunner.bench.workload import BenchRequest, random_requests

__all__ = [
    "SLO",
    "BenchRequest",
    "Metrics",
    "RequestEvents",
    "RunLog",
    "StepEvent",
    "arrival_times",
    "compute_metrics",
    "drive",
    "random_requests",
]
