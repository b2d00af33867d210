"""Logits processors of one's own: state follows its request, others aren't touched, arguments are checked."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, LogitsProcessor, RequestOutputKind, SamplingParams
from jaxrunner.sampling_columns import FIRST_CUSTOM
from jaxrunner.trace import HostStepper, TraceChecker, open_trace, replay
from tests.jaxrunner.chain import successor_logits, write_chain
from tests.jaxrunner.small_llm import OPTIONS

V = 48


class Budget(LogitsProcessor):
    """After ``budget`` tokens of 20 and above, only tokens below 20."""

    extra_args = ("budget",)
    columns = {"left": np.zeros((), np.int32)}

    def enter(self, params, prompt, output):
        budget = (params.extra_args or {}).get("budget")
        return None if budget is None else {"left": budget - int((output >= 20).sum())}

    def apply(self, logits, state, position):
        large = jnp.arange(logits.shape[1]) >= 20
        gone = large[None, :] | (state["left"] < -5)[:, None]  # a budget below -5 leaves nothing at all
        return jnp.where(gone & (state["left"] <= 0)[:, None], -jnp.inf, logits)

    def update(self, state, token, position):
        return {"left": state["left"] - (token >= 20)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    logits = np.random.default_rng(0).normal(0, 1, (V, V)).astype(np.float32) + successor_logits(V, {}, 1.0)
    return write_chain(tmp_path_factory.mktemp("chain"), logits)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, logits_processors=[Budget()], **OPTIONS)


def params(budget=None, **fields):
    extra = None if budget is None else {"budget": budget}
    return SamplingParams(**{"max_tokens": 20, "detokenize": False, "extra_args": extra} | fields)


def say(llm, prompts, each):
    return [o.outputs[0].token_ids for o in llm.generate(prompts, each, use_tqdm=False)]


def large(tokens):
    return sum(token >= 20 for token in tokens)


def test_it_counts_and_ends(llm):
    for budget in (0, 3):
        (tokens,) = say(llm, [[5, 30, 31]], params(budget, seed=1, temperature=1.5))
        assert large(tokens) == budget and all(t < 20 for t in tokens[-5:])


def test_any_mix_gives_each_what_it_gets_alone_and_the_plain_ones_what_they_get_without_it(llm, folder):
    each = [params(None if i % 2 else i, seed=i, temperature=1.5, top_k=0 if i % 3 else 20) for i in range(8)]
    prompts = [[5 + i] * (1 + 3 * i) for i in range(8)]
    alone = [say(llm, [p], q)[0] for p, q in zip(prompts, each, strict=True)]
    assert say(llm, prompts, each) == alone
    plain = LLM(folder, **OPTIONS)
    assert [say(plain, [p], q)[0] for p, q in zip(prompts[1::2], each[1::2], strict=True)] == alone[1::2]


def test_preempted_requests_go_on_where_they_were(llm, folder):
    crowded = LLM(folder, logits_processors=[Budget()], num_gpu_blocks_override=16, **OPTIONS)
    prompts, each = [[7, 9, 11, 13 + i] for i in range(4)], [params(4, seed=i, max_tokens=24) for i in range(4)]
    outputs = crowded.generate(prompts, each, use_tqdm=False)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    assert [o.outputs[0].token_ids for o in outputs] == say(llm, prompts, each)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 3}, {"top_p": 0.5, "seed": 3}], ids=str)
def test_one_that_leaves_nothing_ends_its_request_with_the_reason(llm, fields):
    each = [params(-6, logprobs=2, prompt_logprobs=1, **fields), params(3, seed=1), params(seed=2)]
    stuck, *others = llm.generate([[5]] * 3, each, use_tqdm=False)
    assert stuck.error == "no token is left to sample: all there are are ruled out by a logits processor"
    assert (stuck.outputs[0].finish_reason, stuck.outputs[0].token_ids) == ("error", [])
    assert list(stuck.outputs[0].logprobs) == [] and stuck.finished
    assert [o.outputs[0].token_ids for o in others] == say(llm, [[5]] * 2, each[1:])
    assert llm.stats().num_running == 0


def test_arguments_that_nobody_reads_are_refused(llm, folder):
    with pytest.raises(ValueError, match=r"\['extra_args'\] are not served.*no logits processor reads them"):
        llm.generate([[5]], params(extra_args={"budget": 1, "frob": 2}))
    with pytest.raises(ValueError, match="no logits processor reads them"):
        LLM(folder, **OPTIONS).generate([[5]], params(1))


def test_arguments_that_it_can_not_use_are_refused_before_anything_runs(llm):
    bad = params(extra_args={"budget": "three"})
    for each in ([params(2), bad], bad):
        with pytest.raises(ValueError, match="Budget.enter failed: TypeError"):
            llm.generate([[5], [6]], each, use_tqdm=False)
    with pytest.raises(ValueError, match=r"extra_args must be a mapping, got \['budget'\]"):
        params(extra_args=["budget"])


def test_a_state_of_another_shape_than_declared_is_named(folder):
    class Wrong(Budget):
        def enter(self, params, prompt, output):
            return {"left": np.zeros(3)}

    with pytest.raises(ValueError, match=r"Wrong.enter gave left as \[3\], declared is \[\]"):
        LLM(folder, logits_processors=[Wrong()], **OPTIONS).generate([[5]], params(1), use_tqdm=False)


def test_a_trace_of_its_steps_is_clean_and_can_be_replayed(folder, tmp_path):
    """The flags of the processors are part of the upload that is recorded."""
    llm = LLM(folder, logits_processors=[Budget()], trace=tmp_path / "t.jsonl", **OPTIONS)
    each = [params(2, seed=1, output_kind=RequestOutputKind.DELTA), params(seed=2), params(-6, seed=3)]
    assert len(list(llm.stream([[5]] * 3, each))) > 20
    llm.runner.recorder.close()
    trace = open_trace(tmp_path / "t.jsonl")
    assert any(line["flags"] >= FIRST_CUSTOM for line in trace.steps())
    checker = TraceChecker(trace.geometry)
    assert [finding for line in trace.lines() if (finding := checker.check(line))] == []
    assert replay(trace.lines(), HostStepper(trace.geometry))[1] is None
