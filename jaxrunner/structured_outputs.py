"""What an output must look like: a JSON schema, a regular expression, a choice or a grammar. Fields are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first five; the grammar itself is compiled, and refused if it can't be, when a request comes.

    Attributes:
        json: a JSON schema, as a text or a mapping.
        regex: a regular expression (Rust's syntax, no look-around) that the whole text must match.
        choice: texts, of which the output is one.
        grammar: in Lark's notation, or GBNF.
        json_object: True: any JSON object.
        disable_any_whitespace: JSON without any; otherwise a space, or a line break with an indentation, where JSON
            allows whitespace. (Never endless whitespace, which would be valid JSON too.)
        whitespace_pattern: a regular expression of the whitespace to allow instead.

    Raises:
        ValueError: none or several are given, or one of a wrong kind.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(KINDS)}, got {given or 'none'}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"structured_outputs.{name} must be a text that isn't empty, got {value!r:.100}")
        if self.json_object not in (None, True):
            raise ValueError(f"structured_outputs.json_object must be True or left out, got {self.json_object!r}")
        if not isinstance(self.disable_any_whitespace, bool):
            raise ValueError(
                f"structured_outputs.disable_any_whitespace must be a bool, got {self.disable_any_whitespace!r}"
            )
        if self.choice is not None:
            choice = self.choice
            if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
                raise ValueError(f"structured_outputs.choice must be a list of texts, got {choice!r:.100}")
            if not all(isinstance(text, str) and text for text in choice):
                raise ValueError(f"structured_outputs.choice must hold texts that aren't empty, got {choice!r:.100}")
            object.__setattr__(self, "choice", tuple(choice))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams:
        """The value itself, or made of a mapping, as it stands in a request file."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"structured_outputs must be StructuredOutputsParams or a mapping, got {value!r:.100}")
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(value) - set(known)):
            raise ValueError(f"structured_outputs has no {unknown}; it has {known}")
        return cls(**value)


KINDS = ("json", "regex", "choice", "grammar", "json_object")


def _schema_text(schema: Any) -> str:
    """A schema as JSON text."""
    if isinstance(schema, Mapping):
        try:
            return json.dumps(dict(schema))
        except (TypeError, ValueError) as error:
            raise ValueError(f"structured_outputs.json can't be written as JSON: {error}") from None
    if not isinstance(schema, str):
        raise ValueError(f"structured_outputs.json must be a JSON schema, got a {type(schema).__name__}")
    try:
        parsed = json.loads(schema)
    except json.JSONDecodeError as error:
        raise ValueError(f"structured_outputs.json is not valid JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise ValueError(f"structured_outputs.json must be a JSON schema (an object), got {schema!r:.100}")
    return schema
