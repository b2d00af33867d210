"""Every mode gives FULL's logits; what is compiled where, found again, saved, loaded and refused."""

import json
import logging
import threading
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrunner.compilation_cache import count_processors
from jaxrunner.compilation_counter import CompilationCounter
from jaxrunner.config import RunnerConfig
from jaxrunner.executable_store import ExecutableStore
from jaxrunner.executables import StepExecutables
from jaxrunner.runner import ModelRunner
from jaxrunner.saved_executables import SavedExecutables, SavedExecutablesError, save_executables
from jaxrunner.shape_record import read_shapes
from jaxrunner.shapes import ExecutionMode, Policy
from pallas_kernels import AttentionSupport
from pallas_kernels.paged_attention import IMPLEMENTATIONS
from tests.jaxrunner.plans import cached, new
from tests.models import fixtures

CONFIG = RunnerConfig(
    max_model_len=64,
    max_num_reqs=2,
    max_num_batched_tokens=16,
    token_buckets=(2, 16),
    logits_buckets=(2,),
    block_size=4,
    num_blocks=33,
    compilation_cache=False,
)


def runner_of(fixture, **changes) -> ModelRunner:
    return ModelRunner(fixtures.decoder_from(fixture.config, fixture.tensors), replace(CONFIG, **changes))


def run(runner: ModelRunner, ids: list[int]) -> list[np.ndarray]:
    """A prompt, a chunk beside a decode, two decodes."""
    plans = [
        new("a", ids[:9], 1),
        new("b", ids[3:17], 20, 5),
        cached({"a": 1, "b": 9}, {"a": 9, "b": 5}, {"a": 1, "b": 0}),
        cached({"a": 1, "b": 1}, {"a": 10, "b": 14}, {"a": 2, "b": 1}),
    ]
    return [runner.execute_model(plan, return_logits=True).logits for plan in plans]


@pytest.fixture(scope="module")
def full(fixture, tmp_path_factory) -> tuple[ModelRunner, list[np.ndarray]]:
    record = tmp_path_factory.mktemp("record") / "shapes.jsonl"
    runner = runner_of(fixture, record_shapes=record)
    logits = run(runner, fixture.ids.tolist())
    steps = read_shapes([record])
    assert [(s.tokens, s.requests, s.logits_rows, s.max_query, s.max_len, s.mode) for s in steps] == [
        (9, 1, 1, 9, 9, "FULL"),
        (5, 1, 1, 5, 5, "FULL"),
        (10, 2, 2, 9, 14, "FULL"),
        (2, 2, 2, 1, 15, "FULL"),
    ]
    return runner, logits


# What each policy compiles of the forward in those four steps.
FORWARDS = {
    "FULL_DECODE_ONLY": {"forward[9x1]", "forward[5x1]", "forward[10]", "forward[2]"},
    "FULL_AND_PIECEWISE": {"begin[16]", "between[16, layer 0]", "end[16]", "forward[2]"},
}


@pytest.mark.parametrize("mode", sorted(FORWARDS))
def test_every_mode_gives_the_same_logits(fixture, full, mode: str) -> None:
    """Together the two policies go through all three modes."""
    runner = runner_of(fixture, execution_mode=mode)
    for got, want in zip(run(runner, fixture.ids.tolist()), full[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    made = {name for name in runner.executables.compiled if name.startswith(("forward", "begin", "between", "end"))}
    assert made == FORWARDS[mode]
    if mode == "FULL_AND_PIECEWISE":
        attention = {name for name in runner.executables.compiled if name.startswith(("attend", "metadata"))}
        rows = {name.split("[")[1].split(",")[0].rstrip("]") for name in attention}
        assert rows == {"16x1", "16x2"}  # on shapes of its own: one row, then two
        jobs = runner.shapes.forwards(runner.shapes.tokens)
        assert [(s.mode.name, s.num_tokens, s.num_reqs, s.uniform) for s in jobs] == [
            ("PIECEWISE", 16, 2, False),
            ("PIECEWISE", 16, 1, False),
            ("PIECEWISE", 2, 2, False),
            ("PIECEWISE", 2, 1, False),
            ("FULL", 2, 2, True),
        ]


def test_attention_that_supports_less_lowers_the_policy(fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for implementation in IMPLEMENTATIONS:
        monkeypatch.setattr(type(implementation), "support", AttentionSupport.UNIFORM_BATCH)
    runner = runner_of(fixture)
    assert runner.shapes.policy is Policy.FULL_AND_PIECEWISE
    assert runner.shapes.dispatch(9, 1, 1, False).mode is ExecutionMode.PIECEWISE


def test_saved_executables_run_without_compiling(fixture, full, tmp_path) -> None:
    runner, logits = full
    names = set(runner.executables.compiled)
    runner.executables.save(tmp_path)
    again = runner_of(fixture, executables=tmp_path)
    assert again.executables.load(tmp_path) == len(names)
    before = again.counter.compilations
    for got, want in zip(run(again, fixture.ids.tolist()), logits, strict=True):
        np.testing.assert_array_equal(got, want)
    assert again.counter.compilations == before
    assert set(again.executables.compiled) == names and all(c.cached for c in again.executables.compiled.values())

    manifest = json.loads((tmp_path / "executables.json").read_text())
    for fact in ("device kind", "JAX version", "model and limits", "project sources"):
        (tmp_path / "executables.json").write_text(json.dumps(manifest | {fact: "another"}))
        with pytest.raises(SavedExecutablesError, match=f"do not fit: their {fact} is 'another', here it is '"):
            again.executables.load(tmp_path)
    (tmp_path / "executables.json").write_text(json.dumps(manifest | {"number of processors": 1000}))
    with pytest.raises(SavedExecutablesError, match=f"processors is 1000, here it is {count_processors()}"):
        again.executables.load(tmp_path)
    with pytest.raises(SavedExecutablesError, match="no saved executables in "):
        runner_of(fixture, executables=str(tmp_path / "nowhere"))


def test_what_jax_had_in_memory_is_compiled_again_to_be_saved(tmp_path) -> None:
    """It may be from the persistent cache: saved as it is, it would fail when run, for want of a function."""

    def choose(x: jax.Array) -> jax.Array:
        return jax.numpy.where(x[:5] > 0, x[5:], x[:5] * 3).reshape(1, 5)

    arguments = {"x": jax.ShapeDtypeStruct((10,), np.float32)}
    for _ in range(2):  # compiled and written to the cache, then read from there
        jax.clear_caches()
        jax.jit(choose).lower(*arguments.values()).compile()
    store = ExecutableStore()
    x = np.arange(10, dtype=np.float32) - 2
    want = store._get("choose", choose, arguments, ())(x)
    assert not store.compiled["choose"].fresh
    save_executables(tmp_path, store.compiled, "choose")
    jax.clear_caches()
    saved = SavedExecutables(tmp_path, "choose")
    np.testing.assert_array_equal(saved.load("choose")(x), want)


def test_a_warm_up_takes_what_was_saved_and_compiles_the_rest(fixture, full, tmp_path, monkeypatch) -> None:
    full[0].executables.save(tmp_path)
    saved = set(full[0].executables.compiled)
    with pytest.raises(SavedExecutablesError, match="do not fit: their model and limits is "):
        runner_of(fixture, executables=tmp_path, token_buckets=(4, 16))
    load, taken = SavedExecutables.load, dict[str, bool]()

    def noted(self, name):
        found = load(self, name)
        taken[name] = found is not None
        return found

    monkeypatch.setattr(SavedExecutables, "load", noted)
    runner = runner_of(fixture, executables=tmp_path, warmup="all")
    assert {"forward[2]", "forward[16]"} <= saved
    assert taken == {name: name in saved for name in runner.executables.compiled} and not all(taken.values())
    run_count = runner.compilations
    runner.execute_model(new("a", fixture.ids.tolist()[:9], 1))
    assert runner.compilations == run_count == 0


def test_work_rounds_up_until_a_bucket_is_ready(fixture, full, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket of 2 is held back while steps run at 16, and is taken once it is there."""
    go = threading.Event()
    compile_ = ModelRunner._executables

    def held_back(self, kv_caches):
        executables = compile_(self, kv_caches)
        make = executables._compile

        def slow(name, *arguments):
            if name == "forward[2]":
                assert go.wait(60)
            return make(name, *arguments)

        monkeypatch.setattr(executables, "_compile", slow)
        return executables

    monkeypatch.setattr(ModelRunner, "_executables", held_back)
    runner = runner_of(fixture, background_compilation=True)
    assert runner.background is not None and runner.background.ready.tokens == (16,)
    seen = []
    forward = runner.executables.forward
    monkeypatch.setattr(runner.executables, "forward", lambda shape: seen.append(shape.num_tokens) or forward(shape))
    ids = fixture.ids.tolist()
    runner.execute_model(new("a", ids[:9], 1))
    runner.execute_model(cached({"a": 1}, {"a": 9}, {"a": 1}))
    go.set()
    assert runner.background.join().tokens == (2, 16)
    runner.execute_model(cached({"a": 1}, {"a": 10}, {"a": 2}))
    assert seen == [16, 16, 2] and runner.compilations == runner.executables.late == 0


def test_a_failure_in_the_background_is_told_and_work_goes_on(fixture, full, monkeypatch, caplog) -> None:
    compile_ = ModelRunner._executables

    def broken(self, kv_caches):
        executables = compile_(self, kv_caches)
        make = executables._compile

        def fails(name, *arguments):
            if name == "forward[2]":
                raise RuntimeError("no compiler today")
            return make(name, *arguments)

        monkeypatch.setattr(executables, "_compile", fails)
        return executables

    monkeypatch.setattr(ModelRunner, "_executables", broken)
    with caplog.at_level(logging.WARNING, logger="jaxrunner"):
        runner = runner_of(fixture, background_compilation=True)
        with pytest.raises(RuntimeError, match="background failed: no compiler today"):
            runner.background.join()
    assert "compiling 2 tokens in the background: no compiler today" in caplog.text
    assert runner.execute_model(new("a", fixture.ids.tolist()[:1], 1)).sampled_token_ids[0]


def test_threads_compile_each_program_once(fixture, full) -> None:
    runner = runner_of(fixture)
    made = [compiled.name for compiled in runner.executables.compile_all(runner.shapes.tokens, workers=3)]
    assert sorted(made) == sorted(set(made)) and {"forward[2]", "forward[16]", "head[2]", "enter"} <= set(made)
    assert list(runner.executables.compile_all(runner.shapes.tokens)) == []


def test_after_a_failure_threads_begin_nothing_more() -> None:
    begun, go = [], threading.Event()

    def fails() -> None:
        go.set()
        raise RuntimeError("no compiler today")

    def waits() -> None:
        begun.append(1)
        assert go.wait(60)
        time.sleep(0.02)

    executables = StepExecutables.__new__(StepExecutables)
    executables.compiled, executables.jobs = {}, lambda tokens: [waits, fails, *[waits] * 200]
    with pytest.raises(RuntimeError, match="no compiler today"):
        list(executables.compile_all((1,), workers=2))
    assert len(begun) < 100


def test_the_counter_hears_compilations_and_the_cache() -> None:
    counter, shape = CompilationCounter(), jax.ShapeDtypeStruct((11,), np.float32)
    for _ in range(2):
        jax.jit(lambda x: x * 3 + 0.125).lower(shape).compile()
    assert counter.compilations == 2
    assert counter.hits >= 1 and counter.hits + counter.misses == 2  # the second is found in the persistent cache
    assert counter.cached() is True and counter.cached() is None
    assert counter.compiled() is True and counter.compiled() is False
    counter.apart()
    jax.jit(lambda x: x * 5 + 0.25).lower(shape).compile()
    assert counter.compilations == 2
