"""Grammars of structured outputs: compiled by llguidance, followed token by token, asked for what may come next."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from
from llguidance.numpy import fill_next_token_bitmask_par

from jaxrunner.protocol import GrammarOutput, SchedulerOutput
from jaxrunner.request import Request
from jaxrunner.request_tables import pack_allowed
from jaxrunner.structured_outputs import StructuredOutputsParams
from models.tokenizer import Tokenizer

# Where JSON allows whitespace: a space, or a line break with an indentation. Endless whitespace is valid JSON too, and
# models that like it would write nothing else.
_WHITESPACE = r"( |\r?\n[ \t]{0,8})"
_COMPILED = 64  # grammars that are kept


class Grammars:
    """Compiles grammars for one vocabulary.

    The library's own tables of the vocabulary are made when the first grammar comes; that takes a second or two.

    Args:
        vocab_size: of the logits.
        eos_token_ids: what may follow a complete text, and nothing else then.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, tuple(eos_token_ids)
        self._compiled = functools.lru_cache(_COMPILED)(self._compile)
        self.executor = functools.cache(LLExecutor)

    def check(self, params: StructuredOutputsParams) -> None:
        """Raises ValueError if the grammar can't be compiled, or nothing fits it."""
        self._compiled(params)

    def matcher(self, params: StructuredOutputsParams) -> LLMatcher:
        """A follower of one sequence, at its beginning."""
        return self._compiled(params).deep_copy()

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        if self._tokenizer is None:
            raise ValueError("structured_outputs need the model's tokenizer, and it has none")
        if not self._eos:
            raise ValueError("structured_outputs need an end-of-sequence token, and the model has none")
        try:
            grammar = _grammar(params)
            if not self._vocabulary.spells_ascii:
                grammar = _without_forcing(grammar)
        except ValueError as error:
            raise ValueError(f"structured_outputs can't be compiled: {error}") from None
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._ll_tokenizer)
        if failed:
            raise ValueError(f"structured_outputs can't be compiled: {' '.join(messages)}")
        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        if not _may_begin(matcher, self._vocab_size):
            raise ValueError("structured_outputs can't be met: no token can begin such a text")
        return matcher

    @functools.cached_property
    def _vocabulary(self) -> _Vocabulary:
        assert self._tokenizer is not None
        return _Vocabulary(self._tokenizer, self._vocab_size, self._eos)

    @functools.cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        return LLTokenizer(
            TokenizerWrapper(self._vocabulary),
            n_vocab=self._vocab_size,
            eos_token=list(self._eos),
        )


class GrammarStates:
    """Where each running sequence with a grammar stands in it."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._matchers: dict[str, tuple[Request, LLMatcher]] = {}

    def add(self, request: Request) -> None:
        """A sequence begins; nothing happens if it has no grammar."""
        params = request.sampling_params.structured_outputs
        if not isinstance(params, StructuredOutputsParams):
            return
        if self._grammars is None:
            raise ValueError(f"request {request.request_id!r} has structured_outputs, and this engine has no tokenizer")
        self._matchers[request.request_id] = request, self._grammars.matcher(params)

    def remove(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)

    def clear(self) -> None:
        self._matchers.clear()

    def masks(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """What may come next in each sequence that samples a token in this step; None if none has a grammar."""
        if not self._matchers or self._grammars is None:
            return None
        scheduled = plan.num_scheduled_tokens
        ids = [
            request_id
            for request_id, (request, _) in self._matchers.items()
            if request.num_computed_tokens + scheduled.get(request_id, 0) >= request.num_tokens
            and request_id in scheduled
        ]
        if not ids:
            return None
        size, eos = self._grammars._vocab_size, self._grammars._eos
        mask = np.zeros((len(ids), -(-size // 32)), np.int32)
        going_on = [(self._matchers[i][1], row) for row, i in enumerate(ids) if not self._matchers[i][1].is_stopped()]
        if going_on:
            fill_next_token_bitmask_par(self._grammars.executor(), going_on, mask)
        for row, request_id in enumerate(ids):
            request, matcher = self._matchers[request_id]
            if (allowed := request.sampling_params.allowed_token_ids) is not None:
                mask[row] &= pack_allowed(allowed, size)
            # A finished text can only end. So can one that nothing may follow; where its grammar doesn't let it end
            # either, ``accept`` says so of this request, and all others go on.
            if matcher.is_stopped() or not mask[row].any():
                mask[row] = pack_allowed(eos, size)
        return GrammarOutput(ids, mask)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> str | None:
        """Takes in what was sampled.

        Returns:
            What is wrong if the sequence can't go on: no token that its grammar allows could be sampled, or the
            library has reached one of its limits.
        """
        found = self._matchers.get(request_id)
        if found is None:
            return None
        matcher = found[1]
        for token in token_ids:
            if not matcher.is_stopped():
                matcher.consume_token(token)
        if not matcher.is_error():
            return None
        reason = matcher.get_error().partition("\n")[0]  # behind it comes the library's whole state
        return (
            f"its structured output can't go on: {reason} (do other parameters, allowed_token_ids or bad_words, rule"
            " out all that would fit?)"
        )


class _Vocabulary:
    """A tokenizer as llguidance wants to see one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos[0], tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_token_ids if i < vocab_size)
        self._special = special = {*self.special_token_ids, *eos}
        self._ids = {text: i for i, text in reversed([*enumerate(self.tokens)]) if text and i not in special}
        self._longest = max(map(len, self._ids), default=0)
        self.spells_ascii = all(bytes([byte]) in self._ids for byte in range(0x20, 0x7F))

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell this text exactly, wherever it stands in another. What a tokenizer makes of it at the
        beginning may not: SentencePiece puts a space in front, some have an "unknown" token, and all take the name
        of a special token for that token.
        """
        ids, wanted = self._tokenizer.encode(text, add_special_tokens=False), text.encode()
        plain = all(i < len(self.tokens) and i not in self._special for i in ids)
        if plain and b"".join(self.tokens[i] for i in ids) == wanted:
            return ids
        return self._longest_first(wanted)

    def _longest_first(self, text: bytes) -> list[int]:
        """Always the longest token that fits; up to the first byte that none begins with."""
        ids, at = [], 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[text[at:end]])
            at = end
        return ids


def _grammar(params: StructuredOutputsParams) -> str:
    """The grammar in the library's own form."""
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return grammar_from("choice", json.dumps(list(params.choice)))
    if params.grammar is not None:
        return grammar_from("grammar", params.grammar)
    schema: str | Mapping[str, Any] = {"type": "object"} if params.json is None else params.json
    whitespace = params.whitespace_pattern or _WHITESPACE
    options = {"whitespace_flexible": False} if params.disable_any_whitespace else {"whitespace_pattern": whitespace}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]


def _without_forcing(grammar: str) -> str:
    """The same, but where only one text may follow its tokens are looked for like all others. (The library would take
    those of the tokenizer, and there are none where a vocabulary has whole words alone.)
    """
    if grammar.startswith("{"):
        (inner,) = json.loads(grammar)["grammars"]
        schema = inner.get("json_schema")
        grammar = inner["lark_grammar"] if schema is None else f"start: %json {json.dumps(schema)}"
    return grammar if "%llguidance" in grammar else f'%llguidance {{"no_forcing": true}}\n{grammar}'


def _may_begin(matcher: LLMatcher, vocab_size: int) -> bool:
    mask: Int32[np.ndarray, "1 words"] = np.zeros((1, -(-vocab_size // 32)), np.int32)
    start = matcher.deep_copy()
    fill_next_token_bitmask_par(LLExecutor(), [(start, 0)], mask)
    return bool(mask.any()) and not start.is_error()
