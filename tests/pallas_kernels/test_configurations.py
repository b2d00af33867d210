"""The list of GPU kernels to compile is collected from what can be chosen, and holds nothing twice."""

import sys

import pytest

from pallas_kernels.configurations import KernelConfiguration, configurations
from pallas_kernels.implementation import Kernel

HOME = "pallas_kernels.slot_mapping"  # by name: the package has a function that is called the same


def test_what_can_be_chosen_is_listed(monkeypatch):
    known = [c.name for c in configurations()]
    mine = KernelConfiguration("slot_mapping", "mine", "small", lambda x: x, ())
    table = (Kernel("mine", lambda: None, configurations=lambda: [mine]),)
    monkeypatch.setattr(sys.modules[HOME], "IMPLEMENTATIONS", table)
    assert "slot_mapping/mine/small" in {c.name for c in configurations()} - set(known)


def test_a_name_stands_for_one_configuration(monkeypatch):
    mine = KernelConfiguration("slot_mapping", "mine", "small", lambda x: x, ())
    table = (Kernel("mine", lambda: None, configurations=lambda: [mine, mine]),)
    monkeypatch.setattr(sys.modules[HOME], "IMPLEMENTATIONS", table)
    with pytest.raises(ValueError, match="two kernel configurations are called 'slot_mapping/mine/small'"):
        list(configurations())
