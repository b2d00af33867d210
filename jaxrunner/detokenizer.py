"""Tokens to text, one token at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class TextDecoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, token_id: int) -> str | None: ...


class IncrementalDetokenizer:
    """The text of a growing sequence. ``stable + tail`` is always the decoded text of all tokens so far.

    A token's text depends on its neighbours: a character can be spread over tokens, and SentencePiece drops the space
    of the first token it is given. So not single tokens are decoded but a window: the last piece that is settled,
    then whatever came after it. What the second has more than the first is new.

    Attributes:
        stable: text that no later token can change.
        tail: text of the latest tokens that a later one may still change: an unfinished character (U+FFFD so far), or
            a run of byte tokens, which SentencePiece decodes as a whole.
    """

    def __init__(self, tokenizer: TextDecoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
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
        self._ids.append(token_id)
        self.tail = self._decode(self._window)[self._window_text :]
        # Without new text (a special token, say) nothing settles: the window must start with visible text, since
        # a space at its start is not to be trusted.
        if self.tail and not self.tail.endswith(_REPLACEMENT) and not self._is_byte(token_id):
            self._settle()

    def _settle(self) -> None:
        self.stable += self.tail
        self.tail = ""
        self._window, self._settled = self._settled, len(self._ids)
        self._window_text = len(self._decode(self._window))

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip_special_tokens)

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None
