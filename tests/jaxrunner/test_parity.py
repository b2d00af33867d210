"""Real weights, token for token what transformers generates in float32: in chunks, in blocks, crowded and preempted.

References are in tests/cases: made by transformers on the same (dequantised) weights, see their "how".
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.loading import load_model
from tests.jaxrunner.scheduler.workload import Workload

CASES = Path(__file__).parents[1] / "cases"
NAMES = {
    "smollm2-135m-instruct": "smollm2-135m",
    "gemma3-270m": "gemma3-270m",
    "qwen2.5-coder-0.5b": "qwen25-coder-0.5b",
}
LOGITS_WITHIN = 2e-3
pytestmark = pytest.mark.usefixtures("default_model")

MODELS = [
    name if name == "smollm2-135m-instruct" else pytest.param(name, marks=pytest.mark.larger_model(name))
    for name in NAMES
]
# Every way of cutting the same work. Few padded sizes, since compiling is most of this file's time.
WAYS = {
    "whole prompts": {"max_num_batched_tokens": 2048, "token_buckets": [4, 128], "block_size": 16},
    "many chunks": {"max_num_batched_tokens": 16, "block_size": 4, "token_buckets": [16]},
    "alone": {"max_num_batched_tokens": 2048, "token_buckets": [1, 64], "block_size": 32, "max_num_seqs": 1},
    # Too few blocks for all (see ``options``): some request has to go back and be computed again.
    "preempted": {
        "max_num_batched_tokens": 64,
        "token_buckets": [64],
        "block_size": 4,
        "enable_prefix_caching": False,
    },
}
OUTPUT = 32  # tokens of each reference


@cache
def cases(model: str) -> list[dict]:
    reference = json.loads((CASES / "model_reference.json").read_text(encoding="utf-8"))
    return reference["models"][NAMES[model]]["prompts"]


@cache
def loaded(model: str):
    return load_model(model, dtype="float32")


def options(model: str, way: str) -> dict:
    """Options of an LLM that works in this way. Crowded, it has three blocks for every four that are needed."""
    own = {"max_num_seqs": 4, "max_model_len": 1024, "num_gpu_blocks_override": 300, "quiet": True} | WAYS[way]
    if way == "preempted":
        size = own["block_size"]
        needed = sum(-(-(len(c["prompt_ids"]) + OUTPUT - 1) // size) for c in cases(model))  # the last is never fed in
        own["num_gpu_blocks_override"] = 1 + needed * 3 // 4
    return own


@cache
def whole_prompts(model: str) -> LLM:
    """The one configuration that two tests share: compiling it takes longer than running it."""
    return LLM(loaded(model), **options(model, "whole prompts"))


@pytest.fixture(scope="module", autouse=True)
def freed_afterwards() -> Iterator[None]:
    """Three models and their executables are gigabytes, which nothing after this file wants."""
    yield
    whole_prompts.cache_clear()
    loaded.cache_clear()


class Recorder:
    """Keeps the logits that each token of each request was chosen from, until ``monkeypatch`` is undone."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: dict[str, list[np.ndarray]] = {}
        self._execute = llm.runner.execute_model
        monkeypatch.setattr(llm.runner, "execute_model", self.execute)

    def execute(self, scheduler_output):
        output = self._execute(scheduler_output, return_logits=True)
        for row, (req_id, tokens) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=True)):
            if tokens:
                self.logits.setdefault(req_id, []).append(output.logits[row])
        return output


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_and_logits(model: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = whole_prompts(model) if way == "whole prompts" else LLM(loaded(model), **options(model, way))
    recorder = Recorder(llm, monkeypatch)
    llm.reset_prefix_cache()
    prompts = [c["prompt_ids"] for c in cases(model)]
    outputs = llm.generate(prompts, greedy(OUTPUT), use_tqdm=False)
    for case, output in zip(cases(model), outputs, strict=True):
        assert output.outputs[0].token_ids == case["output_ids"]
        assert len(recorder.logits[output.request_id]) == len(case["top5"])
        for logits, top5 in zip(recorder.logits[output.request_id], case["top5"], strict=True):
            ids, values = zip(*top5, strict=True)
            np.testing.assert_allclose(logits[list(ids)], values, atol=LOGITS_WITHIN, rtol=0)
    preemptions = sum(o.metrics.num_preemptions for o in outputs)
    assert (preemptions > 0) == (way == "preempted")


@pytest.mark.parametrize("model", NAMES)
def test_crowded_is_too_tight_for_each_model(model: str) -> None:
    """By the scheduler alone, for the models too that are not there: the blocks of "preempted" do preempt."""
    given = options(model, "preempted")
    work = Workload(
        given["num_gpu_blocks_override"],
        (given["block_size"],),
        given["max_num_seqs"],
        given["max_num_batched_tokens"],
        given["max_model_len"],
        caching=given["enable_prefix_caching"],
    )
    for i, case in enumerate(cases(model)):
        assert len(case["output_ids"]) == OUTPUT
        work.add(str(i), case["prompt_ids"], max_tokens=OUTPUT, ignore_eos=True)
    work.run()
    assert work.scheduler.num_preemptions > 0


@pytest.mark.parametrize("model", MODELS)
def test_text_in_text_out(model: str) -> None:
    """The same prompts as text: the tokenizer is the reference's, and so is the text that comes out."""
    llm = whole_prompts(model)
    tokenizer = llm.get_tokenizer()
    llm.reset_prefix_cache()
    prompts = []
    for case in cases(model):
        chat = case["kind"] == "chat"  # the template has written the special tokens already
        assert tokenizer.encode(case["text"], add_special_tokens=not chat) == case["prompt_ids"]
        assert tokenizer.decode(case["output_ids"], skip_special_tokens=False) == case["output_text"]
        ids = {"prompt_token_ids": tokenizer.encode(case["text"], add_special_tokens=False)} if chat else {}
        prompts.append({"prompt": case["text"], **ids})
    outputs = llm.generate(prompts, greedy(OUTPUT), use_tqdm=False)
    for case, output in zip(cases(model), outputs, strict=True):
        assert output.prompt == case["text"]
        assert output.outputs[0].token_ids == case["output_ids"]
        assert output.outputs[0].text == tokenizer.decode(case["output_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("model", MODELS)
def test_long_prompt(model: str) -> None:
    """900 tokens, past Gemma's window of 512, in chunks of 256, beside another request's decode."""
    reference = json.loads((CASES / "long_prompts.json").read_text(encoding="utf-8"))["models"][model]
    chunked = {"max_num_batched_tokens": 256, "token_buckets": [4, 256]}
    llm = LLM(loaded(model), **options(model, "whole prompts") | chunked)
    short = cases(model)[-1]
    outputs = llm.generate([short["prompt_ids"], reference["prompt_ids"]], greedy(OUTPUT), use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == short["output_ids"]
    assert outputs[1].outputs[0].token_ids == reference["output_ids"]


def test_bfloat16_teacher_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16's tokens may leave the reference's path; its logits along that path may not stray far."""
    model = "smollm2-135m-instruct"
    llm = LLM(model, dtype="bfloat16", **options(model, "many chunks"))
    recorder = Recorder(llm, monkeypatch)
    for case in cases(model):
        worst = 0.0
        for step in (0, 1, 7, 31):
            prompt = case["prompt_ids"] + case["output_ids"][:step]
            (output,) = llm.generate([prompt], greedy(1), use_tqdm=False)
            ids, values = zip(*case["top5"][step], strict=True)
            worst = max(worst, float(np.abs(recorder.logits[output.request_id][-1][list(ids)] - values).max()))
        assert worst < 1.0, case["kind"]
