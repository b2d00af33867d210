"""A stop rule over output tokens: the end says the same thing again and again. Fields are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import index
from typing import Any, SupportsIndex

MAX_PATTERN_SIZE = 2048  # vLLM's default for its servers; every size costs time at every token
_FIRST_LOOK = 16  # tokens: most patterns fail in the first few, and need no more


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """Ends an output when its last tokens are one pattern, said ``min_count`` times in a row.

    Attributes:
        max_pattern_size: tokens of the longest pattern to look for, at most 2048; 0 looks for none.
        min_pattern_size: of the shortest; 0 counts as 1.
        min_count: how many times; at least 2.

    Raises:
        ValueError: a value out of range; names it.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_pattern_size", 0, MAX_PATTERN_SIZE),
            ("min_pattern_size", 0, MAX_PATTERN_SIZE),
            ("min_count", 2 if self.max_pattern_size else 0, 2**31 - 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, SupportsIndex) or not low <= index(value) <= high:
                raise ValueError(f"repetition_detection.{name} must be an integer from {low} to {high}, got {value!r}")
            object.__setattr__(self, name, index(value))  # a NumPy integer becomes a plain one
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"repetition_detection.min_pattern_size ({self.min_pattern_size}) is greater than max_pattern_size"
                f" ({self.max_pattern_size})"
            )

    @classmethod
    def of(cls, value: Any) -> RepetitionDetectionParams:
        """The value itself, or made of a mapping, as it stands in a request file."""
        if isinstance(value, cls):
            return value
        known = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping):
            raise ValueError(
                f"repetition_detection must be RepetitionDetectionParams or a mapping of {known}, got {value!r:.100}"
            )
        if unknown := sorted(map(str, set(value) - set(known))):
            raise ValueError(f"repetition_detection has no {unknown}; it has {known}")
        return cls(**value)

    def found_in(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of ``token_ids`` completes a repetition."""
        length = len(token_ids)
        longest = min(self.max_pattern_size, length // self.min_count) if self.max_pattern_size else 0
        for size in range(max(self.min_pattern_size, 1), longest + 1):
            # A pattern said n times: n - 1 times its size, every token is the one that stands its size before it.
            again = size * (self.min_count - 1)
            if all(
                token_ids[length - span :] == token_ids[length - span - size : length - size]
                for span in (min(again, _FIRST_LOOK), again)
            ):
                return True
        return False
