"""Sampling parameters as numbers: what the device keeps of each request, by request index, declared once.

The host fills a record when a request enters (``sampling_record``); the device unpacks the same record into arrays
(``jaxrunner.step.state``). Words are 32 bits; floats travel as their bits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from jaxrunner.sampling_params import SamplingParams

MAX_STOP_TOKEN_IDS = 32  # that min_tokens can hold back for one request

# Bits of StepLayout's ``flags``: a feature no row uses costs nothing, its branch is not taken.
RANDOM = 1  # some row is not greedy
FILTERED = 2  # some row has top_k, top_p or min_p
HELD_BACK = 4  # some row is below its min_tokens
PENALTIES = 8  # some row has a repetition, frequency or presence penalty
BIAS = 16  # some row has a logit_bias
BAD_WORDS = 32  # some row has bad words
MASKED = 64  # some row may sample certain tokens only: allowed_token_ids, structured output
LOGPROBS = 128  # some row wants log probabilities
LOGPROB_IDS = 256  # some row wants those of tokens that it names
FIRST_CUSTOM = 512  # some row uses the first logits processor; the next bits are the next ones'

NEEDS_HISTORY = PENALTIES | BAD_WORDS
NEEDS_TABLES = NEEDS_HISTORY | BIAS | MASKED | LOGPROB_IDS

# In place of a token where every one is ruled out: no vocabulary reaches it.
NO_TOKEN = 2**30

_INT32_MAX = 2**31 - 1
# A smaller top_p says the same, the likeliest token alone, but its product with a sum could vanish in float32.
_LEAST_TOP_P = 1e-30


@dataclass(frozen=True, slots=True)
class SamplingColumn:
    """One column: its name, struct's letter for a word of it, how many words, and the value of an empty entry."""

    name: str
    word: str
    width: int
    fill: float

    @property
    def is_float(self) -> bool:
        return self.word == "f"


SAMPLING_COLUMNS = (
    SamplingColumn("temperature", "f", 1, 0.0),  # 0: greedy
    SamplingColumn("top_p", "f", 1, 1.0),
    SamplingColumn("min_p", "f", 1, 0.0),
    SamplingColumn("top_k", "i", 1, 0),  # 0: all
    SamplingColumn("seed", "I", 2, 0),  # low and high word of 64 bits
    SamplingColumn("min_length", "i", 1, 0),  # tokens (prompt included) before which nothing may stop; 0: none
    SamplingColumn("stop_token_ids", "i", MAX_STOP_TOKEN_IDS, -1),  # held back until then
    SamplingColumn("repetition_penalty", "f", 1, 1.0),
    SamplingColumn("frequency_penalty", "f", 1, 0.0),
    SamplingColumn("presence_penalty", "f", 1, 0.0),
    SamplingColumn("num_prompt", "i", 1, 0),  # tokens in front of the output
    SamplingColumn("num_bias", "i", 1, 0),  # entries of the request's tables that count
    SamplingColumn("num_bad_words", "i", 1, 0),
    SamplingColumn("masked", "i", 1, 0),  # 1: only allowed tokens
)
RECORD_WORDS = sum(c.width for c in SAMPLING_COLUMNS)
_PACK = struct.Struct("<" + "".join(f"{c.width}{c.word}" for c in SAMPLING_COLUMNS))


def column_offset(name: str) -> int:
    """The first word of a column in a record."""
    at = 0
    for column in SAMPLING_COLUMNS:
        if column.name == name:
            return at
        at += column.width
    raise KeyError(name)


def derived_seed(engine_seed: int, req_id: str) -> int:
    """The seed of a request that names none: 64 bits from the engine's seed and the request's id."""
    return int.from_bytes(_seed_words(_seed_hash(engine_seed), req_id), "little")


def _seed_hash(engine_seed: int) -> Any:
    """What all seeds that derive from this one begin with."""
    return hashlib.blake2b(f"{engine_seed}:".encode(), digest_size=8)


def _seed_words(hashed: Any, req_id: str) -> bytes:
    own = hashed.copy()
    own.update(req_id.encode("utf-8", "surrogatepass"))
    return own.digest()


def sampling_record(
    params: SamplingParams, req_id: str, num_prompt_tokens: int, eos_token_ids: Sequence[int], engine_seed: int
) -> bytes:
    """``RECORD_WORDS`` words of one request, in the order of ``SAMPLING_COLUMNS``.

    Args:
        eos_token_ids: the model's. min_tokens holds them back together with the request's own stop_token_ids, whether
            or not the request ignores them.

    Raises:
        ValueError: min_tokens with more stop tokens than the device keeps.
    """
    held: tuple[int, ...] = ()
    if params.min_tokens:
        held = tuple(dict.fromkeys((*(params.stop_token_ids or ()), *eos_token_ids)))
    if len(held) > MAX_STOP_TOKEN_IDS:
        raise ValueError(
            f"min_tokens holds back at most {MAX_STOP_TOKEN_IDS} stop token ids, got {len(held)}:"
            " name fewer stop_token_ids or drop min_tokens"
        )
    seed = derived_seed(engine_seed, req_id) if params.seed is None else params.seed % 2**64
    return _PACK.pack(
        0.0 if params.is_greedy else params.temperature,
        max(params.top_p, _LEAST_TOP_P),
        params.min_p,
        params.top_k,
        seed & 0xFFFFFFFF,
        seed >> 32,
        min(num_prompt_tokens + params.min_tokens, _INT32_MAX) if params.min_tokens else 0,
        *held,
        *(-1,) * (MAX_STOP_TOKEN_IDS - len(held)),
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        num_prompt_tokens,
        len(params.logit_bias or ()),
        len(params.bad_words_token_ids or ()),
        int(params.is_masked),
    )


def sampling_flags(params: SamplingParams) -> int:
    """The feature bits one request sets for its batch. (HELD_BACK is set step by step.)"""
    filtered = params.top_p < 1.0 or params.min_p > 0.0 or params.top_k > 0
    features = {
        RANDOM: not params.is_greedy,
        FILTERED: filtered and not params.is_greedy,
        PENALTIES: params.has_penalties,
        BIAS: bool(params.logit_bias),
        BAD_WORDS: bool(params.bad_words_token_ids),
        MASKED: params.is_masked,
        LOGPROBS: params.wants_logprobs,
        LOGPROB_IDS: params.logprob_token_ids is not None,
    }
    return sum(flag for flag, used in features.items() if used)


class RecordWriter:
    """Makes records and feature bits of many requests, faster than ``sampling_record``, which says what they are.

    Of parameters that were seen before, the record is kept in pieces, between those words that are the request's own:
    its seed and the length of its prompt.

    Args:
        record_of: (id, parameters, prompt tokens) to a record.
    """

    _MOST_KEPT = 1024

    def __init__(self, record_of: Callable[[str, SamplingParams, int], bytes], engine_seed: int) -> None:
        self._record_of, self._seed_hash = record_of, _seed_hash(engine_seed)
        self._kept: dict[tuple[Any, ...], tuple[bytes, bytes, bytes, int]] = {}
        self._last: tuple[Any, ...] = ()  # of the keys; requests come in groups, and comparing is faster than hashing
        self._last_kept: tuple[bytes, bytes, bytes, int] | None = None

    def write(self, req_id: str, params: SamplingParams, num_prompt_tokens: int) -> tuple[bytes, int]:
        """A request's record and its feature bits. ValueError as ``record_of``."""
        key = _ALL_FIELDS(params)
        try:
            if key != self._last or self._last_kept is None:
                self._last, self._last_kept = key, self._kept.get(key)
            kept = self._last_kept
        except TypeError:  # a dictionary among the parameters: nothing to look up by
            return self._record_of(req_id, params, num_prompt_tokens), sampling_flags(params)
        if kept is None:
            record, flags = self._record_of(req_id, params, num_prompt_tokens), sampling_flags(params)
            if not params.min_tokens:  # else more of the record depends on the prompt's length
                if len(self._kept) >= self._MOST_KEPT:
                    self._kept.clear()
                before, between, behind = record[:_SEED_AT], record[_SEED_AT + 8 : _PROMPT_AT], record[_PROMPT_AT + 4 :]
                self._kept[key] = before, between, behind, flags
            return record, flags
        before, between, behind, flags = kept
        if params.seed is None:
            seed = _seed_words(self._seed_hash, req_id)
        else:
            seed = (params.seed % 2**64).to_bytes(8, "little")
        return b"".join((before, seed, between, num_prompt_tokens.to_bytes(4, "little"), behind)), flags


_ALL_FIELDS: Callable[[SamplingParams], tuple[Any, ...]] = attrgetter(*(f.name for f in fields(SamplingParams)))
_SEED_AT, _PROMPT_AT = 4 * column_offset("seed"), 4 * column_offset("num_prompt")
