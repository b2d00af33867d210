"""Step records: writing them, checking them, running them again, and explaining the first wrong number.

``format`` says what stands in a trace. ``recorder`` writes one (``RunnerConfig(trace=PATH)``), ``reader`` opens it,
``check`` compares it with the scheduler's plans, ``replay`` runs it again, ``diff`` compares two, ``stops`` and
``tables`` show it.
"""

from jaxrunner.trace.check import Finding, TraceChecker, check_trace
from jaxrunner.trace.diff import diff_traces
from jaxrunner.trace.encode import Encoder, Geometry, StepRecord
from jaxrunner.trace.experiment import run_experiment
from jaxrunner.trace.reader import Trace, open_trace
from jaxrunner.trace.recorder import StepRecorder
from jaxrunner.trace.replay import Difference, HostStepper, replay
from jaxrunner.trace.stops import Stop, stops
from jaxrunner.trace.symptoms import SYMPTOMS, Symptom

__all__ = [
    "SYMPTOMS",
    "Difference",
    "Encoder",
    "Finding",
    "Geometry",
    "HostStepper",
    "Stop",
    "StepRecord",
    "StepRecorder",
    "Symptom",
    "Trace",
    "TraceChecker",
    "check_trace",
    "diff_traces",
    "open_trace",
    "replay",
    "run_experiment",
    "stops",
]
