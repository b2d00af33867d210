"""Scripts of one's own over the pure step: what they print, and the loop compiled for a GPU: it copies no cache."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.own_step import own_inputs, own_step
from models import merge
from scripts import own_gradient
from scripts import own_step as script
from tests.jaxrunner.chain import successor_logits, word_tokenizer, write_chain
from tests.models import fixtures

V = 32


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> str:
    """Greedy decoding counts up: after w5 comes w6."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = word_tokenizer(["<unk>", *(f"w{i}" for i in range(1, V))])
    return str(write_chain(folder, successor_logits(V, {}), tokenizer))


@pytest.fixture(scope="module")
def decoder():
    fixture = fixtures.fixture("llama")
    return fixtures.decoder_from(fixture.config, fixture.tensors)


def test_the_loop_decodes_every_prompt(chain, capsys) -> None:
    script.main(["--model", chain, "--prompt", "w3", "w9 w10", "w20 w1", "--new-tokens", "4"])
    assert capsys.readouterr().out.splitlines() == ["w3w4w5w6w7", "w9 w10w11w12w13w14", "w20 w1w2w3w4w5"]
    assert len(Path(script.__file__).read_text().splitlines()) < 60


def test_the_loop_equals_steps_from_the_host(decoder) -> None:
    """On a model whose tokens depend on all before them, with the padding's ids at the other end of the vocabulary."""
    prompts, lengths = [5, 9, 11, 2, 7, 3], jnp.array([4, 2], jnp.int32)
    step, params, caches, state = own_step(decoder, 2, 10, block_size=4)
    padded = jnp.array(prompts + [255] * 2, jnp.int32)
    got, _, _ = jax.jit(partial(script.generate, step, new_tokens=4))(params, caches, state, padded, lengths)

    @jax.jit
    def whole(history, lengths):  # everything anew, without a cache that knows something
        hidden = step.forward(params, caches, state, own_inputs(history, lengths, jnp.zeros(2, jnp.int32)))[0]
        return merge(step.graphdef, params).compute_logits(hidden)

    rows = [prompts[:4], prompts[4:]]
    for column in range(4):
        history = jnp.array(sum(rows, []) + [0] * (14 - sum(map(len, rows))), jnp.int32)
        tokens = np.asarray(whole(history, jnp.array(list(map(len, rows)), jnp.int32))).argmax(-1)
        assert got[:, column].tolist() == tokens.tolist()
        rows = [row + [int(token)] for row, token in zip(rows, tokens, strict=True)]


def test_the_gradient_against_a_finite_difference(decoder) -> None:
    step, params, caches, state = own_step(decoder, 1, 8, block_size=4, attention="reference")
    prompt, rest = jnp.array([5, 9, 11], jnp.int32), jnp.array([3, 8], jnp.int32)

    @jax.jit
    def value_and_slopes(params):
        return jax.value_and_grad(lambda p: own_gradient.log_probability(step, p, caches, state, prompt, rest))(params)

    value, slopes = value_and_slopes(params)
    rng = np.random.default_rng(0)
    direction = tuple(jnp.asarray(rng.normal(size=p.shape), jnp.float32) * 1e-3 for p in params)
    along = sum(float(jnp.vdot(g, d)) for g, d in zip(slopes, direction, strict=True))
    there, back = (
        float(value_and_slopes(tuple(p + s * d for p, d in zip(params, direction, strict=True)))[0])
        for s in (0.5, -0.5)
    )
    assert along == pytest.approx(there - back, rel=2e-2) and float(value) < 0


def test_the_gradients_command(chain, capsys) -> None:
    own_gradient.main(["--model", chain, "--prompt", "w3", "--continuation", " w4", "--top", "2"])
    shown = capsys.readouterr().out
    assert "0.0000" in shown and shown.count("weight") == 2  # the chain is sure of w4


def test_compiled_for_an_h200_the_loop_copies_no_cache(gpu_compiler, tmp_path) -> None:
    """Prefill and scan as one program: the caches go through the loop's carry in place."""
    out = tmp_path / "out.json"
    environment = gpu_compiler.environment(tmp_path)
    command = [sys.executable, __file__, str(out), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(out.read_text())
    assert figures == {"attention": "triton", "copies": [], "aliased": 4, "caches": 4}


def compile_loop(out: Path, dumps: Path) -> None:
    from models import Decoder, ModelConfig
    from pallas_kernels.gpus import GPUS
    from scripts.gpu.compile import aliased_arguments, compile_program, copies_of
    from scripts.gpu.published import PUBLISHED
    from scripts.gpu.step_programs import with_layers

    config = with_layers(ModelConfig.from_hf(PUBLISHED["tiny"]), 2)
    step, *arrays = own_step(Decoder(config, dtype="bfloat16"), 4, 64, platform="gpu")
    arguments = (*arrays, jnp.zeros(32, jnp.int32), jnp.ones(4, jnp.int32))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    loop = partial(script.generate, step, new_tokens=8)
    program = compile_program(loop, abstract, (1, 2), GPUS["h200"], dumps)
    params, caches = abstract[:2]
    first, count = len(params), len(jax.tree.leaves(caches))
    copies = [
        copy for shape in {leaf.shape for leaf in jax.tree.leaves(caches)} for copy in copies_of(program.hlo, shape)
    ]
    aliased = aliased_arguments(program.hlo) & set(range(first, first + count))
    name = step.groups[0].implementation.name
    out.write_text(json.dumps({"attention": name, "copies": copies, "aliased": len(aliased), "caches": count}))


if __name__ == "__main__":
    compile_loop(Path(sys.argv[1]), Path(sys.argv[2]))
