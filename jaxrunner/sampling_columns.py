"""Sampling parameters as numbers: what the device keeps of each request, by request index, declared once.

The host fills a record when a request enters (``sampling_record``); the device unpacks the same record into arrays
(``jaxrunner.step.state``). Words are int32; floats travel as their bits.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from jaxrunner.sampling_params import SamplingParams

MAX_STOP_TOKEN_IDS = 32  # that min_tokens can hold back for one request

# Bits of StepLayout's ``flags``: a feature no row uses costs nothing, its branch is not taken.
RANDOM = 1  # some row is not greedy
FILTERED = 2  # some row has top_k, top_p or min_p
HELD_BACK = 4  # some row is below its min_tokens


@dataclass(frozen=True, slots=True)
class SamplingColumn:
    """One column: its name, whether it is a float, its width in words, and the value of an empty entry."""

    name: str
    is_float: bool
    width: int
    fill: float


SAMPLING_COLUMNS = (
    SamplingColumn("temperature", True, 1, 0.0),  # 0: greedy
    SamplingColumn("top_p", True, 1, 1.0),
    SamplingColumn("min_p", True, 1, 0.0),
    SamplingColumn("top_k", False, 1, 0),  # 0: all
    SamplingColumn("seed", False, 2, 0),  # low and high word of 64 bits
    SamplingColumn("min_length", False, 1, 0),  # tokens (prompt included) before which nothing may stop
    SamplingColumn("stop_token_ids", False, MAX_STOP_TOKEN_IDS, -1),  # held back until then
)
RECORD_WORDS = sum(c.width for c in SAMPLING_COLUMNS)

_PACK = struct.Struct(f"<fffiIIi{MAX_STOP_TOKEN_IDS}i")


def derived_seed(engine_seed: int, req_id: str) -> int:
    """The seed of a request that names none: 64 bits from the engine's seed and the request's id."""
    return int.from_bytes(hashlib.blake2b(f"{engine_seed}:{req_id}".encode(), digest_size=8).digest(), "little")


def sampling_record(
    params: SamplingParams, req_id: str, num_prompt_tokens: int, stop_token_ids: tuple[int, ...], engine_seed: int
) -> bytes:
    """``RECORD_WORDS`` int32 words of one request, in the order of ``SAMPLING_COLUMNS``.

    Args:
        stop_token_ids: every token that min_tokens holds back: the model's EOS ids and the request's own.

    Raises:
        ValueError: min_tokens with more stop tokens than the device keeps.
    """
    held = stop_token_ids if params.min_tokens else ()
    if len(held) > MAX_STOP_TOKEN_IDS:
        raise ValueError(
            f"request {req_id!r}: min_tokens holds back at most {MAX_STOP_TOKEN_IDS} stop token ids, got {len(held)}"
        )
    seed = derived_seed(engine_seed, req_id) if params.seed is None else params.seed % 2**64
    return _PACK.pack(
        0.0 if params.is_greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        seed & 0xFFFFFFFF,
        seed >> 32,
        num_prompt_tokens + params.min_tokens if params.min_tokens else 0,
        *held,
        *(-1,) * (MAX_STOP_TOKEN_IDS - len(held)),
    )


def sampling_flags(params: SamplingParams) -> int:
    """The feature bits one request sets for its batch."""
    if params.is_greedy:
        return 0
    filtered = params.top_p < 1.0 or params.min_p > 0.0 or params.top_k > 0
    return RANDOM | (FILTERED if filtered else 0)
