"""An argument that fits no executable is refused, and the message names the leaf and what differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrunner.exact_call import ArgumentMismatch, abstract, differences, exact

A = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3, jnp.int32)}
EXPECTED = (jax.tree.map(abstract, A), jax.ShapeDtypeStruct((), jnp.float32))


@pytest.fixture(scope="module")
def call():
    def function(params, x):
        return params["w"] + params["b"] + x

    return exact("add[2]", jax.jit(function).lower(*EXPECTED).compile(), ("params", "x"), EXPECTED)


def test_what_fits_runs(call) -> None:
    np.testing.assert_array_equal(call(A, np.float32(2)), np.full((2, 3), 2, np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((A | {"w": jnp.zeros((2, 4))}, 0.0), r"params\['w'\]: shape \(2, 4\), expected \(2, 3\)"),
        ((A | {"b": jnp.zeros(3)}, 0.0), r"params\['b'\]: dtype float32, expected int32"),
        ((A, jnp.zeros(1)), r"x: shape \(1,\), expected \(\)"),
        ((A | {"b": None}, 0.0), r"params\['b'\]: missing \(structure\)"),
        ((A | {"c": 0}, 0.0), r"params\['c'\]: not expected \(structure\)"),
        ((A, (0.0,)), r"x: missing \(structure\)"),
        ((A,), r"takes 2 arguments \(params, x\), got 1"),
    ],
)
def test_what_does_not_fit_is_named(call, arguments: tuple, message: str) -> None:
    with pytest.raises(ArgumentMismatch, match=r"^add\[2\] was compiled for other arguments, and does not"):
        call(*arguments)
    with pytest.raises(ArgumentMismatch, match=message):
        call(*arguments)


def test_weak_types_and_shardings_are_told_apart() -> None:
    device = jax.devices()[0]
    want = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=SingleDeviceSharding(device))
    weak = jax.lax.full((2,), 1.0)
    assert weak.weak_type
    assert differences(("x",), (want,), (weak,)) == ["x: weak type True, expected False"]
    assert differences(("x",), (want,), (jnp.zeros(2),)) == []
    assert differences(("x",), (want,), (np.zeros(2, np.float32),)) == []

    class Elsewhere:
        """A sharding that no single device can show here."""

        def is_equivalent_to(self, other: object, ndim: int) -> bool:
            return False

    mesh = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data"))
    other = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=mesh)
    line = differences(("x",), (other,), (jax.device_put(jnp.zeros(2), mesh),))
    assert line == []
    real = jnp.zeros(2).sharding
    assert real.is_equivalent_to(mesh, 1)  # one device: equivalent, and so no difference
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(real), "is_equivalent_to", Elsewhere.is_equivalent_to)
        (line_,) = differences(("x",), (other,), (jnp.zeros(2),))
    assert line_.startswith("x: sharding ") and "expected NamedSharding" in line_


def test_an_error_that_no_argument_explains_stays_what_it_is() -> None:
    def fails(x: object) -> None:
        raise ValueError("out of luck")

    with pytest.raises(ValueError, match="^out of luck$"):
        exact("f", fails, ("x",), (jax.ShapeDtypeStruct((), jnp.float32),))(np.float32(1))
