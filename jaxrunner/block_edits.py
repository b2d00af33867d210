"""A SchedulerOutput's block copies and blocks to clear, checked and cut into uploads of one size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32

from jaxrunner.batch.errors import SchedulerOutputError
from jaxrunner.protocol import SchedulerOutput

EDIT_CAPACITY = 16  # blocks that one upload copies or clears
_PAST_THE_END = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class BlockEdit:
    """One upload, for one cache group: block ``targets[i]`` becomes a copy of ``sources[i]``, or is cleared."""

    group: int
    sources: Int32[np.ndarray, "C"]
    targets: Int32[np.ndarray, "C"]
    clear: Bool[np.ndarray, "C"]


def block_edits(so: SchedulerOutput, num_groups: int, num_blocks: int) -> list[BlockEdit]:
    """What to do to the caches before the step, in order: clear first, then copy.

    Raises:
        SchedulerOutputError: a block that there is not, the null block, a target that stands twice, or one that a
            later copy reads. Nothing has changed then.
    """
    if not so.block_copies and not so.new_block_ids_to_zero:
        return []
    edits: list[BlockEdit] = []
    for name, per_group in (("new_block_ids_to_zero", so.new_block_ids_to_zero), ("block_copies", so.block_copies)):
        if per_group and len(per_group) != num_groups:
            raise SchedulerOutputError(f"{name} has {len(per_group)} lists for {num_groups} cache groups")
    for group, blocks in enumerate(so.new_block_ids_to_zero):
        _check(f"new_block_ids_to_zero of cache group {group}", blocks, num_blocks)
        edits += _cut(group, [(0, block) for block in blocks], clear=True)
    for group, copies in enumerate(so.block_copies):
        targets: set[int] = set()
        for source, target in copies:
            name = f"block_copies of cache group {group}: {source} -> {target}"
            _check(name, (source, target), num_blocks)
            if source in targets or target in targets:
                raise SchedulerOutputError(f"{name}: a copy before it writes into one of the two")
            targets.add(target)
        edits += _cut(group, copies, clear=False)
    return edits


def _check(name: str, blocks: list[int] | tuple[int, ...], num_blocks: int) -> None:
    for block in blocks:
        if not isinstance(block, int | np.integer) or not 1 <= block < num_blocks:
            raise SchedulerOutputError(f"{name}: blocks that can be written are 1..{num_blocks - 1}, got {block!r}")


def _cut(group: int, pairs: list[tuple[int, int]], *, clear: bool) -> Iterator[BlockEdit]:
    for at in range(0, len(pairs), EDIT_CAPACITY):
        part = np.asarray(pairs[at : at + EDIT_CAPACITY], np.int32)
        sources, targets = np.zeros(EDIT_CAPACITY, np.int32), np.full(EDIT_CAPACITY, _PAST_THE_END, np.int32)
        sources[: len(part)], targets[: len(part)] = part.T
        yield BlockEdit(group, sources, targets, np.full(EDIT_CAPACITY, clear))
