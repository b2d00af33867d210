"""Stop strings: where a text ends, and how much of its end might still turn into one."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: str, stop: Sequence[str], after: int = 0) -> tuple[str, int, int] | None:
    """The stop string that is complete first, as if the text had come character by character.

    So the cut does not depend on how the text fell into tokens. Ties go to the one that stands first in ``stop``.

    Args:
        after: only a stop string that ends behind so many characters counts; the ones before were searched already,
            or min_tokens keeps them from counting.
    Returns:
        (stop string, its start, its end) in ``text``, or None.
    """
    found: tuple[str, int, int] | None = None
    for string in stop:
        start = text.find(string, max(after - len(string) + 1, 0))
        if start >= 0 and (found is None or start + len(string) < found[2]):
            found = string, start, start + len(string)
    return found


def held_back(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of ``text`` could be the beginning of a stop string: not to be shown yet."""
    longest = 0
    for string in stop:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest
