"""The step as a pure function in a user's hands: jitted, scanned, differentiated; and what the device alone knows."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kv_cache.allocate import allocate_caches
from jaxrunner.sampling_columns import RECORD_WORDS, SAMPLING_COLUMNS
from jaxrunner.shapes import StepLayout
from jaxrunner.step import (
    CacheGroup,
    StepArrays,
    StepFunctions,
    enter_requests,
    init_state,
    unpack,
    update_block_table,
)
from models import split
from pallas_kernels import GroupSpec, choose_attention
from tests.models import fixtures

BLOCK, WIDTH, REQS = 4, 12, 4
GREEDY_RECORD = np.zeros((1, RECORD_WORDS), np.int32)


class Lab:
    """A tiny model's step functions, with caches and state for four requests."""

    def __init__(self) -> None:
        self.fixture = fixtures.fixture("llama")
        model = fixtures.decoder_from(self.fixture.config, self.fixture.tensors)
        layers = model.config.attention_layers()
        implementation, _ = choose_attention(layers, BLOCK, jnp.float32, jax.default_backend())
        definition, self.params = split(model)
        group = CacheGroup(GroupSpec(BLOCK, layers), implementation)
        self.step = StepFunctions(definition, (group,), max_num_reqs=REQS, max_logits=REQS)
        self.caches = allocate_caches(layers, 1 + REQS * WIDTH, BLOCK, jnp.float32)
        state = init_state(REQS, [WIDTH])
        cells = jnp.arange(REQS * WIDTH, dtype=jnp.int32)
        self.state = update_block_table(state, 0, cells, cells + 1)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab()


def inputs(
    tokens: list[list[int]], computed: list[int], known: list[int] | None = None, padded: int = 16
) -> StepArrays:
    """A step of these tokens, one row a request, request index = row."""
    lengths = [len(t) for t in tokens]
    n, total = len(tokens), sum(lengths)

    def rows(values: list[int], fill: int = 0) -> jax.Array:
        return jnp.array(values + [fill] * (REQS - len(values)), jnp.int32)

    ends = np.cumsum(lengths).tolist()
    return StepArrays(
        num_reqs=jnp.int32(n),
        num_tokens=jnp.int32(total),
        num_logits=jnp.int32(n),
        flags=jnp.int32(0),
        query_start_loc=jnp.array([0, *ends] + [total] * (REQS - n), jnp.int32),
        idx_mapping=rows(list(range(n)), REQS),
        num_computed=rows(computed),
        num_known=rows(known or [c + k for c, k in zip(computed, lengths, strict=True)]),
        num_prompt=rows(known or [c + k for c, k in zip(computed, lengths, strict=True)]),
        num_draft=rows([]),
        use_device=rows([]),
        logits_indices=rows([e - 1 for e in ends]),
        update_group=jnp.zeros(1, jnp.int32),
        update_cell=jnp.full(1, 2**31 - 1, jnp.int32),
        update_value=jnp.zeros(1, jnp.int32),
        token_ids=jnp.array(sum(tokens, []) + [0] * (padded - total), jnp.int32),
    )


def greedy_reference(lab: Lab, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens with the whole history computed anew for every token."""
    tokens, step = list(prompt), jax.jit(partial(lab.step.step, return_logits=True))
    for _ in range(count):
        logits = step(lab.params, lab.caches, lab.state, inputs([tokens], [0]))[3]
        tokens.append(int(jnp.argmax(logits[0])))
    return tokens[len(prompt) :]


def test_greedy_decode_inside_scan(lab: Lab) -> None:
    """A user's own loop: prefill, then decode on the device, the next token never leaving it."""
    prompts = [[5, 9, 11], [7, 3]]
    step = lab.step

    @jax.jit
    def generate(params, caches, state):
        first = inputs(prompts, [0, 0])
        sampled, caches, state = step.step(params, caches, state, first)

        def decode(carry, t):
            caches, state = carry
            lengths = jnp.array([3, 2, 0, 0]) + t
            now = replace(
                inputs([[0], [0]], [0, 0], padded=4),
                num_computed=jnp.where(jnp.arange(REQS) < 2, lengths, 0).astype(jnp.int32),
                num_known=jnp.where(jnp.arange(REQS) < 2, lengths + 1, 0).astype(jnp.int32),
                use_device=jnp.array([1, 1, 0, 0], jnp.int32),
            )
            sampled, caches, state = step.step(params, caches, state, now)
            return (caches, state), sampled

        _, more = jax.lax.scan(decode, (caches, state), jnp.arange(4))
        return jnp.concatenate([sampled[None], more])[:, :2]

    tokens = np.asarray(generate(lab.params, lab.caches, lab.state))
    for row, prompt in enumerate(prompts):
        assert tokens[:, row].tolist() == greedy_reference(lab, prompt, 5)


def test_a_chunk_samples_nothing_and_the_last_sample_stays(lab: Lab) -> None:
    step = jax.jit(lab.step.step)
    sampled, _, state = step(lab.params, lab.caches, lab.state, inputs([[5, 9], [7]], [0, 0], known=[4, 1]))
    assert int(sampled[0]) == -1 and int(sampled[1]) >= 0 and sampled[2:].tolist() == [-1, -1]
    assert state.last_sampled.tolist() == [0, int(sampled[1]), 0, 0, 0]  # nothing for a chunk, nothing for scratch


def test_the_devices_token_is_used_only_where_asked(lab: Lab) -> None:
    """use_device replaces the last token before the drafts, and no other."""
    step = jax.jit(partial(lab.step.step, return_logits=True))
    state = replace(lab.state, last_sampled=jnp.array([42, 43, 0, 0, 0], jnp.int32))
    given = replace(inputs([[5, 9, 0], [7, 0]], [0, 0]), use_device=jnp.array([1, 0, 0, 0], jnp.int32))
    expected = inputs([[5, 9, 42], [7, 0]], [0, 0])
    got = step(lab.params, lab.caches, state, given)[3]
    np.testing.assert_array_equal(got[:2], step(lab.params, lab.caches, state, expected)[3][:2])


def test_the_step_returns_what_is_asked_for_and_in_order(lab: Lab) -> None:
    """Hidden states are forward's, of the tokens that get logits; logits are the head's of them; neither changes the
    rest.
    """
    given = inputs([[5, 9, 11, 2], [7, 3]], [0, 0])
    hidden, head_inputs, caches, state = jax.jit(lab.step.forward)(lab.params, lab.caches, lab.state, given)
    head = jax.jit(partial(lab.step.head_and_sample, return_logits=True))
    sampled, state, logits = head(lab.params, state, hidden, head_inputs)
    assert hidden.shape[0] == REQS and not np.array_equal(hidden[0], hidden[1])
    for asked in ({"hidden"}, {"logits", "hidden"}):
        step = partial(lab.step.step, return_logits="logits" in asked, return_hidden="hidden" in asked)
        got = jax.jit(step)(lab.params, lab.caches, lab.state, given)
        more = [array for name, array in (("logits", logits), ("hidden", hidden)) if name in asked]
        assert jax.tree.structure(got) == jax.tree.structure((sampled, caches, state, *more))
        np.testing.assert_array_equal(got[0][:2], sampled[:2])
        for array, expected in zip(got[3:], more, strict=True):
            np.testing.assert_allclose(array[:2], expected[:2], rtol=1e-5, atol=1e-6)


def test_entering_again_starts_anew(lab: Lab) -> None:
    state = replace(lab.state, last_sampled=jnp.array([4, 5, 6, 7, 0], jnp.int32))
    state = enter_requests(state, jnp.array([1, 99], jnp.int32), jnp.tile(jnp.array(GREEDY_RECORD), (2, 1)))
    assert state.last_sampled.tolist() == [4, 0, 6, 7, 0]


def test_the_step_is_differentiable(lab: Lab) -> None:
    """Gradient of a token's log-probability with respect to the parameters, against a finite difference."""
    step, given = lab.step, inputs([[5, 9, 11, 2], [7, 3]], [0, 0])

    @jax.jit
    def loss(params):
        hidden, head_inputs, _, state = step.forward(params, lab.caches, lab.state, given)
        logits = step.head_and_sample(params, state, hidden, head_inputs, return_logits=True)[2]
        return jax.nn.log_softmax(logits[:2])[jnp.arange(2), jnp.array([3, 4])].sum()

    gradient = jax.jit(jax.grad(loss))(lab.params)
    rng = np.random.default_rng(0)
    direction = tuple(jnp.asarray(rng.normal(size=p.shape), jnp.float32) * 1e-3 for p in lab.params)
    slope = sum(float(jnp.vdot(g, d)) for g, d in zip(gradient, direction, strict=True))
    there, back = (
        float(loss(tuple(p + s * d for p, d in zip(lab.params, direction, strict=True)))) for s in (0.5, -0.5)
    )
    assert slope == pytest.approx(there - back, rel=2e-2)


def test_unpack_is_the_layouts_inverse() -> None:
    layout = StepLayout(num_tokens=5, num_reqs=3, num_logits=2, num_updates=4)
    buffer = np.arange(layout.size, dtype=np.int32)
    arrays = unpack(jnp.asarray(buffer), layout)
    for name, (at, length) in layout.fields.items():
        assert np.ravel(getattr(arrays, name)).tolist() == list(range(at, at + length))


def test_a_new_state_knows_no_request() -> None:
    """Two request indices and the scratch entry; tables all null, sampling parameters as they are in no request."""
    state = init_state(2, [3, 5])
    assert [table.tolist() for table in state.block_tables] == [[[0] * 3] * 3, [[0] * 5] * 3]
    assert state.last_sampled.tolist() == [0, 0, 0]
    for column in SAMPLING_COLUMNS:
        values = getattr(state.sampling, column.name)
        assert values.shape == ((3, column.width) if column.width > 1 else (3,))
        assert values.dtype == (jnp.float32 if column.is_float else jnp.int32)
        assert (values == column.fill).all()
