"""The host's part of sampling features, for a decode step in which every row has the feature."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxrunner import SamplingParams
from jaxrunner.executables import MASK_CAPACITY
from jaxrunner.grammar_masks import grammar_uploads
from jaxrunner.grammars import Grammars, GrammarStates
from jaxrunner.logprobs import SequenceLogprobs
from jaxrunner.logprobs_lists import LogprobsLists
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.request import Request
from models.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1},
        "address": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
TEXT = '{"name": "Ada Lovelace", "age": 36, "tags": ["red", "blue"], "address": {"city": "London"}}'
EOS = "<|end|>"
Lines = dict[str, Callable[[], Any]]
"""What is timed, by name; to be called in this order, again and again."""


def made_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level tokenizer of so many tokens: the bytes, an end, and random words of 2 to 8 letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rng, letters = np.random.default_rng(0), np.array(list('abcdefghijklmnopqrstuvwxyzĠ",:{}[]0123456789'))
    words = dict.fromkeys(alphabet)
    while len(words) < vocab_size - 1:
        words.setdefault("".join(rng.choice(letters, rng.integers(2, 9))))
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    return Tokenizer(backend, {"eos_token": EOS})


def lines(rows: int, vocab_size: int, num_logprobs: int, tokenizer: Tokenizer | None = None) -> Lines:
    """The lines for a step of ``rows`` requests, each somewhere else in its text."""
    tokenizer = tokenizer or made_tokenizer(vocab_size)
    return _grammar_lines(rows, max(vocab_size, tokenizer.vocab_size), tokenizer) | _logprobs_lines(
        rows, vocab_size, num_logprobs
    )


def _grammar_lines(rows: int, vocab_size: int, tokenizer: Tokenizer) -> Lines:
    eos = tokenizer.eos_token_ids
    states = GrammarStates(Grammars(tokenizer, vocab_size, eos))
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    params = SamplingParams(structured_outputs={"json": SCHEMA})
    places: dict[str, int] = {}

    def begin(req_id: str, place: int) -> None:
        states.remove(req_id)
        states.add(Request(req_id, [0], params, eos))
        states.accept(req_id, tokens[:place])
        places[req_id] = place

    for row in range(rows):
        begin(f"r{row}", row * len(tokens) // rows)
    plan = SchedulerOutput(num_scheduled_tokens=dict.fromkeys(places, 1), total_num_scheduled_tokens=rows)
    batch: Any = SimpleNamespace(requests={r: SimpleNamespace(request_index=i) for i, r in enumerate(places)})

    def masks() -> None:
        plan.grammar_bitmask = states.masks(plan)

    def accept() -> None:  # a text that is complete begins anew, as another request's would
        for req_id, place in places.items():
            if place == len(tokens):
                begin(req_id, 0)
            else:
                states.accept(req_id, tokens[place : place + 1])
                places[req_id] = place + 1

    return {
        "grammar: masks": masks,
        "grammar: masks cut into uploads": lambda: list(grammar_uploads(batch, plan, MASK_CAPACITY, 2**31 - 1)),
        "grammar: a token each taken in": accept,
    }


def _logprobs_lines(rows: int, vocab_size: int, num_logprobs: int) -> Lines:
    rng = np.random.default_rng(0)
    words = rng.integers(0, vocab_size, (rows, 3 + 2 * num_logprobs)).astype(np.int32)
    sequences = [SequenceLogprobs(SamplingParams(logprobs=num_logprobs), str) for _ in range(rows)]

    def keep() -> None:
        lists = LogprobsLists(words)
        for row, sequence in enumerate(sequences):
            sequence.append(lists, row)

    def read() -> None:
        for sequence in sequences:
            assert sequence.positions is not None
            sequence.positions[-1]  # noqa: B018

    return {"logprobs: kept": keep, "logprobs: read": read}
