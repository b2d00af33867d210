"""Every padded shape of the project is decided here, and nowhere else. Pure Python: no JAX, no NumPy."""

from jaxrunner.shapes.buckets import Buckets, StepShape, StepShapes
from jaxrunner.shapes.dispatch import BatchDescriptor, Dispatcher, dummy_batch, is_uniform_decode, uniform_sizes
from jaxrunner.shapes.ladders import (
    bounded_waste,
    cdiv,
    padding_table,
    powers_of_two,
    round_up,
    round_up_to_multiple,
    spread,
    vllm_sizes,
)
from jaxrunner.shapes.layout import StepLayout
from jaxrunner.shapes.modes import ExecutionMode, Policy, Support, supported_policy

__all__ = [
    "BatchDescriptor",
    "Buckets",
    "Dispatcher",
    "ExecutionMode",
    "Policy",
    "StepLayout",
    "StepShape",
    "StepShapes",
    "Support",
    "bounded_waste",
    "cdiv",
    "dummy_batch",
    "is_uniform_decode",
    "padding_table",
    "powers_of_two",
    "round_up",
    "round_up_to_multiple",
    "spread",
    "supported_policy",
    "uniform_sizes",
    "vllm_sizes",
]
