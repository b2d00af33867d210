"""A run of a model, recorded: preemption, chunked prefill, prefix hits. Replayed, arrays and tokens are the same."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.runner import ModelRunner
from jaxrunner.trace import HostStepper, check_trace, open_trace, replay
from jaxrunner.trace.replay_model import ModelStepper
from tests.jaxrunner.chain import successor_logits, write_chain

VOCABULARY = 32


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("traced")
    model = write_chain(folder / "model", successor_logits(VOCABULARY, {}, height=1.0))
    llm = LLM(
        str(model),
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        token_buckets=(4, 16),
        logits_buckets=(4,),
        block_size=4,
        num_gpu_blocks_override=20,
        trace=str(folder / "t.jsonl"),
        quiet=True,
    )
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCABULARY, 9).tolist()
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, detokenize=False)
    prompts = [shared + rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(1, 24, 40)]
    many = [replace(params, seed=i) for i in range(40)]
    llm.generate([{"prompt_token_ids": p} for p in prompts], many, use_tqdm=False)
    assert llm.runner.recorder is not None
    llm.runner.recorder.close()
    return llm


@pytest.fixture(scope="module")
def path(llm: LLM) -> Path:
    return Path(llm.config.trace)


def test_the_run_had_what_it_needs_to_have(path: Path):
    steps = list(open_trace(path).steps())
    assert len(steps) >= 200
    assert any(line["plan"]["preempted_req_ids"] for line in steps)
    assert any(data["num_computed_tokens"] for line in steps for data in line["plan"]["new"])
    assert any(any(line.get("discard", ())) for line in steps)
    assert set(steps[0]["times_us"]) == {"update", "prepare", "dispatch", "wait", "record"}


def test_it_checks_clean_and_replays_without_the_model(path: Path):
    trace = open_trace(path)
    assert check_trace(trace.lines(), trace.geometry) is None
    assert replay(trace.lines(), HostStepper(trace.geometry))[1] is None


def test_it_replays_with_the_model_tokens_included(llm: LLM, path: Path):
    """The runner that recorded it, emptied, runs it again: no second compilation."""
    trace = open_trace(path)
    runner: ModelRunner = llm.runner
    runner.reset()
    steps, difference = replay(trace.lines(), ModelStepper(runner))
    assert difference is None and steps >= 200
    runner.reset()
    lines = list(trace.lines())
    target = next(n for n, line in enumerate(lines) if n > 50 and line["sampled"] and line["sampled"][0])
    lines[target]["sampled"][0][0] ^= 1
    _, difference = replay(lines, ModelStepper(runner))
    assert (difference.step, difference.field, difference.cell) == (target, "sampled", "[0][0]")


def test_a_trace_of_no_runner_is_not_replayed_on_a_model(path: Path):
    with pytest.raises(ValueError, match="not recorded by a ModelRunner"):
        ModelStepper.load("anything", "auto", {"config": {}})
