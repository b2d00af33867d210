"""Which device a program is for: the one in context, by its name, else the default one."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.gpus import GPUS, Device, capability_of, current_device


@pytest.mark.parametrize(
    "kind, capability",
    [
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA H100 PCIe", (9, 0)),
        ("NVIDIA A100-SXM4-40GB", (8, 0)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9)),
        ("NVIDIA A10G", (8, 6)),
        ("NVIDIA RTX A6000", (8, 6)),
        ("NVIDIA GB200", (10, 0)),
        ("Tesla V100-SXM2-16GB", None),
        ("cpu", None),
    ],
)
def test_capability_by_name(kind, capability):
    assert capability_of(kind) == capability


def test_the_device_in_context_is_asked_before_the_machines_own():
    assert current_device() == Device("cpu", jax.devices()[0].device_kind)
    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=h200)
    inside = []

    @jax.jit
    def program(x):
        inside.append(current_device())
        return x

    with jax.sharding.use_abstract_mesh(mesh):
        assert current_device() == Device("gpu", "NVIDIA H200", (9, 0))
        program.trace(1.0)
    assert inside == [Device("gpu", "NVIDIA H200", (9, 0))]
    assert inside[0].gpu is GPUS["h200"] and current_device().gpu is None


def test_architecture_names():
    assert {name: gpu.arch for name, gpu in GPUS.items()} == {
        "h200": "sm_90a",
        "h100": "sm_90a",
        "a100": "sm_80",
        "l4": "sm_89",
        "b200": "sm_100a",
    }
