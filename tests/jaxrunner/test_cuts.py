"""However the work is cut, the greedy tokens are a dense forward's: blocks, budgets, room, with and without a window.

On the fixtures' tiny weights. One runner a block size and budget, of one padded shape; whether blocks are short is the
scheduler's affair alone, so one runner serves both.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.config import RunnerConfig
from jaxrunner.engine import Engine
from jaxrunner.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from jaxrunner.outputs import Prompt
from jaxrunner.runner import ModelRunner
from jaxrunner.sampling_params import SamplingParams
from models import Decoder, merge, split
from tests.models import fixtures
from tests.models.dense_attention import dense_attention, no_caches

OUTPUT, LONGEST = 24, 64
LENGTHS = (30, 25, 28, 36)
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
MODELS = ("llama", "gemma3")  # gemma3's window is 8 tokens, in five of its six layers
CLEAR = 1e-4  # a choice by less could go either way in float32


@cache
def decoder(name: str) -> Decoder:
    fixture = fixtures.fixture(name)
    return fixtures.decoder_from(fixture.config, fixture.tensors)


@cache
def prompts(name: str) -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(3, decoder(name).config.vocab_size, length).tolist() for length in LENGTHS]


@cache
def dense_tokens(name: str) -> list[list[int]]:
    """Every token from a whole forward over all before it, without cache, blocks or chunks."""
    definition, params = split(decoder(name))

    @jax.jit
    def logits(params, tokens, at):
        model = merge(definition, params)
        hidden, _ = model(tokens, jnp.arange(LONGEST), no_caches(decoder(name)), [dense_attention])
        return model.compute_logits(hidden[at][None])[0]

    outputs = []
    for prompt in prompts(name):
        tokens = list(prompt)
        for _ in range(OUTPUT):
            padded = np.array(tokens + [0] * (LONGEST - len(tokens)), np.int32)  # causal: what comes after is not seen
            second, best = np.sort(row := np.asarray(logits(params, padded, len(tokens) - 1)))[-2:]
            assert best - second > CLEAR
            tokens.append(int(row.argmax()))
        outputs.append(tokens[len(prompt) :])
    return outputs


@pytest.fixture(scope="module", params=[1, 4, 16, 32], ids=lambda size: f"blocks of {size}")
def block_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module", params=[8, 64], ids=lambda budget: f"budget {budget}")
def budget(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def runner(model: str, block_size: int, budget: int) -> ModelRunner:
    config = RunnerConfig(
        max_model_len=LONGEST,
        max_num_reqs=4,
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks=1 + 4 * LONGEST // block_size,
        token_buckets=(budget,),
        logits_buckets=(4,),
        check_invariants=True,
        compilation_cache=False,
    )
    return ModelRunner(decoder(model), config)


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_tokens_are_a_dense_forwards(runner: ModelRunner, model: str, tight: bool) -> None:
    runner.reset()
    size = runner.config.block_size
    longest = -(-(max(LENGTHS) + OUTPUT - 1) // size)  # blocks; the last token is never fed in
    layer = runner.model_config.attention_layers()[0]
    spec = FullAttentionSpec(size, layer.num_kv_heads, layer.head_dim)
    groups = [KVCacheGroup(range(runner.model_config.num_layers), spec)]
    # Tight: room for the longest alone and one block, so that the others come and go.
    blocks = KVCacheConfig(1 + longest + 1 if tight else runner.num_blocks, groups)
    engine = Engine(runner, blocks, enable_prefix_caching=not tight)
    for i, prompt in enumerate(prompts(model)):
        engine.add_request(str(i), Prompt(None, prompt, GREEDY))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {done.request_id: done.outputs[0].token_ids for done in engine.step().finished}
    assert [outputs[str(i)] for i in range(len(LENGTHS))] == dense_tokens(model)
    assert (engine.scheduler.num_preemptions > 0) == tight
    assert len(runner.executables.compiled) <= 4  # forward, head, and what goes ahead of a step
