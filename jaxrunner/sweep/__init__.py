"""The choice of token buckets from recorded or synthesised step shapes."""

from jaxrunner.sweep.ladders import Ladder, compare
from jaxrunner.sweep.optimal import StepCounts, optimal_ladders
from jaxrunner.sweep.synthesize import StepTime, synthesize

__all__ = ["Ladder", "StepCounts", "StepTime", "compare", "optimal_ladders", "synthesize"]
