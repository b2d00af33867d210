"""Padding, proven: in every mode, at every bucket of a ladder nothing that isn't the step's own reaches a real output.

Poisoned with NaN: blocks that no request owns, the null block, the tails of owned blocks behind the sequence, and the
embedding that padding tokens have. With sentinels: every field of padding rows that their empty interval doesn't need,
padding logits indices, block-table columns past a sequence, and the last samples of everyone else. Outputs must equal
those of zero padding bit for bit, and those of a step without any padding within the dtype's tolerance. Mode NONE has
no padding: what is poisoned there is all that surrounds the step, and its clean outputs are what the others' must be.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrunner.piecewise import PiecewiseForwards
from jaxrunner.shapes import ExecutionMode, Policy, StepShape, StepShapes
from jaxrunner.step import CacheGroup, StepFunctions, init_state, unpack
from models import Decoder, ModelConfig, split
from pallas_kernels import GroupSpec, KVCache
from tests.pallas_kernels import implementations

V, REQS, WIDTH = 64, 4, 6
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
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
# Per bucket: (scheduled, computed) of each row. Never full in tokens, but for the bucket of one, nor in rows.
LADDER = {1: [(1, 6)], 5: [(1, 7), (3, 0)], 16: [(1, 11), (9, 4), (5, 0)]}
INDICES, BLOCKS = [2, 0, 3], 1 + REQS * WIDTH + 2
# Block sizes, and what is larger then than in CONFIG: the first that an implementation takes is the one tested.
MODELS: dict[int, dict[str, int]] = {4: {}, 16: {"head_dim": 64}}


class Lab:
    """A model on one implementation, and a batch per bucket in clean and in poisoned surroundings."""

    def __init__(self, tested: implementations.Tested) -> None:
        self.dtype, self.block = dtype_of(tested), block_size(tested)
        # What lies between two layers is the same for all; interpreters are slow.
        config = ModelConfig.from_hf(model_config(self.block, 2 if tested.platform == "cpu" else 1))
        decoder = Decoder(config, dtype=self.dtype, rngs=nnx.Rngs(0))
        layers = config.attention_layers()
        definition, self.params = split(decoder)
        place = definition.names.index("embed_tokens.weight")
        embedding = self.params[place].at[POISON_TOKEN].set(jnp.nan)
        self.poisoned_params = (*self.params[:place], embedding, *self.params[place + 1 :])
        group = CacheGroup(GroupSpec(self.block, layers), tested.implementation)
        self.functions = StepFunctions(definition, (group,), REQS, REQS)
        # Attention's own rows: 1 at one token, 3 beside 4 in the layout at more.
        self.shapes = StepShapes(
            16,
            REQS,
            min_block_size=self.block,
            token_buckets=tuple(LADDER),
            request_buckets=(3,),
            policy=Policy.PIECEWISE,
        )
        rng = np.random.default_rng(1)
        self.blocks = rng.permutation(np.arange(1, 1 + REQS * WIDTH)).reshape(REQS, WIDTH)  # the last two are nobody's
        shape = (BLOCKS, self.block, layers[0].num_kv_heads, layers[0].head_dim)
        self.values = [rng.normal(size=(2, *shape)).astype(np.float32) for _ in layers]
        self.token_ids = rng.integers(1, V - 1, 16)
        self.outputs = cache(self._outputs)
        self.head = _jit(lambda *arguments: self.functions.head_and_sample(*arguments, return_logits=True))

    def batch(self, bucket: int) -> list[tuple[int, int]]:
        """(scheduled, computed) of each row: as many blocks of them at every block size."""
        return [(count, computed * self.block // 4) for count, computed in LADDER[bucket]]

    def caches(self, batch: list[tuple[int, int]], elsewhere: float) -> tuple[KVCache, ...]:
        """Keys and values of computed positions; ``elsewhere`` everywhere else."""
        known = self.written(batch, 0)
        return tuple(
            KVCache(*(jnp.asarray(np.where(known[..., None, None], kv, elsewhere), self.dtype) for kv in values))
            for values in self.values
        )

    def written(self, batch: list[tuple[int, int]], scheduled: int) -> np.ndarray:
        """bool [N, B]: slots of computed positions; with ``scheduled`` = 1 also those that the step writes."""
        found = np.zeros((BLOCKS, self.block), bool)
        for index, (count, computed) in zip(INDICES, batch, strict=False):
            for position in range(computed + count * scheduled):
                found[self.blocks[index, position // self.block], position % self.block] = True
        return found

    def state(self, batch: list[tuple[int, int]], poisoned: bool):
        table = np.full((REQS + 1, WIDTH), BLOCKS - 1 if poisoned else 0, np.int32)
        last = np.full(REQS + 1, POISON_TOKEN if poisoned else 0, np.int32)
        for index, (count, computed) in zip(INDICES, batch, strict=False):
            used = -(-(count + computed) // self.block)
            table[index, :used] = self.blocks[index, :used]
            last[index] = 7  # the device's own sample, which row 0 asks for
        return replace(init_state(REQS, [WIDTH]), block_tables=(jnp.asarray(table),), last_sampled=jnp.asarray(last))

    def shape(self, bucket: int, mode: ExecutionMode) -> StepShape:
        batch = LADDER[bucket]
        n, total = len(batch), sum(count for count, _ in batch)
        if mode is ExecutionMode.NONE:
            return StepShape(total, n, n, mode)
        return self.shapes.full(bucket) if mode is ExecutionMode.FULL else self.shapes.dispatch(total, n, n)

    def buffer(self, bucket: int, shape: StepShape, poisoned: bool) -> np.ndarray:
        layout, batch = self.shapes.layout(shape), self.batch(bucket)
        buffer = np.zeros(layout.size, np.int32)
        field = {name: buffer[at : at + length] for name, (at, length) in layout.fields.items()}
        n, counts = len(batch), [count for count, _ in batch]
        total = sum(counts)
        field["update_cell"][:] = np.iinfo(np.int32).max
        field["idx_mapping"][:] = REQS
        if poisoned:
            for name in ("num_computed", "num_prompt", "num_draft"):
                field[name][:] = 1000 + len(name)
            field["use_device"][:] = 1  # and num_known 0: as if the sample counted
            field["idx_mapping"][n:] = 1  # somebody else's index
            field["logits_indices"][:] = layout.num_tokens - 1
            field["token_ids"][:] = POISON_TOKEN
            field["update_value"][:] = BLOCKS - 1
        field["num_reqs"][0], field["num_tokens"][0], field["num_logits"][0] = n, total, n
        field["query_start_loc"][1:] = np.cumsum(counts + [0] * (layout.num_reqs - n))
        field["idx_mapping"][:n] = INDICES[:n]
        field["num_computed"][:n] = [computed for _, computed in batch]
        field["num_known"][:n] = field["num_prompt"][:n] = [sum(each) for each in batch]
        field["num_draft"][:n] = 0
        field["use_device"][:n] = [1] + [0] * (n - 1)
        field["logits_indices"][:n] = np.cumsum(counts) - 1
        field["token_ids"][:total] = self.token_ids[:total]
        return buffer

    def forward(self, shape: StepShape) -> Callable[..., Any]:
        """(params, kv_caches, state, buffer) -> (hidden, head_inputs, kv_caches, state, ...), compiled."""
        layout = self.shapes.layout(shape)
        if shape.mode is ExecutionMode.PIECEWISE:
            example = LADDER[min(LADDER)]
            arguments = (self.params, self.caches(example, 0.0), self.state(example, False))
            return PiecewiseForwards(self.functions, self.shapes, *arguments, get=self._piece).forward(shape)
        return _jit(lambda p, c, s, buffer: self.functions.forward(p, c, s, unpack(buffer, layout)))

    @staticmethod
    def _piece(name: str, function: Callable[..., Any], arguments: Any, donate: tuple[int, ...]) -> Callable[..., Any]:
        return _jit(function)

    def _outputs(self, bucket: int, mode: ExecutionMode) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the step gives and leaves behind, in clean and in poisoned surroundings."""
        shape, batch = self.shape(bucket, mode), self.batch(bucket)
        n, forward = len(batch), self.forward(shape)

        def run(poisoned: bool) -> dict[str, Any]:
            params = self.poisoned_params if poisoned else self.params
            caches, state = self.caches(batch, np.nan if poisoned else 0.0), self.state(batch, poisoned)
            buffer = jnp.asarray(self.buffer(bucket, shape, poisoned))
            hidden, head_inputs, caches, state, *_ = forward(params, caches, state, buffer)
            sampled, state, logits = self.head(params, state, hidden, head_inputs)
            return {
                "sampled": np.asarray(sampled[:n]),
                "logits": np.asarray(logits[:n]),
                "last sampled": np.asarray(state.last_sampled)[INDICES[:n]],
                "last sampled of others": np.delete(np.asarray(state.last_sampled), INDICES[:n]),
                "caches": [np.asarray(kv, np.float32) for cache in caches for kv in cache],
            }

        return run(False), run(True)


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, compiler_options=implementations.QUICK)


def model_config(block: int, num_layers: int = 1) -> dict[str, Any]:
    return CONFIG | {"num_hidden_layers": num_layers} | MODELS[block]


def dtype_of(tested: implementations.Tested) -> jnp.dtype:
    return jnp.dtype(jnp.float32 if tested.platform == "cpu" else jnp.bfloat16)


def block_size(tested: implementations.Tested) -> int:
    """The first block size at which an implementation takes the model of that size."""
    for block in MODELS:
        layer = ModelConfig.from_hf(model_config(block)).attention_layers()[0]
        if tested.implementation.refuses(layer, block, dtype_of(tested), tested.platform) is None:
            return block
    raise ValueError(f"{tested.name} takes no model of MODELS: add one that it takes")


@cache
def lab_of(tested: implementations.Tested) -> Lab:
    return Lab(tested)


def steps(*modes: ExecutionMode) -> list[Any]:
    """(tested, mode, bucket) as pytest parameters. The slowest interpreter takes the bucket in the middle alone."""
    return [
        pytest.param(tested, mode, bucket, id=f"{tested.name}-{mode.name}-{bucket}")
        for tested in implementations.TESTED
        for mode in modes
        for bucket in (LADDER if tested.seconds is None else [5])
    ]


@pytest.mark.parametrize(("tested", "mode", "bucket"), steps(*ExecutionMode))
def test_poison_reaches_nothing(tested: implementations.Tested, mode: ExecutionMode, bucket: int) -> None:
    lab = lab_of(tested)
    with implementations.time_limit(tested.seconds):
        clean, poisoned = lab.outputs(bucket, mode)
    own = lab.written(lab.batch(bucket), 1)
    assert np.isfinite(clean["logits"]).all() and (clean["sampled"] >= 0).all()
    for kept, expected in zip(poisoned["caches"], clean["caches"], strict=True):
        np.testing.assert_array_equal(kept[own], expected[own])  # what the step wrote, and what was there before
        assert np.isnan(kept[~own]).all()  # padding wrote nothing, anywhere
        assert (expected[~own] == 0).all()
    for name in ("sampled", "logits", "last sampled"):
        np.testing.assert_array_equal(poisoned[name], clean[name])
    assert (clean["last sampled of others"] == 0).all() and (poisoned["last sampled of others"] == POISON_TOKEN).all()


@pytest.mark.parametrize(("tested", "mode", "bucket"), steps(ExecutionMode.FULL, ExecutionMode.PIECEWISE))
def test_padding_changes_no_more_than_rounding_does(
    tested: implementations.Tested, mode: ExecutionMode, bucket: int
) -> None:
    lab = lab_of(tested)
    with implementations.time_limit(tested.seconds):
        padded, true = lab.outputs(bucket, mode)[0], lab.outputs(bucket, ExecutionMode.NONE)[0]
    own = lab.written(lab.batch(bucket), 1)
    tolerance = 1e-5 if lab.dtype == jnp.float32 else 0.03
    np.testing.assert_allclose(padded["logits"], true["logits"], rtol=tolerance, atol=tolerance)
    for kept, expected in zip(padded["caches"], true["caches"], strict=True):
        np.testing.assert_allclose(kept[own], expected[own], rtol=tolerance, atol=tolerance)
