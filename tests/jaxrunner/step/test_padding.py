"""Padding, proven: at every bucket of a ladder nothing that isn't the step's own reaches a real output.

Poisoned with NaN: blocks that no request owns, the null block, the tails of owned blocks behind the sequence, and the
embedding that padding tokens have. With sentinels: every field of padding rows that their empty interval doesn't need,
padding logits indices, block-table columns past a sequence, and the last samples of everyone else. Outputs must equal
those of zero padding bit for bit, and those of a step without any padding within the dtype's tolerance.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrunner.shapes import StepShapes
from jaxrunner.step import CacheGroup, StepArrays, StepFunctions, init_state, unpack
from models import Decoder, ModelConfig, split
from pallas_kernels import GroupSpec, KVCache
from tests.pallas_kernels import implementations

V, REQS, BLOCK, WIDTH = 64, 4, 4, 6
POISON_TOKEN = V - 1
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
# Per bucket: (scheduled, computed) of each row. Never full in tokens, but for the bucket of one, nor in rows.
LADDER = {1: [(1, 6)], 5: [(1, 7), (3, 0)], 16: [(1, 11), (9, 4), (5, 0)]}
SHAPES = StepShapes(16, REQS, min_block_size=BLOCK, token_buckets=tuple(LADDER))
INDICES, BLOCKS = [2, 0, 3], 1 + REQS * WIDTH + 2


class Lab:
    """A model of one layer on one implementation, and a batch per bucket in clean and in poisoned surroundings."""

    def __init__(self, tested: implementations.Tested) -> None:
        self.dtype = dtype_of(tested)
        decoder = Decoder(ModelConfig.from_hf(CONFIG), dtype=self.dtype, rngs=nnx.Rngs(0))
        layers = decoder.config.attention_layers()
        definition, self.params = split(decoder)
        place = definition.names.index("embed_tokens.weight")
        embedding = self.params[place].at[POISON_TOKEN].set(jnp.nan)
        self.poisoned_params = (*self.params[:place], embedding, *self.params[place + 1 :])
        group = CacheGroup(GroupSpec(BLOCK, layers), tested.implementation)
        self.functions = StepFunctions(definition, (group,), REQS, REQS)
        rng = np.random.default_rng(1)
        self.blocks = rng.permutation(np.arange(1, 1 + REQS * WIDTH)).reshape(REQS, WIDTH)  # the last two are nobody's
        shape = (BLOCKS, BLOCK, 2, 16)
        self.values = [rng.normal(size=(2, *shape)).astype(np.float32) for _ in layers]
        self.token_ids = rng.integers(1, V - 1, 16)

    def caches(self, batch: list[tuple[int, int]], elsewhere: float) -> tuple[KVCache, ...]:
        """Keys and values of computed positions; ``elsewhere`` everywhere else."""
        known = self.written(batch, 0)
        return tuple(
            KVCache(*(jnp.asarray(np.where(known[..., None, None], kv, elsewhere), self.dtype) for kv in values))
            for values in self.values
        )

    def written(self, batch: list[tuple[int, int]], scheduled: int) -> np.ndarray:
        """bool [N, B]: slots of computed positions; with ``scheduled`` = 1 also those that the step writes."""
        found = np.zeros((BLOCKS, BLOCK), bool)
        for index, (count, computed) in zip(INDICES, batch, strict=False):
            for position in range(computed + count * scheduled):
                found[self.blocks[index, position // BLOCK], position % BLOCK] = True
        return found

    def state(self, batch: list[tuple[int, int]], poisoned: bool):
        table = np.full((REQS + 1, WIDTH), BLOCKS - 1 if poisoned else 0, np.int32)
        last = np.full(REQS + 1, POISON_TOKEN if poisoned else 0, np.int32)
        for index, (count, computed) in zip(INDICES, batch, strict=False):
            used = -(-(count + computed) // BLOCK)
            table[index, :used] = self.blocks[index, :used]
            last[index] = 7  # the device's own sample, which row 0 asks for
        return replace(init_state(REQS, [WIDTH]), block_tables=(jnp.asarray(table),), last_sampled=jnp.asarray(last))

    def arrays(self, batch: list[tuple[int, int]], tokens: int, rows: int, poisoned: bool) -> StepArrays:
        layout = SHAPES._layout(tokens, rows)
        buffer = np.zeros(layout.size, np.int32)
        field = {name: buffer[at : at + length] for name, (at, length) in layout.fields.items()}
        n, counts = len(batch), [count for count, _ in batch]
        total = sum(counts)
        field["update_cell"][:] = np.iinfo(np.int32).max
        field["idx_mapping"][:] = REQS
        if poisoned:
            for name in ("num_computed", "num_known", "num_prompt", "num_draft"):
                field[name][:] = 1000 + len(name)
            field["use_device"][:] = 1
            field["idx_mapping"][n:] = 1  # somebody else's index
            field["logits_indices"][:] = tokens - 1
            field["token_ids"][:] = POISON_TOKEN
            field["update_value"][:] = BLOCKS - 1
        field["num_reqs"][0], field["num_tokens"][0], field["num_logits"][0] = n, total, n
        field["query_start_loc"][1:] = np.cumsum(counts + [0] * (rows - n))
        field["idx_mapping"][:n] = INDICES[:n]
        field["num_computed"][:n] = [computed for _, computed in batch]
        field["num_known"][:n] = field["num_prompt"][:n] = [sum(each) for each in batch]
        field["num_draft"][:n] = 0
        field["use_device"][:n] = [1] + [0] * (n - 1)
        field["logits_indices"][:n] = np.cumsum(counts) - 1
        field["token_ids"][:total] = self.token_ids[:total]
        return unpack(jnp.asarray(buffer), layout)


def dtype_of(tested: implementations.Tested) -> jnp.dtype:
    return jnp.dtype(jnp.float32 if tested.platform == "cpu" else jnp.bfloat16)


def takes_the_model(tested: implementations.Tested) -> bool:
    layer = ModelConfig.from_hf(CONFIG).attention_layers()[0]
    return tested.implementation.refuses(layer, BLOCK, dtype_of(tested), tested.platform) is None


def test_the_reference_and_a_kernel_are_under_test() -> None:
    names = {tested.name for tested in implementations.TESTED if takes_the_model(tested)}
    assert "reference" in names and len(names) > 1


@pytest.fixture(scope="module", params=filter(takes_the_model, implementations.TESTED), ids=lambda tested: tested.name)
def lab(request: pytest.FixtureRequest) -> Lab:
    return Lab(request.param)


@pytest.mark.parametrize("bucket", LADDER)
def test_poison_reaches_nothing(lab: Lab, bucket: int) -> None:
    batch = LADDER[bucket]
    n, total = len(batch), sum(count for count, _ in batch)

    def run(params, caches, state, inputs):
        return lab.functions.step(params, caches, state, inputs, return_logits=True)

    step = jax.jit(run, compiler_options=implementations.QUICK)

    def outputs(tokens: int, rows: int, poisoned: bool):
        params = lab.poisoned_params if poisoned else lab.params
        caches = lab.caches(batch, np.nan if poisoned else 0.0)
        inputs = lab.arrays(batch, tokens, rows, poisoned)
        sampled, caches, state, logits = step(params, caches, lab.state(batch, poisoned), inputs)[:4]
        kept = [np.asarray(kv, np.float32) for cache in caches for kv in cache]
        return np.asarray(sampled[:n]), np.asarray(logits[:n]), kept, np.asarray(state.last_sampled)[INDICES[:n]]

    rows = SHAPES.rows(bucket)
    clean, poisoned = outputs(bucket, rows, False), outputs(bucket, rows, True)
    own = lab.written(batch, 1)
    assert np.isfinite(clean[1]).all() and (clean[0] >= 0).all()
    for kept, expected in zip(poisoned[2], clean[2], strict=True):
        np.testing.assert_array_equal(kept[own], expected[own])  # what the step wrote, and what was there before
        assert np.isnan(kept[~own]).all()  # padding wrote nothing, anywhere
        assert (expected[~own] == 0).all()
    for got, expected in zip((poisoned[0], poisoned[1], poisoned[3]), (clean[0], clean[1], clean[3]), strict=True):
        np.testing.assert_array_equal(got, expected)

    true = outputs(total, n, False)
    tolerance = 1e-5 if lab.dtype == jnp.float32 else 0.03
    np.testing.assert_allclose(clean[1], true[1], rtol=tolerance, atol=tolerance)
    for kept, expected in zip(clean[2], true[2], strict=True):
        np.testing.assert_allclose(kept[own], expected[own], rtol=tolerance, atol=tolerance)
