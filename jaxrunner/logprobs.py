"""Log probabilities as a user gets them. They stay the words that came from the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
from jaxtyping import Float32, Int32

from jaxrunner.logprobs_lists import FIRST_WORDS, LogprobsLists
from jaxrunner.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's.

    Attributes:
        logprob: natural logarithm of its probability, by the logits as the model gave them: before bias, penalties,
            temperature and filters (vLLM's "raw_logprobs").
        rank: how many tokens are at least as likely, itself among them: 1 is the most likely. None for a token out of
            ``logprob_token_ids`` that was not chosen.
        decoded_token: its text on its own; None without a tokenizer. U+FFFD for part of a character: tokens are told
            apart by their ids.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""By token id: first the token that was chosen (or stands in the prompt), then the others that were wanted."""


class FlatLogprobs(Sequence[Any]):
    """A dictionary for each token (``PositionLogprobs``; None for a prompt's first), made when it is read.

    It reads like vLLM's list of dictionaries, and has the arrays of vLLM's class of the same name; a token that is
    among the most likely ones stands twice in them. Equal to any sequence of equal entries.

    Args:
        rows: of each token the words that ``LogprobsLists.row`` gives, or None. May grow at its end.
        text: of a token.
        ranked: behind the chosen token come the most likely ones, in order.
        start, stop: which of the rows it shows; stop=None: all that come.
    """

    __slots__ = ("_ranked", "_rows", "_start", "_stop", "_text")

    def __init__(
        self,
        rows: list[bytes | None],
        text: Callable[[int], str | None],
        ranked: bool = True,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self._rows, self._text, self._ranked, self._start, self._stop = rows, text, ranked, start, stop

    def part(self, start: int) -> FlatLogprobs:
        """From ``start`` to what is there now; shares the rows."""
        return FlatLogprobs(self._rows, self._text, self._ranked, self._start + start, self._start + len(self))

    @property
    def start_indices(self) -> Int32[np.ndarray, "n"]:
        """Where each token's entries begin in the arrays below."""
        return self.end_indices - self._counts()

    @property
    def end_indices(self) -> Int32[np.ndarray, "n"]:
        """Where they end."""
        return np.cumsum(self._counts(), dtype=np.int32)

    @property
    def token_ids(self) -> Int32[np.ndarray, "entries"]:
        return self._entries(slice(0, 1), slice(FIRST_WORDS, None, 2))

    @property
    def logprobs(self) -> Float32[np.ndarray, "entries"]:
        return self._entries(slice(1, 2), slice(FIRST_WORDS + 1, None, 2)).view(np.float32)

    @property
    def ranks(self) -> list[int | None]:
        ranks: list[int | None] = []
        for row in self._shown():
            if row is not None:
                others = (len(row) // 4 - FIRST_WORDS) // 2
                ranks.append(int.from_bytes(row[8:12], "little"))
                ranks += range(1, others + 1) if self._ranked else [None] * others
        return ranks

    @property
    def decoded_tokens(self) -> list[str | None]:
        return [self._text(token) for token in self.token_ids.tolist()]

    def __len__(self) -> int:
        return (len(self._rows) if self._stop is None else self._stop) - self._start

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs | None: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> PositionLogprobs | FlatLogprobs | None:
        if isinstance(index, slice):
            return FlatLogprobs(self._shown()[index], self._text, self._ranked)
        place = range(len(self))[index]  # IndexError, and places from the end, as of a list
        return self._position(self._rows[self._start + place])

    def __iter__(self) -> Iterator[PositionLogprobs | None]:
        return map(self._position, self._shown())

    def __add__(self, other: Sequence[Any]) -> Sequence[Any]:
        if isinstance(other, FlatLogprobs) and other._ranked == self._ranked:
            return FlatLogprobs(self._shown() + other._shown(), self._text, self._ranked)
        return [*self, *other]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:  # a copy takes the texts along, not the tokenizer
        texts = {token: self._text(token) for token in np.unique(self.token_ids).tolist()}
        return FlatLogprobs, (self._shown(), texts.get, self._ranked)

    def _shown(self) -> list[bytes | None]:
        return self._rows[self._start : self._stop]

    def _position(self, row: bytes | None) -> PositionLogprobs | None:
        if row is None:
            return None
        words, text = np.frombuffer(row, np.int32), self._text
        values = words.view(np.float32)
        chosen, rank = int(words[0]), int(words[2])
        found = {chosen: Logprob(float(values[1]), rank, text(chosen))}
        others = zip(words[FIRST_WORDS::2].tolist(), values[FIRST_WORDS + 1 :: 2].tolist(), strict=True)
        for place, (token, value) in enumerate(others, 1):
            if token != chosen:
                found[token] = Logprob(value, place if self._ranked else None, text(token))
        return found

    def _counts(self) -> Int32[np.ndarray, "n"]:
        return np.array([0 if r is None else (len(r) // 4 - FIRST_WORDS) // 2 + 1 for r in self._shown()], np.int32)

    def _entries(self, first: slice, others: slice) -> Int32[np.ndarray, "entries"]:
        rows = (np.frombuffer(row, np.int32) for row in self._shown() if row is not None)
        parts = [part for words in rows for part in (words[first], words[others])]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


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


def prompt_logprobs(lists: LogprobsLists, top: int, text: Callable[[int], str | None]) -> FlatLogprobs:
    """Those of a whole prompt: None for its first token, then a dictionary for each of ``lists``."""
    return FlatLogprobs([None, *(lists.row(row, top) for row in range(len(lists.words)))], text)


class SequenceLogprobs:
    """Those of one sequence while it grows.

    Attributes:
        positions: a dictionary for each token; None if nothing is wanted.
        cumulative: sum over the chosen tokens; None likewise.
    """

    __slots__ = ("_named", "_rows", "_top", "cumulative", "positions", "text")

    def __init__(self, params: SamplingParams, text: Callable[[int], str | None]) -> None:
        self.text = text
        self._top = params.logprobs or 0
        self._named = 0 if params.logprob_token_ids is None else len(params.logprob_token_ids)
        self._rows: list[bytes | None] = []
        self.positions: FlatLogprobs | None = None
        self.cumulative: float | None = None
        if params.wants_logprobs:
            self.positions, self.cumulative = FlatLogprobs(self._rows, text, ranked=not self._named), 0.0

    def append(self, lists: LogprobsLists, row: int) -> FlatLogprobs | None:
        """Takes in a row of a step, and returns what is new; None if nothing is wanted."""
        if self.positions is None or self.cumulative is None:
            return None
        rows = self._rows
        rows.append(lists.given_row(row, self._named) if self._named else lists.row(row, self._top))
        self.cumulative += lists.chosen[row]
        return FlatLogprobs(rows, self.text, not self._named, len(rows) - 1, len(rows))
