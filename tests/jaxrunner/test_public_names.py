"""The package's public names: all there, and the host half without JAX."""

import subprocess
import sys

import pytest

import jaxrunner


def test_names_and_their_homes_agree():
    assert sorted(jaxrunner.__all__) == sorted(jaxrunner._HOME)
    assert set(jaxrunner.__all__) <= set(dir(jaxrunner))
    for name in jaxrunner.__all__:
        assert getattr(jaxrunner, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        jaxrunner.LMM  # noqa: B018
    with pytest.raises(ImportError):
        from jaxrunner import LMM  # noqa: F401


def test_the_host_half_imports_without_jax():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from jaxrunner import InputBatch, update_states, prepare_inputs, record_sampled, SchedulerOutput,"
        " SamplingParams, RunnerConfig, RequestOutput\n"
        "import jaxrunner.batch"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
