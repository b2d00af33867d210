"""How a request wants its tokens chosen and when it wants to stop. Fields and ranges are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from numbers import Real
from operator import index
from typing import Any, SupportsIndex

from jaxrunner.repetition import RepetitionDetectionParams
from jaxrunner.structured_outputs import StructuredOutputsParams

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4e38  # what the device can hold
MAX_SEQUENCES = 16384  # vLLM's bound for n
GREEDY_TEMPERATURE = 1e-5  # below this a temperature means greedy, as in vLLM


class RequestOutputKind(Enum):
    """What a caller is told of a request: after every step all there is or what is new, or only how it ended."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):  # NumPy's are Real
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def _integer(name: str, value: Any, low: int, high: int = _INT32_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or not low <= index(value) <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")
    return index(value)  # a NumPy integer becomes a plain one


def _token_ids(name: str, value: Any, unique: bool = True) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    ids = [_integer(f"{name}[{i}]", v, 0) for i, v in enumerate(value)]
    return tuple(dict.fromkeys(ids) if unique else ids)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    value = (value,) if isinstance(value, str) else value
    if not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{name} must be a string or a list of strings, got {value!r}")
    if "" in value:
        raise ValueError(f"{name} holds an empty string, which every text contains: leave it out")
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Immutable; checked when made.

    Attributes:
        n: sequences to generate for the prompt.
        temperature: 0 is greedy; logits are divided by it otherwise.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1]. 1 keeps all.
        top_k: keep the k most likely tokens. 0 or -1 keeps all.
        min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1].
        seed: makes the request's tokens a function of (seed, position). None or -1 derives one from the engine's seed.
        stop: texts that end the output when they appear.
        stop_token_ids: token ids that end the output.
        presence_penalty, frequency_penalty: taken off the logits of tokens of the output, once and for each time.
        repetition_penalty: divides positive logits of tokens of prompt and output, and multiplies negative ones.
        structured_outputs: what the output must look like; a mapping becomes a StructuredOutputsParams.
        logit_bias: added to the logits of these token ids, at most 100 either way.
        allowed_token_ids: no other tokens.
        bad_words: texts that the output must not contain, each without and with a space in front. (As in vLLM their
            tokens are what is forbidden: other tokens that spell the same text are not.)
        bad_words_token_ids: such words as token ids; None: ``LLM`` makes them of ``bad_words``.
        ignore_eos: go on past the model's end-of-sequence tokens.
        max_tokens: output tokens at most. None means up to the model's length.
        min_tokens: no end-of-sequence or stop token before this many output tokens.
        repetition_detection: ends an output that repeats itself; a mapping becomes a RepetitionDetectionParams.
        detokenize, skip_special_tokens, spaces_between_special_tokens, include_stop_str_in_output: of the text.
        output_kind: what streaming yields; ``LLM.generate`` gives the end only, whatever it says.

    Raises:
        ValueError: a value is of the wrong kind or out of range; the message names field, value and range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    extra_args: Mapping[str, Any] | None = None
    flat_logprobs: bool = False
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_start: int | None = None
    stream_interval: int | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Sequence[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | Mapping[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)  # frozen for users; normalised once, here

        for name, low, high in _RANGES:
            value = _number(name, getattr(self, name))
            if not low <= value <= high:
                raise ValueError(f"{name} must be from {low:g} to {high:g}, got {value:g}")
            put(name, value)
        if self.top_p == 0.0:
            raise ValueError("top_p must be greater than 0, got 0: for greedy decoding use temperature=0")
        if self.repetition_penalty == 0.0:
            raise ValueError("repetition_penalty must be greater than 0, got 0: 1 means no penalty")
        _integer("n", self.n, 1, MAX_SEQUENCES)
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n is {self.n} with temperature {self.temperature:g}: greedy sequences are all the same")
        put("top_k", max(_integer("top_k", self.top_k, -1), 0))
        if self.seed == -1:
            put("seed", None)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            if self.truncate_prompt_tokens == 0:
                raise ValueError("truncate_prompt_tokens must be -1 or at least 1, got 0: nothing would be left")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        put("stop", _strings("stop", () if self.stop is None else self.stop))
        put("bad_words", _strings("bad_words", () if self.bad_words is None else self.bad_words))
        put("stop_token_ids", _token_ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids))
        if self.bad_words_token_ids is not None:
            words = [_token_ids("bad_words_token_ids", word, unique=False) for word in self.bad_words_token_ids]
            if () in words:
                raise ValueError("bad_words_token_ids holds a word without tokens: leave it out")
            put("bad_words_token_ids", tuple(dict.fromkeys(words)))
        if self.logprob_token_ids is not None:
            named = _token_ids("logprob_token_ids", self.logprob_token_ids, unique=False)
            put("logprob_token_ids", named or None)
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is empty: no token could ever be sampled")
        if self.structured_outputs is not None:
            put("structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        if self.repetition_detection is not None:
            put("repetition_detection", RepetitionDetectionParams.of(self.repetition_detection))
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise ValueError(f"extra_args must be a mapping, got {self.extra_args!r:.100}")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r:.100}")
            bias = {}
            for key, value in self.logit_bias.items():
                token = int(key) if isinstance(key, str) and key.isdecimal() else key  # JSON's keys are strings
                bias[_integer("logit_bias key", token, 0)] = _number(f"logit_bias[{key}]", value)
            put("logit_bias", {k: min(max(v, -100.0), 100.0) for k, v in bias.items()})
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need the text: drop detokenize=False or use stop_token_ids")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_masked(self) -> bool:
        """Whether only certain tokens may be sampled."""
        return self.allowed_token_ids is not None or self.structured_outputs is not None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities of the output are wanted."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """SamplingParams from a mapping, as it stands in a request file; an unknown name is an error."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown sampling parameters {unknown}; known: {sorted(known)}")
        return cls(**values)


_RANGES = (
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, _FLOAT32_MAX),
    ("temperature", 0.0, _FLOAT32_MAX),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
)

_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "flat_logprobs",
)
