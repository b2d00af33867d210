"""Every padded shape of the project is decided here, and nowhere else. Pure Python: no JAX, no NumPy."""

from jaxrunner.shapes.buckets import StepShape, StepShapes, powers_of_two, round_up
from jaxrunner.shapes.layout import StepLayout

__all__ = ["StepLayout", "StepShape", "StepShapes", "powers_of_two", "round_up"]
