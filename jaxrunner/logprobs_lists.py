"""A step's log probabilities on the host, as the device packed them. Nothing is done a row until somebody reads it."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int32

from jaxrunner.request_tables import MAX_LOGPROB_TOKEN_IDS
from jaxrunner.sampling_params import SamplingParams

ALL = -1  # every token of the vocabulary
_WORD = 4  # bytes
_COPIED = 1 << 20  # bytes: cutting rows out of bytes is faster, but for large arrays the copy costs more
FIRST_WORDS = 3  # of a row: the chosen token, its log probability, its rank


class LogprobsLists:
    """Of n tokens. The arrays are vLLM's.

    Args:
        words: ``jaxrunner.step.logprobs.packed_logprobs``: the chosen token, its log probability, its rank; then the
            most likely tokens, the likeliest first, each with its log probability.
        given: the tokens that requests named (``logprob_token_ids``), each with its log probability; None: none did.
    """

    __slots__ = ("_chosen", "_given", "_stride", "_words", "given", "words")

    def __init__(self, words: Int32[np.ndarray, "n 3+2*top"], given: Int32[np.ndarray, "n 2*m"] | None = None) -> None:
        self.words, self.given = words, given
        self._words, self._stride = _bytes_of(words), _WORD * words.shape[1]
        self._given = None if given is None else _bytes_of(given)
        self._chosen: list[float] | None = None

    @property
    def logprob_token_ids(self) -> Int32[np.ndarray, "n 1+top"]:
        """In each row the chosen token, then the most likely ones."""
        return np.concatenate([self.words[:, :1], self.words[:, FIRST_WORDS::2]], axis=1)

    @property
    def logprobs(self) -> Float32[np.ndarray, "n 1+top"]:
        """Of ``logprob_token_ids``."""
        return np.concatenate([self.words[:, 1:2], self.words[:, FIRST_WORDS + 1 :: 2]], axis=1).view(np.float32)

    @property
    def sampled_token_ranks(self) -> Int32[np.ndarray, "n"]:
        """Of the chosen token: 1 is the most likely."""
        return self.words[:, 2]

    @property
    def chosen(self) -> list[float]:
        """The chosen tokens' log probabilities."""
        if self._chosen is None:
            self._chosen = self.words[:, 1].view(np.float32).tolist()
        return self._chosen

    def row(self, row: int, top: int) -> bytes:
        """The words of one row, with its ``top`` most likely tokens (ALL: as many as there are)."""
        start = row * self._stride
        size = self._stride if top == ALL else min(_WORD * (FIRST_WORDS + 2 * top), self._stride)
        return bytes(self._words[start : start + size])

    def given_row(self, row: int, count: int) -> bytes:
        """The words of one row, with the ``count`` tokens that its request named."""
        if self._given is None or self.given is None:
            raise ValueError(f"row {row} has no log probabilities of given tokens: no request of the step named any")
        start = row * self.given.shape[1] * _WORD
        return self.row(row, 0) + bytes(self._given[start : start + 2 * count * _WORD])


def _bytes_of(words: Int32[np.ndarray, "n w"]) -> bytes | memoryview:
    if words.nbytes <= _COPIED:
        return words.tobytes()
    return memoryview(np.ascontiguousarray(words).reshape(-1).view(np.uint8))


def check_logprobs(params: SamplingParams, max_logprobs: int, vocab_size: int) -> None:
    """Raises ValueError if more are wanted than a step gives.

    Args:
        max_logprobs: the runner's limit; ALL: the vocabulary.
    """
    limit = vocab_size if max_logprobs == ALL else max_logprobs
    ids = params.logprob_token_ids
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if name == "logprobs" and ids is not None:
            wanted = None  # says the same once more; see below
        if wanted is not None and (vocab_size if wanted == ALL else wanted) > limit:
            raise ValueError(
                f"{name} is {wanted}, the limit is {limit}: ask for fewer, or raise max_logprobs (to -1 for the whole"
                f" vocabulary of {vocab_size})"
            )
    if ids is None:
        return
    if len(ids) > MAX_LOGPROB_TOKEN_IDS:
        raise ValueError(
            f"logprob_token_ids has {len(ids)} entries, {MAX_LOGPROB_TOKEN_IDS} at most fit: name fewer tokens, or"
            " take logprobs=-1"
        )
    if max(ids) >= vocab_size:
        raise ValueError(
            f"logprob_token_ids holds {max(ids)}, which is outside the vocabulary: ids are from 0 to {vocab_size - 1}"
        )
    if params.logprobs not in (None, len(ids)):
        raise ValueError(
            f"logprobs is {params.logprobs} and logprob_token_ids names {len(ids)} tokens: these take the place of the"
            " most likely ones, so leave logprobs away"
        )
