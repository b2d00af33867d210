"""What a request brings along in variable number, as numbers: declared once for host and device.

The host packs a request's tables into one array of int32 words when it enters (``pack``); the device unpacks them
(``jaxrunner.step.tables``). Requests that use none of it upload none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import numpy as np
from jaxtyping import Int32

from jaxrunner.sampling_params import SamplingParams

MAX_LOGIT_BIAS = 1024  # entries of one request's logit_bias
MAX_BAD_WORDS = 128  # sequences of token ids; a word is one or two, without and with a space in front
MAX_BAD_WORD_TOKENS = 16  # of one sequence
MAX_LOGPROB_TOKEN_IDS = 128  # of one request; vLLM's bound


@dataclass(frozen=True)
class TableSizes:
    """Sizes of the device's tables; ``bytes`` says what they cost.

    Attributes:
        max_num_reqs: request indices; one scratch entry is added.
        max_model_len: tokens of a request.
        vocab_size: of the logits.
    """

    max_num_reqs: int
    max_model_len: int
    vocab_size: int

    @cached_property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Shape of one request's part of each table, in the order of the packed words."""
        return {
            "history": (self.max_model_len + 1,),
            "allowed": (-(-self.vocab_size // 32),),
            "bias_ids": (MAX_LOGIT_BIAS,),
            "bias_values": (MAX_LOGIT_BIAS,),
            "bad_words": (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
            "logprob_ids": (MAX_LOGPROB_TOKEN_IDS,),
        }

    @cached_property
    def words(self) -> int:
        """int32 words of one request."""
        return sum(int(np.prod(shape)) for shape in self.fields.values())

    @property
    def bytes(self) -> int:
        """Bytes on the device, over all requests."""
        return 4 * self.words * (self.max_num_reqs + 1)


def check_tables(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for a table that doesn't fit, or a token id outside the vocabulary."""

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    def check_ids(name: str, ids: Sequence[int]) -> None:
        if ids and max(ids) >= vocab_size:
            refuse(f"{name} holds {max(ids)}, which is outside the vocabulary: ids are from 0 to {vocab_size - 1}")

    bias = params.logit_bias or {}
    if len(bias) > MAX_LOGIT_BIAS:
        refuse(f"logit_bias has {len(bias)} entries, {MAX_LOGIT_BIAS} at most fit: name fewer tokens")
    check_ids("logit_bias", list(bias))
    check_ids("allowed_token_ids", params.allowed_token_ids or ())
    words = params.bad_words_token_ids or ()
    if params.bad_words and params.bad_words_token_ids is None:
        refuse("bad_words are texts, and only token ids can be forbidden here: give bad_words_token_ids")
    if len(words) > MAX_BAD_WORDS:
        refuse(
            f"bad_words are {len(words)} sequences of tokens (each word without and with a space in front),"
            f" {MAX_BAD_WORDS} at most fit: name fewer words"
        )
    for word in words:
        if len(word) > MAX_BAD_WORD_TOKENS:
            refuse(f"a bad word has {len(word)} tokens, {MAX_BAD_WORD_TOKENS} at most fit: shorten it")
        check_ids("bad_words_token_ids", word)


def pack(
    sizes: TableSizes, params: SamplingParams, token_ids: Int32[np.ndarray, "n"], num_prompt_tokens: int
) -> Int32[np.ndarray, "words"]:
    """A request's tables as words, in the order of ``TableSizes.fields``.

    Args:
        params: has passed ``check_tables``.
        token_ids: the request's tokens so far, prompt and outputs.
    """
    words = np.zeros(sizes.words, np.int32)
    views, at = {}, 0
    for name, shape in sizes.fields.items():
        size = int(np.prod(shape))
        views[name] = words[at : at + size].reshape(shape)
        at += size
    views["history"][: len(token_ids)] = token_ids
    views["history"][:num_prompt_tokens] = first_occurrences(token_ids[:num_prompt_tokens])
    views["allowed"][:] = pack_allowed(params.allowed_token_ids, sizes.vocab_size)
    bias = params.logit_bias or {}
    views["bias_ids"][: len(bias)] = list(bias)
    views["bias_values"].view(np.float32)[: len(bias)] = list(bias.values())
    views["bad_words"][:] = -1
    for i, word in enumerate(params.bad_words_token_ids or ()):
        views["bad_words"][i, -len(word) :] = word
    named = params.logprob_token_ids or ()
    views["logprob_ids"][: len(named)] = named
    return words


def first_occurrences(token_ids: Int32[np.ndarray, "n"]) -> Int32[np.ndarray, "n"]:
    """-1 in place of every token that stands further in front already: each is then counted once."""
    found = np.full(len(token_ids), -1, np.int32)
    tokens, first = np.unique(token_ids, return_index=True)
    found[first] = tokens
    return found


def pack_allowed(ids: Sequence[int] | None, vocab_size: int) -> Int32[np.ndarray, "V/32"]:
    """Bit b of word w speaks for token 32 w + b; None allows all."""
    num_words = -(-vocab_size // 32)
    if ids is None:
        return np.full(num_words, -1, np.int32)
    bits = np.zeros(32 * num_words, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")
