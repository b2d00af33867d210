"""What a field of a configuration may hold, as a table of rules: one error names field, expectation and value."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """A predicate, and in words what it expects."""

    holds: Callable[[Any], bool]
    expected: str


def check_fields(config: object, rules: Mapping[str, Rule]) -> None:
    """Holds every field of ``rules`` against its rule.

    Raises:
        ValueError: the first that breaks it.
    """
    for name, rule in rules.items():
        value = getattr(config, name)
        if not rule.holds(value):
            raise ValueError(f"{name} must be {rule.expected}, got {value!r}")


def likely(names: Iterable[str], known: Iterable[str]) -> str:
    """Names that there are not, each with the one that was likely meant."""
    known, parts = sorted(known), []
    for name in names:
        close = difflib.get_close_matches(name, known, n=1)
        parts.append(f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    return ", ".join(parts)


def is_integer(value: Any) -> bool:
    """True counts as 1 nearly everywhere in Python, and is a mistake wherever a size is asked for."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(low: int) -> Rule:
    return Rule(lambda value: is_integer(value) and value >= low, f"an integer of at least {low}")


def or_none(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.holds(value), f"{rule.expected} or None")


def one_of(*words: str) -> Rule:
    return Rule(lambda value: isinstance(value, str) and value in words, f"one of {list(words)}")


def is_integers(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(is_integer, value))


def buckets_or(*words: str) -> Rule:
    expected = f"{', '.join(map(repr, words))} or a tuple of token buckets"
    return Rule(lambda value: value in words if isinstance(value, str) else is_integers(value), expected)


ANY_INTEGER = Rule(is_integer, "an integer")
INTEGERS = Rule(is_integers, "a tuple of integers")
BUCKETS = Rule(
    lambda value: value is None or isinstance(value, str) or is_integers(value),
    "a tuple of integers, a ladder's name, a .json file or None",
)
BOOLEAN = Rule(lambda value: isinstance(value, bool), "True or False")
TEXT = Rule(lambda value: isinstance(value, str), "a string")
FRACTION = Rule(
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1,
    "a number in (0, 1]",
)
NUM_BLOCKS = or_none(Rule(integer(2).holds, "an integer of at least 2 (one block is the null block)"))
FILE = Rule(
    lambda value: isinstance(value, str | Path) and not Path(value).is_dir() and Path(value).absolute().parent.is_dir(),
    "a file in a folder that exists",
)
PLAIN_FILE = Rule(
    lambda value: FILE.holds(value) and not str(value).endswith(".gz"),
    f"{FILE.expected}, whose name doesn't end in .gz (it is written uncompressed)",
)
FOLDER = Rule(lambda value: isinstance(value, str | Path), "a folder")
CACHE_FOLDER = Rule(
    lambda value: value is None or value is False or isinstance(value, str | Path), "a folder, None or False"
)
