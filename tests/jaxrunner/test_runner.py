"""The runner on a tiny model: logits as transformers has them, refusals that change nothing, nothing compiled late."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.batch import BufferRing, SchedulerOutputError
from jaxrunner.batch.buffers import StepViews
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.runner import ModelRunner
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.shapes import StepLayout
from jaxrunner.step import unpack
from models import split
from tests.jaxrunner.plans import CONFIG, cached, compilations, new
from tests.models import fixtures


def test_chunks_and_decodes_against_transformers(fixture, runner: ModelRunner) -> None:
    """The fixture's sequence twice, teacher-forced in chunks beside each other: logits as transformers'."""
    a = b = fixture.ids.tolist()
    steps = [
        (new("a", a, 1, 7), {"a": 7}),
        (new("b", b, 20, 30), {"b": 30}),
        (cached({"b": 10, "a": 20}, {"a": 7, "b": 30}, {"a": 0, "b": 0}), {"b": 40, "a": 27}),
        (cached({"a": 13}, {"a": 27}, {"a": 0}), {"a": 40}),
    ]
    for plan, done in steps:
        output = runner.execute_model(plan, return_logits=True)
        for req_id, length in done.items():
            row = output.req_id_to_index[req_id]
            reference = fixture.logits[length - 1]
            np.testing.assert_allclose(output.logits[row], reference, atol=1e-4, rtol=0)
            expected = [int(reference.argmax())] if length == 40 else []  # a chunk of a prompt samples nothing
            assert output.sampled_token_ids[row] == expected


def test_what_is_not_owned_may_be_anything(fixture, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is NaN before it is written, the null block always, the device's tables lead anywhere, and so does
    the embedding of padding tokens: not a bit of it arrives anywhere, at no bucket.
    """
    ids = fixture.ids.tolist()
    assert 0 not in ids  # the id that padding has

    def run() -> list[np.ndarray]:
        plans = (
            new("a", ids[:9], 1),
            new("b", ids[3:17], 20, 5),
            cached({"a": 1, "b": 9}, {"a": 9, "b": 5}, {"a": 1, "b": 0}),
            cached({"a": 1, "b": 1}, {"a": 10, "b": 14}, {"a": 2, "b": 1}),
            new("c", ids[:3], 40),
            cached({"b": 1, "c": 1, "a": 1}, {"b": 15, "c": 3, "a": 11}, {"b": 2, "c": 1, "a": 3}),
        )
        # The last block of the cache is where a slot of -1 would lead.
        plans[0].scheduled_new_reqs[0].block_ids = ([CONFIG.num_blocks - 1, *range(1, 12)],)
        buckets = [runner.shapes.dispatch(plan.total_num_scheduled_tokens, 1).num_tokens for plan in plans]
        assert buckets == [32, 32, 32, 4, 4, 4]  # never full: each has padding
        outputs = [runner.execute_model(plan, return_logits=True) for plan in plans]
        assert all(0 not in tokens for output in outputs for tokens in output.sampled_token_ids)
        return [output.logits for output in outputs]

    clean = run()
    runner.reset()
    embedding = fixture.tensors["model.embed_tokens.weight"].copy()
    embedding[0] = np.nan
    tensors = fixture.tensors | {"model.embed_tokens.weight": embedding}
    monkeypatch.setattr(runner, "params", split(fixtures.decoder_from(fixture.config, tensors))[1])
    runner.kv_caches = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), runner.kv_caches)
    runner.state = replace(runner.state, block_tables=tuple(jnp.full_like(t, 7) for t in runner.state.block_tables))
    poisoned = run()
    for expected, got in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_after_warm_up_nothing_compiles(fixture, runner: ModelRunner) -> None:
    rng, late = np.random.default_rng(0), runner.executables.late
    with compilations() as events:
        computed: dict[str, int] = {}
        outputs: dict[str, int] = {}
        for step in range(40):
            if len(computed) == 4:
                finished = {next(iter(computed))}
                for req_id in finished:
                    del computed[req_id], outputs[req_id]
            else:
                finished = set()
            arrival = f"r{step}"
            length = int(rng.integers(1, 20))
            params = SamplingParams(temperature=float(step % 2), top_k=step % 3, min_tokens=step % 2)
            plan = new(arrival, rng.integers(3, 250, length).tolist(), 1 + 13 * (step % 4), sampling_params=params)
            running = dict.fromkeys(computed, 1)
            old = cached(running, computed, outputs)
            plan.scheduled_cached_reqs = old.scheduled_cached_reqs
            plan.num_scheduled_tokens = running | plan.num_scheduled_tokens
            plan.total_num_scheduled_tokens += len(running)
            plan.finished_req_ids = finished
            runner.execute_model(plan)
            for req_id in running:
                computed[req_id] += 1
                outputs[req_id] += 1
            computed[arrival], outputs[arrival] = length, 1
    assert not events
    assert runner.executables.late == late
    with compilations() as events:
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
    assert events, "the listener hears nothing: this test would pass whatever happens"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_embeds": np.zeros((1, 1))}, "'x' uses \\['prompt_embeds'\\]"),
        ({"lora_request": object()}, "'x' uses \\['lora_request'\\]"),
        ({"mm_features": [object()]}, "'x' uses \\['mm_features'\\]"),
        ({"pooling_params": object()}, "'x': pooling_params must be PoolingParams"),
        ({"sampling_params": SamplingParams(stream_interval=2)}, "'x': .*\\['stream_interval'\\]"),
        ({"sampling_params": SamplingParams(bad_words=["a"])}, "'x': .*give bad_words_token_ids"),
    ],
)
def test_unserved_request_fields_are_refused_by_name(runner: ModelRunner, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner.execute_model(new("x", [5, 6], 1, **change))
    assert not runner.batch.requests
    runner.execute_model(new("x", [5, 6], 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scheduled_spec_decode_tokens", {"x": [1]}),
        ("scheduled_encoder_inputs", {"x": [0]}),
        ("free_encoder_mm_hashes", ["h"]),
    ],
)
def test_unserved_plan_fields_are_refused_by_name(runner: ModelRunner, field: str, value: object) -> None:
    plan = new("x", [5, 6], 1)
    setattr(plan, field, value)
    with pytest.raises(ValueError, match=field):
        runner.execute_model(plan)
    assert not runner.batch.requests


def test_a_refused_step_leaves_the_runner_as_it_was(fixture, runner: ModelRunner) -> None:
    prompt = fixture.ids.tolist()[:9]
    runner.execute_model(new("a", prompt, 1))
    bad = cached({"a": 5}, {"a": 9}, {"a": 1})
    with pytest.raises(SchedulerOutputError, match="'a': 9 computed \\+ 5 scheduled"):
        runner.execute_model(bad)
    after = runner.execute_model(cached({"a": 1}, {"a": 9}, {"a": 1}), return_logits=True).logits
    runner.reset()
    runner.execute_model(new("a", prompt, 1))
    np.testing.assert_array_equal(
        runner.execute_model(cached({"a": 1}, {"a": 9}, {"a": 1}), return_logits=True).logits, after
    )


def test_submit_and_result(runner: ModelRunner) -> None:
    pending = runner.submit(new("a", [5, 6], 1))
    with pytest.raises(RuntimeError, match="previous step is pending"):
        runner.submit(new("b", [5, 6], 20))
    output = pending.result()
    assert pending.result() is output and output.req_ids == ["a"]
    assert runner.execute_model(SchedulerOutput(finished_req_ids={"a"})).req_ids == []
    assert not runner.batch.requests


def test_an_argument_that_fits_no_executable_is_an_error(runner: ModelRunner) -> None:
    """Executables cannot recompile: a wrong dtype is refused, not served by a new program."""
    forward = runner.executables.forward(runner.shapes.full(4))
    layout = runner.shapes.layouts[4]
    with pytest.raises(TypeError, match="float32"):
        forward(runner.params, runner.kv_caches, runner.state, np.zeros(layout.size, np.float32))


def test_more_blocks_than_the_upload_holds_go_ahead(fixture, runner: ModelRunner) -> None:
    """A prefix hit brings a long table at once; the step of one token after it must see all of it."""
    tokens = fixture.ids.tolist()
    runner.execute_model(new("a", tokens[:32], 1))
    plan = new("b", tokens[:33], 1, count=1, computed=32)  # the same blocks: a shared prefix
    plan.scheduled_new_reqs[0].block_ids = ([*range(1, 9), 40],)
    output = runner.execute_model(plan, return_logits=True)
    np.testing.assert_allclose(output.logits[output.req_id_to_index["b"]], fixture.logits[32], atol=1e-4, rtol=0)


def test_the_device_table_is_the_hosts(fixture, runner: ModelRunner) -> None:
    runner.execute_model(new("a", [5] * 9, 3))
    runner.execute_model(new("b", [6] * 7, 20))
    table = np.asarray(runner.state.block_tables[0])
    for req_id in runner.batch.requests:
        index, blocks = runner.batch.requests[req_id].request_index, runner.batch.block_ids_of(req_id)
        np.testing.assert_array_equal(table[index, : len(blocks)], blocks)


def test_no_buffer_is_written_while_a_step_reads_it(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step says which outputs come from its buffer, and they are ready when the buffer is had again."""
    acquire, read_by, order = BufferRing.acquire, BufferRing.read_by, list[int]()
    readers: dict[int, list[jax.Array]] = {}

    def acquired(self: BufferRing, layout: StepLayout) -> StepViews:
        views = acquire(self, layout)
        order.append(views["buffer"].ctypes.data)
        assert order[-1] % 64 == 0  # the backend reads this very memory
        assert all(output.is_ready() for output in readers.get(order[-1], ()))
        readers[order[-1]] = []
        return views

    def is_read_by(self: BufferRing, output: jax.Array) -> None:
        readers[order[-1]].append(output)
        read_by(self, output)

    monkeypatch.setattr(BufferRing, "acquire", acquired)
    monkeypatch.setattr(BufferRing, "read_by", is_read_by)
    runner.execute_model(new("a", [5, 6, 7], 1))
    for computed in range(3, 8):
        pending = runner.submit(cached({"a": 1}, {"a": computed}, {"a": computed - 2}))
        assert readers[order[-1]]
        pending.result()
    assert len(order) == 6 and len(set(order)) > 1


def test_unpack_checks_the_buffer(runner: ModelRunner) -> None:
    with pytest.raises(ValueError, match="has .* words, got shape \\(3,\\)"):
        unpack(jnp.zeros(3, jnp.int32), runner.shapes.layouts[4])
