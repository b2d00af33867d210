"""Rotary embeddings by their definition."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.rope import LinearScaling, Llama3Scaling, RopeConfig, inverse_frequencies, rope_table
from pallas_kernels import apply_rope

LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def by_wavelength(frequency: float, scaling: Llama3Scaling) -> float:
    """Llama 3's rule, case by case."""
    wavelength = 2 * math.pi / frequency
    original = scaling.original_max_position_embeddings
    if wavelength < original / scaling.high_freq_factor:
        return frequency
    if wavelength > original / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def test_frequencies():
    plain = [5e5 ** (-2 * i / 128) for i in range(64)]
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(5e5), 128), plain, rtol=1e-6)
    linear = RopeConfig(5e5, LinearScaling(4.0))
    np.testing.assert_allclose(inverse_frequencies(linear, 128), np.array(plain) / 4, rtol=1e-6)
    scaled = [by_wavelength(frequency, LLAMA3) for frequency in plain]
    # All three cases of the rule occur.
    kept = sum(a == b for a, b in zip(scaled, plain, strict=True))
    divided = sum(a == b / 8 for a, b in zip(scaled, plain, strict=True))
    assert kept and divided and kept + divided < 64
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(5e5, LLAMA3), 128), scaled, rtol=1e-6)


def test_dimension_i_turns_with_dimension_i_plus_half():
    x = jnp.zeros((1, 1, 4)).at[0, 0, 1].set(1.0)
    turned = apply_rope(x, rope_table(RopeConfig(100.0), 4, jnp.array([3])))
    angle = 3 * 100 ** (-2 / 4)
    np.testing.assert_allclose(turned[0, 0], [0, math.cos(angle), 0, math.sin(angle)], atol=1e-6)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_products_depend_on_distance_alone(query, key, shift):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 16)), jnp.float32)

    def product(positions):
        q, k = apply_rope(x, rope_table(RopeConfig(1e4), 16, jnp.array(positions)))[:, 0]
        return float(q @ k)

    assert product([query, key]) == pytest.approx(product([query + shift, key + shift]), abs=2e-3)


def test_bfloat16_heads_are_turned_by_float32_angles():
    positions = jnp.array([256, 257])
    x = jnp.zeros((2, 1, 4), jnp.bfloat16).at[:, 0, 0].set(1)
    turned = apply_rope(x, rope_table(RopeConfig(1e4), 4, positions))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(turned[:, 0, 0], np.float32), np.cos(np.array([256, 257])), atol=4e-3)
