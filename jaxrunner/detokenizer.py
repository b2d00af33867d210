"""Tokens to text, one token at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_HELD = 4  # tokens: with a byte or more each, no character of UTF-8 is longer
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class TextDecoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...


class IncrementalDetokenizer:
    """The text of a growing sequence. ``stable + tail`` is always the decoded text of all tokens so far.

    A token's text depends on its neighbours: a character can be spread over tokens, and SentencePiece drops the space
    of the first token it is given. So not single tokens are decoded but a window: the last piece that is settled,
    then whatever came after it. What the second has more than the first is new. The window stays short, so that a
    token costs the same however many came before: tokens that no text shows are left out of it, and of an endless
    run of bytes that make no characters all but the last few are settled. (A run of SentencePiece's byte tokens is the
    exception, since its last byte can change the text of its first.)

    Attributes:
        stable: text that no later token can change.
        tail: text of the latest tokens that a later one may still change: an unfinished character (U+FFFD so far), or
            a run of byte tokens, which SentencePiece decodes as a whole.
    """

    def __init__(self, tokenizer: TextDecoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []  # without those that no text shows
        self._settled = 0  # tokens whose text is stable
        self._window = 0  # where decoding starts: before the last piece that became stable
        self._window_text = 0  # characters of the window that are stable
        self.stable = ""
        self.tail = ""

    @property
    def text(self) -> str:
        """The text of all tokens so far."""
        return self.stable + self.tail

    def append(self, token_id: int) -> None:
        """Takes one more token."""
        if self._is_hidden(token_id):
            return
        self._ids.append(token_id)
        self.tail = self._decode(self._window)[self._window_text :]
        # Without new text nothing settles: the window must start with visible text, since a space at its start is not
        # to be trusted.
        if self.tail and not self.tail.endswith(_REPLACEMENT) and not self._is_byte(token_id):
            self._settle(len(self._ids), self.tail)
        elif len(self._ids) - self._settled >= 2 * _HELD:
            self._settle_all_but_the_last()

    def _settle(self, end: int, text: str) -> None:
        """Tokens before `end`, whose text goes on with `text`, are settled."""
        self.stable += text
        self.tail = self.tail[len(text) :]
        self._window, self._settled = self._settled, end
        self._window_text = len(self._decode(self._window, end))

    def _settle_all_but_the_last(self) -> None:
        if any(map(self._is_byte, self._ids[self._settled :])):
            return
        # The latest place that cuts no character in two: there the text so far is the beginning of all of it.
        last = len(self._ids) - _HELD
        for end in range(last, last - _HELD, -1):
            text = self._decode(self._window, end)[self._window_text :]
            if text and self.tail.startswith(text):
                self._settle(end, text)
                return

    def _decode(self, start: int, end: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip_special_tokens)

    def _is_hidden(self, token_id: int) -> bool:
        """Whether texts look as if this token weren't there: outside the vocabulary, or a special one to be skipped."""
        if self._skip_special_tokens and token_id in self._tokenizer.special_token_ids:
            return True
        return self._tokenizer.id_to_token(token_id) is None

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None
