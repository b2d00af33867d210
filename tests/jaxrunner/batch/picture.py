"""Everything an object holds, however deep, as a dictionary from where it is to what is there."""

from typing import Any

import numpy as np

# Room for intermediate values, written anew before it is read; packed sampling parameters, kept for their like; and
# whether a block may be held twice, which only says that it is worth a look.
SCRATCH = {"reading", "staging", "records", "any_shared"}


def picture(thing: Any, at: str = "batch") -> dict[str, Any]:
    """Arrays by their bytes, everything else by value. Two pictures are equal if nothing has changed."""
    found: dict[str, Any] = {}
    _look(thing, at, found, set())
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Where two pictures differ."""
    return sorted(at for at in before.keys() | after.keys() if before.get(at) != after.get(at))


def _look(thing: Any, at: str, found: dict[str, Any], seen: set[int]) -> None:
    if isinstance(thing, np.ndarray):
        found[at] = (str(thing.dtype), thing.shape, thing.tobytes())
        return
    if isinstance(thing, int | float | str | bytes | type(None)) or callable(thing):
        found[at] = thing
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, set | frozenset):
        found[at] = frozenset(thing)
    elif isinstance(thing, dict):
        found[f"{at} keys"] = list(thing)
        for key, value in thing.items():
            _look(value, f"{at}[{key!r}]", found, seen)
    elif isinstance(thing, list | tuple):
        found[f"{at} length"] = len(thing)
        for i, value in enumerate(thing):
            _look(value, f"{at}[{i}]", found, seen)
    else:
        names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
        for name in names:
            if name.lstrip("_") not in SCRATCH and hasattr(thing, name):
                _look(getattr(thing, name), f"{at}.{name}", found, seen)
