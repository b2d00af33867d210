"""Buckets from outside: the ladder in a file that a sweep wrote, or on a command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxrunner.shapes.ladders import named

_FIELDS = ("token_buckets", "logits_buckets", "request_buckets")


def read_listed_buckets(config: Any) -> None:
    """Puts sizes in place of file names in a configuration that is being made, and checks names of ladders.

    Raises:
        ValueError: a file that can't be read or holds no sizes, or a name that no ladder has.
    """
    for field in _FIELDS:
        value = getattr(config, field)
        if isinstance(value, str) and value.endswith(".json"):
            object.__setattr__(config, field, read_buckets(value, field))
        elif isinstance(value, str):
            try:
                named(value, 1, 1)
            except ValueError as error:
                raise ValueError(f"{field}: {error}") from None


def read_buckets(path: str | Path, field: str) -> tuple[int, ...]:
    """The sizes in a JSON file: a list, or an object that has one under ``field``.

    Raises:
        ValueError: it can't be read or holds no sizes.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{field} {str(path)!r} can't be read: {error}") from None
    sizes = found.get(field) if isinstance(found, dict) else found
    if not isinstance(sizes, list) or not all(isinstance(size, int) and size >= 1 for size in sizes) or not sizes:
        raise ValueError(f"{field} {str(path)!r} must hold a list of sizes, or an object with one under {field!r}")
    return tuple(sizes)


def parse_buckets(text: str) -> tuple[int, ...] | str:
    """Buckets as a command's flag gives them: "1,8,64" is a tuple of sizes, all else a name or a file's."""
    parts = text.split(",")
    return tuple(map(int, parts)) if all(part.strip().isdecimal() for part in parts) else text


def write_buckets(path: str | Path, **buckets: tuple[int, ...]) -> None:
    """A file that ``read_buckets`` takes: {"token_buckets": [...]}."""
    Path(path).write_text(json.dumps({name: list(sizes) for name, sizes in buckets.items()}) + "\n", encoding="utf-8")
