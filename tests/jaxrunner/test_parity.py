"""Real weights, token for token what transformers generates in float32: in chunks, in blocks, crowded and preempted.

References are in tests/cases: made by transformers on the same (dequantised) weights, see their "how".
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.loading import load_model

CASES = Path(__file__).parents[1] / "cases"
NAMES = {
    "smollm2-135m-instruct": "smollm2-135m",
    "gemma3-270m": "gemma3-270m",
    "qwen2.5-coder-0.5b": "qwen25-coder-0.5b",
}
LOGITS_WITHIN = 2e-3

MODELS = [
    name if name == "smollm2-135m-instruct" else pytest.param(name, marks=pytest.mark.larger_model(name))
    for name in NAMES
]
# Every way of cutting the same work. Few padded sizes, since compiling is most of this file's time.
WAYS = {
    "whole prompts": {"max_num_batched_tokens": 2048, "token_buckets": [4, 128], "block_size": 16},
    "many chunks": {"max_num_batched_tokens": 16, "block_size": 4, "token_buckets": [16]},
    "alone": {"max_num_batched_tokens": 2048, "token_buckets": [1, 64], "block_size": 32, "max_num_seqs": 1},
    # 13 blocks are needed at the end, 9 are there: some request has to go back and be computed again.
    "preempted": {
        "max_num_batched_tokens": 64,
        "token_buckets": [64],
        "block_size": 16,
        "num_gpu_blocks_override": 10,
        "enable_prefix_caching": False,
    },
}


@cache
def cases(model: str) -> list[dict]:
    reference = json.loads((CASES / "model_reference.json").read_text(encoding="utf-8"))
    return reference["models"][NAMES[model]]["prompts"]


@cache
def loaded(model: str):
    return load_model(model, dtype="float32")


def options(way: str) -> dict:
    return {"max_num_seqs": 4, "max_model_len": 1024, "num_gpu_blocks_override": 300, "quiet": True} | WAYS[way]


class Recorder:
    """Keeps the logits that each token of each request was chosen from."""

    def __init__(self, llm: LLM) -> None:
        self.logits: dict[str, list[np.ndarray]] = {}
        self._execute = llm.runner.execute_model
        llm.runner.execute_model = self.execute  # type: ignore[method-assign]

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
def test_greedy_tokens_and_logits(model: str, way: str) -> None:
    llm = LLM(loaded(model), **options(way))
    recorder = Recorder(llm)
    prompts = [c["prompt_ids"] for c in cases(model)]
    outputs = llm.generate(prompts, greedy(32), use_tqdm=False)
    for case, output in zip(cases(model), outputs, strict=True):
        assert output.outputs[0].token_ids == case["output_ids"]
        assert len(recorder.logits[output.request_id]) == len(case["top5"])
        for logits, top5 in zip(recorder.logits[output.request_id], case["top5"], strict=True):
            ids, values = zip(*top5, strict=True)
            np.testing.assert_allclose(logits[list(ids)], values, atol=LOGITS_WITHIN, rtol=0)
    preemptions = sum(o.metrics.num_preemptions for o in outputs)
    assert (preemptions > 0) == (way == "preempted")


@pytest.mark.parametrize("model", MODELS)
def test_text_in_text_out(model: str) -> None:
    """The same prompts as text: the tokenizer is the reference's, and so is the text that comes out."""
    llm = LLM(loaded(model), **options("whole prompts"))
    tokenizer = llm.model.tokenizer
    for case in cases(model):
        add_special = case["kind"] != "chat"  # a chat template has written them already
        assert tokenizer.encode(case["text"], add_special_tokens=add_special) == case["prompt_ids"]
        assert tokenizer.decode(case["output_ids"], skip_special_tokens=False) == case["output_text"]


@pytest.mark.parametrize("model", MODELS)
def test_long_prompt(model: str) -> None:
    """900 tokens, past Gemma's window of 512, in chunks of 256, beside another request's decode."""
    reference = json.loads((CASES / "long_prompts.json").read_text(encoding="utf-8"))["models"][model]
    llm = LLM(loaded(model), **options("whole prompts") | {"max_num_batched_tokens": 256, "token_buckets": [4, 256]})
    short = cases(model)[-1]
    outputs = llm.generate([short["prompt_ids"], reference["prompt_ids"]], greedy(32), use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == short["output_ids"]
    assert outputs[1].outputs[0].token_ids == reference["output_ids"]


def test_bfloat16_teacher_forced() -> None:
    """bfloat16's tokens may leave the reference's path; its logits along that path may not stray far."""
    llm = LLM("smollm2-135m-instruct", dtype="bfloat16", **options("many chunks"))
    recorder = Recorder(llm)
    for case in cases("smollm2-135m-instruct"):
        worst = 0.0
        for step in (0, 1, 7, 31):
            prompt = case["prompt_ids"] + case["output_ids"][:step]
            (output,) = llm.generate([prompt], greedy(1), use_tqdm=False)
            ids, values = zip(*case["top5"][step], strict=True)
            worst = max(worst, float(np.abs(recorder.logits[output.request_id][-1][list(ids)] - values).max()))
        assert worst < 1.0, case["kind"]
