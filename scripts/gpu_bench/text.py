"""Text from a small model, through the whole engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any


def text(model: str, attention: str) -> Iterator[dict[str, Any]]:
    """A row per implementation: what a greedy model says, and how fast; the reference comes last, to compare with.

    Texts may part where two tokens are nearly as likely.
    """
    from jaxrunner import LLM, SamplingParams
    from models import resolve_model
    from models.errors import ModelNotFoundError

    try:
        resolve_model(model)
    except ModelNotFoundError as error:
        yield {"left out": str(error).partition("\n")[0]}
        return
    prompts = ["The capital of France is", "Water boils at a temperature of", "def fibonacci(n):"]
    params = SamplingParams(temperature=0, max_tokens=24)
    answers: dict[str, list[str]] = {}
    for name in (attention, "reference"):
        if name in answers:
            continue
        llm = LLM(
            model,
            attention=name,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            token_buckets=(4, 64),
            logits_buckets=(4,),
            max_model_len=256,
            num_gpu_blocks_override=128,
            warmup="all",
            quiet=True,
        )
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        texts = [output.outputs[0].text for output in outputs]
        answers[llm.runner.functions.groups[0].implementation.name] = texts
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        yield {
            "model": model,
            "attention": llm.runner.attention_choice[-1],
            "tokens_per_s": tokens / seconds,
            "texts": texts,
            "same_as_first": [a == b for a, b in zip(texts, next(iter(answers.values())), strict=True)],
        }
        del llm
