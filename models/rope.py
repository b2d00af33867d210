"""Rotary position embeddings: frequencies from a configuration, one table a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from pallas_kernels import RopeTable


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies divided by ``factor``, high ones kept, a ramp between.

    A frequency is low when its wavelength is over ``original_max_position_embeddings / low_freq_factor`` tokens, high
    when it is under ``original_max_position_embeddings / high_freq_factor``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeConfig:
    """How a kind of layer rotates its queries and keys.

    Attributes:
        theta: base of the geometric series of frequencies.
        scaling: what stretches it to longer contexts; None: nothing.
    """

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float32[np.ndarray, "half_D"]:
    """Radians per position of each pair of dimensions: theta^(-2i/D), then scaled."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    match rope.scaling:
        case LinearScaling(factor):
            frequencies = frequencies / factor
        case Llama3Scaling(factor, low, high, original):
            turns = original * frequencies / (2 * math.pi)  # rotations within the original context
            kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
            frequencies = frequencies * ((1 - kept) / factor + kept)
    return frequencies.astype(np.float32)


def rope_table(rope: RopeConfig, head_dim: int, positions: Int[Array, "T"]) -> RopeTable:
    """The table for these positions, in float32 whatever the model's dtype: bfloat16 can't tell 257 from 256."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return RopeTable(jnp.cos(angles), jnp.sin(angles))
