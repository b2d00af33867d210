"""Log probabilities on the host: out of the device's words, and into what a user gets. Names are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Int32

from jaxrunner.sampling_params import SamplingParams

ALL = -1  # every token of the vocabulary


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's.

    Attributes:
        logprob: natural logarithm of its probability, by the logits as the model gave them: before bias, penalties,
            temperature and filters (vLLM's "raw_logprobs").
        rank: how many tokens are at least as likely, itself among them: 1 is the most likely.
        decoded_token: its text on its own; None without a tokenizer. U+FFFD for part of a character: tokens are told
            apart by their ids.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""By token id: first the token that was chosen (or stands in the prompt), then the most likely ones."""


@dataclass(frozen=True, slots=True)
class LogprobsLists:
    """Of n tokens, on the host.

    Attributes:
        logprob_token_ids: in each row the chosen token, then the most likely ones, the likeliest first.
        logprobs: of those.
        sampled_token_ranks: of the chosen token.
    """

    logprob_token_ids: Int32[np.ndarray, "n 1+top"]
    logprobs: Float32[np.ndarray, "n 1+top"]
    sampled_token_ranks: Int32[np.ndarray, "n"]

    def rows(self, start: int, stop: int) -> LogprobsLists:
        return LogprobsLists(
            self.logprob_token_ids[start:stop], self.logprobs[start:stop], self.sampled_token_ranks[start:stop]
        )


def check_logprobs(params: SamplingParams, max_logprobs: int, vocab_size: int) -> None:
    """Raises ValueError if more are wanted than a step gives.

    Args:
        max_logprobs: the runner's limit; ALL: the vocabulary.
    """
    limit = vocab_size if max_logprobs == ALL else max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and (vocab_size if wanted == ALL else wanted) > limit:
            raise ValueError(
                f"{name} is {wanted}, the limit is {limit}: ask for fewer, or raise max_logprobs (to -1 for the whole"
                f" vocabulary of {vocab_size})"
            )


def unpack_logprobs(words: Int32[np.ndarray, "n words"], tokens: Int32[np.ndarray, "n"]) -> LogprobsLists:
    """What ``jaxrunner.step.logprobs.packed_logprobs`` packed.

    Args:
        tokens: the chosen ones.
    """
    top = (words.shape[1] - 2) // 2
    ids, values = words[:, :top], np.ascontiguousarray(words[:, top : 2 * top + 1]).view(np.float32)
    return LogprobsLists(
        np.concatenate([tokens[:, None], ids], axis=1),
        np.concatenate([values[:, -1:], values[:, :-1]], axis=1),
        words[:, -1],
    )


class _Tokenizer(Protocol):
    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...


class TokenTexts:
    """The text of each token on its own, decoded once."""

    def __init__(self, tokenizer: _Tokenizer | None) -> None:
        self._decode: Callable[[int], str | None] = (
            (lambda _: None) if tokenizer is None else (lambda i: tokenizer.decode([i], skip_special_tokens=False))
        )
        self._known: dict[int, str | None] = {}

    def __call__(self, token_id: int) -> str | None:
        if token_id not in self._known:
            self._known[token_id] = self._decode(token_id)
        return self._known[token_id]


def position_logprobs(lists: LogprobsLists, top: int, text: Callable[[int], str | None]) -> list[PositionLogprobs]:
    """A dictionary for each token.

    Args:
        top: how many of the most likely ones are wanted; ALL: all there are.
        text: of a token.
    """
    width = lists.logprobs.shape[1] if top == ALL else top + 1
    rows: Iterable[tuple[list[int], list[float], int]] = zip(
        lists.logprob_token_ids[:, :width].tolist(),
        lists.logprobs[:, :width].tolist(),
        lists.sampled_token_ranks.tolist(),
        strict=True,
    )
    out = []
    for ids, values, rank in rows:
        found = {ids[0]: Logprob(values[0], rank, text(ids[0]))}
        for place in range(1, len(ids)):
            if ids[place] != ids[0]:
                found[ids[place]] = Logprob(values[place], place, text(ids[place]))
        out.append(found)
    return out


@dataclass(slots=True)
class SequenceLogprobs:
    """Those of one sequence while it grows.

    Attributes:
        top: how many of the most likely tokens are wanted; None: nothing is.
        positions: a dictionary for each token; None if nothing is wanted.
        cumulative: sum over the chosen tokens; None likewise.
    """

    top: int | None
    text: Callable[[int], str | None]
    positions: list[PositionLogprobs] | None = field(init=False)
    cumulative: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.positions, self.cumulative = (None, None) if self.top is None else ([], 0.0)

    def append(self, lists: LogprobsLists | None) -> list[PositionLogprobs] | None:
        """Takes in the tokens of a step, and returns their dictionaries."""
        if self.top is None or lists is None or self.positions is None or self.cumulative is None:
            return None
        new = position_logprobs(lists, self.top, self.text)
        self.positions += new
        self.cumulative += math.fsum(lists.logprobs[:, 0].tolist())
        return new
