"""The seam of every projection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.linear import LinearWeights, linear
from models.parameters import Initializer


def weights(dtype, bias: bool = True) -> LinearWeights:
    made = LinearWeights(Initializer(jnp.dtype(dtype), nnx.Rngs(0)), 24, 40, bias)
    if bias:
        made.bias.set_value(jnp.arange(40, dtype=dtype))
    return made


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
@pytest.mark.parametrize("bias", [False, True])
def test_product_and_bias(rows, dtype, tolerance, bias):
    made = weights(dtype, bias)
    x = jax.random.normal(jax.random.key(1), (rows, 24), dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(made.weight[...], np.float64).T
    expected += np.arange(40) if bias else 0
    y = linear("here", made, x)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_result_in_another_type_keeps_the_accumulators_precision():
    made = weights(jnp.bfloat16, bias=False)
    x = jax.random.normal(jax.random.key(1), (1, 24), jnp.bfloat16)
    y = linear("here", made, x, out_dtype=jnp.float32)
    expected = np.asarray(x, np.float64) @ np.asarray(made.weight[...], np.float64).T
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_float32_is_not_rounded_on_the_way():
    """On a GPU the default precision would multiply in TF32."""
    jaxpr = str(jax.make_jaxpr(lambda x: linear("here", weights(jnp.float32), x))(jnp.ones((3, 24))))
    assert "HIGHEST" in jaxpr


@pytest.mark.parametrize("dtype, rows", [(jnp.bfloat16, 2), (jnp.float32, 1)])
def test_a_single_bfloat16_row_is_multiplied_as_two(dtype, rows):
    made = weights(dtype, bias=False)
    equations = jax.make_jaxpr(lambda x: linear("here", made, x))(jnp.ones((1, 24), dtype)).eqns
    [product] = [equation for equation in equations if equation.primitive.name == "dot_general"]
    assert product.invars[0].aval.shape == (rows, 24)
