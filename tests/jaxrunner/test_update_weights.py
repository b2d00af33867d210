"""New weights in place: the same as a new engine on them, nothing compiled, nothing stale, misfits named."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, AsyncLLM, SamplingParams
from jaxrunner.loading import LoadedModel
from models import split
from tests.jaxrunner.small_llm import OPTIONS
from tests.models import fixtures

GREEDY = SamplingParams(temperature=0, max_tokens=8, detokenize=False)


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


def go_on(llm, fixture, weights, prompts, **how):
    """Starts requests, replaces the weights when the first has three tokens, and runs all to their end.

    Returns:
        (the outputs, what each had said when the weights were replaced), by request.
    """
    params = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    last = {}
    stream = llm.stream(prompts, params)
    while len(next(stream).outputs[0].token_ids) < 3:
        pass
    said = {i: list(request.output_token_ids) for i, request in llm.engine.scheduler.requests.items()}
    llm.update_weights(weights, **how)
    for output in stream:
        last[output.request_id] = output
    order = sorted(last, key=int)
    return [last[i] for i in order], [said[i] for i in order]


@pytest.mark.parametrize("which", ["all", "the last norm"])
@pytest.mark.parametrize("reset", [True, False])
def test_between_the_steps_of_running_requests(llm, fixture, others, which, reset):
    """Computed again, a request goes on as one whose prompt has what it had said, on a new engine. The last norm is
    behind all keys and values, so for that one alone it makes no difference whether they are kept. Six prompts: four
    run, one of them in the middle of its prompt, and the others wait.
    """
    new = dict(fixture.tensors) | (others if which == "all" else {"model.norm.weight": others["model.norm.weight"]})
    ids = fixture.ids.tolist()
    prompts = [ids[:4], ids[:9], ids[1:6], ids[:40], ids[:7], ids[2:12]]
    say(llm, fixture)
    llm.reset_prefix_cache()
    compiled = set(llm.runner.executables.compiled)
    outputs, before = go_on(llm, fixture, new, prompts, **({} if reset else {"reset_running_requests": False}))
    assert set(llm.runner.executables.compiled) == compiled
    assert len(outputs) == 6 and len(before[0]) == 3 and before[-1] == []
    fresh = LLM(LoadedModel(fixtures.decoder_from(fixture.config, new)), **OPTIONS)
    told = [p + b for p, b in zip(prompts, before, strict=True)]
    params = [SamplingParams(temperature=0, max_tokens=12 - len(b), detokenize=False) for b in before]
    expected = [
        b + o.outputs[0].token_ids for b, o in zip(before, fresh.generate(told, params, use_tqdm=False), strict=True)
    ]
    got = [o.outputs[0].token_ids for o in outputs]
    assert [g[: len(b)] for g, b in zip(got, before, strict=True)] == before
    if reset or which == "the last norm":
        assert got == expected
    else:
        assert got != expected and got[4:] == expected[4:]  # those that waited are all new
    assert any(o.metrics.num_preemptions for o in outputs) == reset
    llm.engine.scheduler.manager.check_accounting()
    # And what the old weights computed is not found, nor what was computed on top of it.
    (again,) = llm.generate([ids[:40]], GREEDY, use_tqdm=False)
    (new_one,) = fresh.generate([ids[:40]], GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == new_one.outputs[0].token_ids
    assert (again.num_cached_tokens == 4) != reset  # one block, of a prompt that waited


def test_misfits_do_not_reset_what_runs(llm, fixture):
    stream = llm.stream([fixture.ids.tolist()[:5]], GREEDY)
    next(stream)
    with pytest.raises(ValueError, match="don't fit"):
        llm.update_weights({"norm.weight": jnp.zeros(3)})
    (*_, last) = stream
    assert last.metrics.num_preemptions == 0


def test_from_an_event_loop(llm, fixture, others):
    """Several tasks generate while another replaces the weights, again and again; logprobs of the prompt are all of
    one set of weights or the other."""
    fresh = LLM(LoadedModel(fixtures.decoder_from(fixture.config, others)), **OPTIONS)
    served, ids = AsyncLLM(llm), fixture.ids.tolist()
    params = SamplingParams(temperature=0, max_tokens=10, detokenize=False, prompt_logprobs=0)
    known = [
        [p[t].logprob for p, t in zip(o.prompt_logprobs[1:], ids[1:30], strict=True)]
        for engine in (llm, fresh)
        for o in engine.generate([ids[:30]], params, use_tqdm=False)
    ]

    async def say(number):
        async for output in served.generate(ids[:30], params, str(number)):
            last = output
        return last

    async def replace():
        for weights in (others, fixture.tensors) * 3:
            await served.update_weights(weights)
            await asyncio.sleep(0.01)

    async def all_at_once():
        outputs, _ = await asyncio.gather(asyncio.gather(*map(say, range(8))), replace())
        return outputs

    for output in asyncio.run(all_at_once()):
        assert len(output.outputs[0].token_ids) == 10
        found = [p[t].logprob for p, t in zip(output.prompt_logprobs[1:], ids[1:30], strict=True)]
        assert min(np.abs(np.subtract(found, values)).max() for values in known) < 1e-4
    llm.engine.scheduler.manager.check_accounting()
    assert llm.stats().num_running == 0
