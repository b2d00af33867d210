"""What a compiled program has the device do, from XLA's list of thunks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

# A thunk is something that the host starts. These start nothing by themselves: they hold others, or wait.
_CONTAINERS = {
    "kSequential",
    "kWhile",
    "kConditional",
    "kCommandBuffer",
    "kAsyncStart",
    "kAsyncDone",
    "kWaitForStreams",
}


def launches(thunks: Sequence[str]) -> list[tuple[str, str]]:
    """(kind, name) of everything that is put on the device's queue: kernels, products, copies, library calls.

    What lies in a loop's body or a branch counts once.
    """
    found = []
    for line in thunks:
        thunk = re.match(r"\s*\d+:\s+(k\w+)\s+(?:\[.*?\]\s+)?(\S*)", line)
        if thunk and thunk[1] not in _CONTAINERS:
            found.append((thunk[1], thunk[2]))
    return found


def per_layer(more: Sequence[tuple[str, str]], fewer: Sequence[tuple[str, str]], layers: int) -> dict[str, float]:
    """Launches a layer by name, numbers cut off, from programs of one model that differ in `layers` layers."""
    difference = Counter(_plain(name) for _, name in more)
    difference.subtract(_plain(name) for _, name in fewer)
    return {name: count / layers for name, count in difference.items() if count}


def _plain(name: str) -> str:
    return re.sub(r"(_\d+)+$", "", name)
