"""New weights in place: the same as a new engine on them, nothing compiled, nothing stale, misfits named."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.loading import LoadedModel
from models import split
from tests.jaxrunner.small_llm import OPTIONS
from tests.models import fixtures

GREEDY = SamplingParams(temperature=0, max_tokens=8, detokenize=False)


@pytest.fixture(scope="module")
def fixture():
    return fixtures.fixture("llama")


@pytest.fixture(scope="module")
def others(fixture):
    """Other weights, by their Hugging Face names."""
    rng = np.random.default_rng(5)
    return {n: (t + rng.normal(0, 0.3, t.shape)).astype(np.float32) for n, t in fixture.tensors.items()}


@pytest.fixture
def llm(fixture):
    return LLM(LoadedModel(fixtures.decoder_from(fixture.config, fixture.tensors)), **OPTIONS)


def say(llm, fixture):
    ids = fixture.ids.tolist()
    return [o.outputs[0].token_ids for o in llm.generate([ids[:12], ids[:30]], GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("form", ["checkpoint", "decoder", "parameters"])
def test_as_a_new_engine_on_them(llm, fixture, others, form):
    """The prompts are cached under the old weights, and nothing of that is found."""
    new = fixtures.decoder_from(fixture.config, others)
    expected = say(LLM(LoadedModel(new), **OPTIONS), fixture)
    before = say(llm, fixture)
    compiled = set(llm.runner.executables.compiled)
    definition, arrays = split(new)
    forms = {"checkpoint": others, "decoder": new, "parameters": dict(zip(definition.names, arrays, strict=True))}
    llm.update_weights(forms[form])
    assert say(llm, fixture) == expected != before
    assert set(llm.runner.executables.compiled) == compiled


def test_some_parameters_and_back(llm, fixture):
    before, name = say(llm, fixture), "norm.weight"
    place = llm.runner.functions.graphdef.names.index(name)
    old = np.array(llm.runner.params[place])
    mine = np.random.default_rng(0).normal(0, 1, old.shape).astype(np.float32)
    llm.update_weights({name: mine})
    changed = say(llm, fixture)
    mine[:] = np.nan  # copied: the caller's array is the caller's
    assert changed != before and say(llm, fixture) == changed
    llm.update_weights({name: old})
    assert say(llm, fixture) == before


def test_misfits_are_named_and_change_nothing(llm, fixture, others):
    before = say(llm, fixture)
    for weights, message in [
        ({"norm.weight": jnp.zeros(3)}, r"norm.weight is \[3\], expected \[40\]"),
        ({"norm.weight": jnp.zeros(40, jnp.bfloat16)}, "norm.weight is bfloat16, expected float32"),
        ({"norm.weight": jnp.zeros(40), "frob": jnp.zeros(1)}, "frob is no parameter of it"),
        ({"model.frob.weight": np.zeros(1)}, "don't fit the model: .*frob"),
        ({n: t for n, t in others.items() if n != "model.norm.weight"}, "don't fit the model: .*model.norm.weight"),
        (fixtures.decoder_from(fixtures.fixture("qwen3").config, fixtures.fixture("qwen3").tensors), "is no parameter"),
        ({}, "must be a Decoder or a mapping"),
    ]:
        with pytest.raises(ValueError, match=message):
            llm.update_weights(weights)
    assert say(llm, fixture) == before


def test_not_while_requests_run(llm, fixture, others):
    stream = llm.stream([fixture.ids.tolist()[:5]], GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="unfinished requests"):
        llm.update_weights(others)
    stream.close()
    llm.update_weights(others)
