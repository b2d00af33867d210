"""How well real weights predict real text: one number that anything wrong anywhere moves, chunks and blocks included.

The numbers are transformers', see the "how" in tests/cases/perplexity.json.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams

REFERENCE = json.loads((Path(__file__).parents[1] / "cases" / "perplexity.json").read_text(encoding="utf-8"))
TOKENS, WITHIN = 1024, 3e-4
CASES = [
    ("smollm2-135m-instruct", "gpl3"),
    ("smollm2-135m-instruct", "humaneval"),
    ("smollm2-135m-instruct", "shakespeare"),
    pytest.param("gemma3-270m", "shakespeare", marks=pytest.mark.larger_model("gemma3-270m")),
    pytest.param("qwen2.5-coder-0.5b", "humaneval", marks=pytest.mark.larger_model("qwen2.5-coder-0.5b")),
]
pytestmark = pytest.mark.usefixtures("default_model")


@lru_cache(maxsize=1)  # one model at a time: they are gigabytes
def llm_of(model: str) -> LLM:
    return LLM(
        model,
        dtype="float32",
        max_model_len=TOKENS + 1,
        max_num_seqs=2,
        max_num_batched_tokens=256,  # half of Gemma's window
        token_buckets=[256],
        logits_buckets=[2],
        num_gpu_blocks_override=70,
        quiet=True,
    )


@pytest.fixture(scope="module", autouse=True)
def freed_afterwards() -> Iterator[None]:
    yield
    llm_of.cache_clear()


@pytest.mark.parametrize("model, text", CASES)
def test_mean_negative_log_likelihood(model: str, text: str) -> None:
    llm = llm_of(model)
    ids = llm.get_tokenizer().encode(REFERENCE["texts"][text])[:TOKENS]
    assert len(ids) == TOKENS
    (output,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    logprobs = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    assert -np.mean(logprobs) == pytest.approx(REFERENCE["mean_nll"][model][text], abs=WITHIN)
