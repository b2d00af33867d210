"""What several files use: the fixture model, and a runner on it that is compiled once for all of them."""

import pytest

from jaxrunner.runner import ModelRunner
from tests.jaxrunner.plans import CONFIG
from tests.models import fixtures


@pytest.fixture(scope="session")
def fixture():
    """A tiny Llama with the tokens and logits that transformers gave for it."""
    return fixtures.fixture("llama")


@pytest.fixture(scope="session")
def warm(fixture) -> ModelRunner:
    return ModelRunner(fixtures.decoder_from(fixture.config, fixture.tensors), CONFIG)


@pytest.fixture
def runner(warm: ModelRunner) -> ModelRunner:
    """The runner, with no request in it."""
    warm.reset()
    return warm
