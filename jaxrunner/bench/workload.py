"""Prompts to measure with: random ones of given lengths, a file of requests, or conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrunner.arrival_trace import Arrival
from jaxrunner.request_file import read_requests


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: its prompt, and how many tokens it is to generate."""

    token_ids: list[int]
    num_output_tokens: int


def random_requests(
    count: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
    *,
    range_ratio: float = 0.0,
    prefix_share: float = 0.0,
    seed: int = 0,
) -> list[BenchRequest]:
    """Random token ids.

    Args:
        range_ratio: lengths are drawn evenly from [length * (1 - r), length * (1 + r)].
        prefix_share: fraction of ``input_len`` that all prompts have in common at their start.

    Raises:
        ValueError: a length below 1, or a ratio outside [0, 1).
    """
    if min(count, input_len, output_len) < 1:
        raise ValueError(f"count and lengths must be at least 1, got {count}, {input_len}, {output_len}")
    if not 0 <= range_ratio < 1 or not 0 <= prefix_share <= 1:
        raise ValueError(f"range_ratio must be in [0, 1) and prefix_share in [0, 1], got {range_ratio}, {prefix_share}")
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab_size, int(input_len * prefix_share)).tolist()

    def length(mean: int) -> int:
        return int(rng.integers(max(int(mean * (1 - range_ratio)), 1), int(mean * (1 + range_ratio)) + 1))

    requests = []
    for _ in range(count):
        n, outputs = length(input_len), length(output_len)
        own = rng.integers(0, vocab_size, n)[len(prefix) :].tolist()
        requests.append(BenchRequest((prefix + own)[:n], outputs))
    return requests


def traced_requests(
    arrivals: Sequence[Arrival], max_model_len: int, vocab_size: int, seed: int = 0
) -> list[BenchRequest]:
    """Random token ids in the lengths of a trace; what is longer than the model takes is cut, the prompt first."""
    rng = np.random.default_rng(seed)
    requests = []
    for arrival in arrivals:
        outputs = min(arrival.num_output_tokens, max_model_len - 1)
        n = min(arrival.num_prompt_tokens, max_model_len - outputs)
        requests.append(BenchRequest(rng.integers(0, vocab_size, n).tolist(), outputs))
    return requests


def file_requests(path: str | Path, count: int, output_len: int, llm: Any) -> list[BenchRequest]:
    """A file of requests, as ``scripts/generate.py --input`` takes it; each line's max_tokens, or ``output_len``.

    Raises:
        ValueError: a line that is no request or cannot be served.
    """
    with open(path, encoding="utf-8") as lines:
        read = read_requests(lines, {"max_tokens": output_len, "ignore_eos": True}, str(path))
    if not read:
        raise ValueError(f"{path} holds no request")
    requests = []
    for request in read[:count]:
        prompt = llm.inputs.process(request.prompt, request.params)
        requests.append(BenchRequest(list(prompt.token_ids), request.params.max_tokens or output_len))
    return requests


def sharegpt_requests(
    path: str | Path, count: int, tokenizer: Any, max_model_len: int, *, output_len: int | None = None, seed: int = 0
) -> list[BenchRequest]:
    """Conversations of ShareGPT's JSON: the first turn is the prompt, the second gives the output's length.

    As in vLLM, conversations of less than two turns, prompts or answers under 4 tokens (answers: unless ``output_len``
    is given) and what is longer than the model takes are left out. So there may be fewer than ``count``.

    Raises:
        ValueError: another format, or no conversation that fits.
    """
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: conversations need one")
    try:
        conversations = json.loads(Path(path).read_text(encoding="utf-8"))
        turns = [c["conversations"] for c in conversations if len(c.get("conversations", ())) >= 2]
        pairs = [(t[0]["value"], t[1]["value"]) for t in turns]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is no ShareGPT file ([{{'conversations': [{{'value': ...}}, ...]}}]): {error!r}"
        ) from None
    np.random.default_rng(seed).shuffle(pairs)
    requests: list[BenchRequest] = []
    for question, answer in pairs:
        if len(requests) == count:
            break
        prompt = tokenizer.encode(question, add_special_tokens=True)
        outputs = output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        if len(prompt) >= 4 and (output_len or outputs >= 4) and len(prompt) + outputs <= max_model_len:
            requests.append(BenchRequest(list(prompt), outputs))
    if not requests:
        raise ValueError(f"{path} has no conversation of 4 tokens or more that fits into {max_model_len}")
    return requests
