"""Text to token ids and back, and conversations to text: one class for every checkpoint format."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from models.chat_template import ChatTemplate
from models.errors import TemplateError, TokenizerError


class Tokenizer:
    """A tokenizer with its special tokens and chat templates.

    Args:
        backend: the `tokenizers` object that does the work; also at hand as `.backend`, for incremental decoding.
        special_tokens: texts by role: "bos_token", "eos_token", "pad_token", "unk_token".
        extra_eos_token_ids: further ids that end a text, beside the eos_token's.
        templates: chat templates by name; "default" is the usual one, "tool_use" serves calls with tools.
        source: where it came from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        extra_eos_token_ids: Sequence[int] = (),
        templates: Mapping[str, str] | None = None,
        source: str = "this tokenizer",
    ):
        self.backend, self.source = backend, source
        self.special_tokens = dict(special_tokens)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.pad_token_id = self._special_id("pad_token")
        eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos, *extra_eos_token_ids)))
        self._templates = {
            name: ChatTemplate(text, f"the chat template of {source}") for name, text in (templates or {}).items()
        }

    @property
    def vocab_size(self) -> int:
        """How many tokens it knows, added ones included. A model's logits can be wider, they are often padded."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template, None if the model has none."""
        template = self._templates.get("default")
        return template.source if template else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in it, such as <|im_end|>, become their ids.

        Args:
            add_special_tokens: add BOS or EOS if this model's tokenizer does. Off for text that a chat template
                made: templates write their own BOS.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # what the library makes of anything that it can't read as UTF-8
            if not isinstance(text, str):
                raise TokenizerError(f"the text must be a str, got a {type(text).__name__}") from None
            place = next((n for n, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
            raise TokenizerError(f"the text isn't valid Unicode: half a surrogate pair at position {place}") from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Bytes that aren't (yet) a whole character become U+FFFD; unknown ids nothing.

        Spaces depend on neighbours in SentencePiece vocabularies: decode sequences, don't join single tokens.
        """
        ids = [int(index) for index in token_ids]
        if ids and not 0 <= min(ids) <= max(ids) < 2**32:
            raise TokenizerError(f"token ids must lie in [0, 2**32), got {min(ids)} to {max(ids)}")
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: part of a character for some, b"" for an id without a token."""
        token = self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._decoder_kind == "byte_level" and token_id not in self._added:
            return bytes(_BYTE_OF[char] for char in token if char in _BYTE_OF)
        if self._decoder_kind == "sentencepiece" and token_id not in self.special_token_ids:
            if re.fullmatch("<0x[0-9A-F]{2}>", token):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()
        return token.encode()

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its exact name in the vocabulary, None if there's none."""
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The name of a token in the vocabulary (not its text: see token_bytes), None if there's none."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out unless told otherwise."""
        return frozenset(index for index, token in self._added.items() if token.special)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as prompt text, to be encoded with add_special_tokens=False (`encode_chat` does both).

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            add_generation_prompt: end with the words that open the assistant's turn.
            tools: JSON schemas of functions that the model may call.
            chat_template: a Jinja template to use instead of the model's, or the name of one of the model's.
            variables: further names that the template reads.

        Raises:
            TemplateError: there's no template, or it refused or failed; its own message is quoted.
        """
        template = self._pick_template(chat_template, tools is not None)
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **(self.special_tokens | variables)
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation: `apply_chat_template` (it takes the options), then `encode`; one BOS at most."""
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)

    def _pick_template(self, chosen: str | None, with_tools: bool) -> ChatTemplate:
        if chosen is not None:
            named = self._templates.get(chosen) if isinstance(chosen, str) else None
            return named or ChatTemplate(chosen, "the chat_template that was passed")
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise TemplateError(
            f"{self.source} has no chat template (a base model, perhaps): generate from plain text, or pass "
            "chat_template="
        )

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return self.backend.get_added_tokens_decoder()

    @cached_property
    def _decoder_kind(self) -> str:
        if self.backend.decoder is None:
            return "plain"
        state = json.loads(self.backend.decoder.__getstate__())
        kinds = {state["type"], *(part["type"] for part in state.get("decoders", ()))}
        return "byte_level" if "ByteLevel" in kinds else "sentencepiece" if "ByteFallback" in kinds else "plain"


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself where it's printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()
