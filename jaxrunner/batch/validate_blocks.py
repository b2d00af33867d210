"""The rules about blocks: ids in range, tables large enough, a block for every position, and nobody in another's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, Int64

from jaxrunner.batch.block_owners import BlockOwners
from jaxrunner.batch.block_table import NULL_BLOCK_ID, BlockTable
from jaxrunner.batch.errors import refuse
from jaxrunner.batch.input_batch import InputBatch
from jaxrunner.batch.packing import runs
from jaxrunner.batch.step_plan import NewBlocks, StepPlan

_MOST_BLOCKS = 2**27  # ids that stay int32 when a block is split into up to 16 kernel blocks


def check_blocks(batch: InputBatch, plan: StepPlan, end: Int32[np.ndarray, "n"]) -> None:
    """Ids are in range, no table row runs over, and every request has a block for each position below ``end``."""
    limit = _MOST_BLOCKS if batch.num_blocks is None else batch.num_blocks
    for group, table in enumerate(batch.block_table.tables):
        held = _held(table, plan)
        if plan.blocks:
            new = plan.blocks[group]
            bad = new.block_ids.view(np.uint32) >= limit * table.ratio  # a negative id is large without its sign
            if np.count_nonzero(bad):
                at = int(bad.argmax())
                i = int(_position_of_each(plan, new)[at])
                refuse(
                    f"request {plan.ids[i]!r} brings block {new.block_ids[at] // table.ratio} in cache group {group};"
                    f" its block ids are 0..{limit - 1}"
                )
            held[plan.growing] += 1 if new.lengths is None else new.lengths
            if held.max(initial=0) > table.width:
                i = int(held.argmax())
                refuse(
                    f"request {plan.ids[i]!r} would hold {held[i]} blocks in cache group {group}, its table has"
                    f" {table.width} columns"
                )
        if len(plan.returning) and not held[plan.returning].all():
            i = int(plan.returning[int((held[plan.returning] == 0).argmax())])
            refuse(f"request {plan.ids[i]!r} is resumed without blocks: send all its block ids")
        bad = end > held * table.block_size
        if np.count_nonzero(bad):
            i = int(bad.argmax())
            refuse(
                f"request {plan.ids[i]!r}: position {end[i] - 1} lies behind its {held[i]} blocks of"
                f" {table.block_size} tokens in cache group {group}"
            )


def check_owners(
    batch: InputBatch, plan: StepPlan, end: Int32[np.ndarray, "n"], leaving: Sequence[int], keep: bool
) -> None:
    """A block that this step writes is held by the request that writes it, and by no other.

    Args:
        leaving: request indices that are given up.
        keep: leave the books as they are after the step.
    """
    done: list[tuple[BlockOwners, np.ndarray]] = []
    try:
        for group, owners in enumerate(batch.block_owners):
            added = plan.blocks[group].block_ids if plan.blocks else _NO_BLOCKS
            owners.change(leaving, added)
            done.append((owners, added))
            if owners.any_shared or np.count_nonzero(added) < len(added):
                _check_group(batch, plan, end, leaving, group)
    except ValueError:
        keep = False
        raise
    finally:
        if not keep:
            for owners, added in done:
                owners.undo(leaving, added)


_NO_BLOCKS = np.zeros(0, np.int32)


def _check_group(
    batch: InputBatch, plan: StepPlan, end: Int32[np.ndarray, "n"], leaving: Sequence[int], group: int
) -> None:
    table, owners = batch.block_table[group], batch.block_owners[group]
    held = _held(table, plan)
    first = plan.computed // table.block_size
    last = (end - 1) // table.block_size
    staying = (held > 0).nonzero()[0]  # cached ones, whose written blocks may be in the table already
    found = owners.written_and_shared(
        plan.indices[staying], first[staying], np.minimum(last[staying] + 1, held[staying])
    )
    if found is not None:
        i = int(staying[found[0]])
        _refuse_block(batch, plan, leaving, group, i, int(table.table[plan.indices[i], found[1]]), found[1])
    if not plan.blocks:
        return
    new = plan.blocks[group]
    position, column = _position_of_each(plan, new), held[plan.growing]
    if new.lengths is not None:
        column = runs(column, np.array(new.lengths, np.int32))
    bad = (column >= first[position]) & (column <= last[position])
    bad &= owners.held_twice(new.block_ids) | (new.block_ids == NULL_BLOCK_ID)
    if bad.any():
        at = int(bad.argmax())
        _refuse_block(batch, plan, leaving, group, int(position[at]), int(new.block_ids[at]), int(column[at]))


def _refuse_block(
    batch: InputBatch, plan: StepPlan, leaving: Sequence[int], group: int, i: int, block: int, column: int
) -> None:
    table, me = batch.block_table[group], plan.ids[i]
    size, manager_block = table.block_size, block // table.ratio
    what = (
        f"request {me!r}, with {plan.computed[i]} tokens computed, writes positions {column * size} to"
        f" {(column + 1) * size - 1} to block {manager_block} in cache group {group}"
    )
    if block == NULL_BLOCK_ID:
        refuse(f"{what}, which is the null block: nobody may write it")
    rows = [int(r) for r in np.unique((table.table == block).nonzero()[0]) if r not in leaving]
    others = [r for r, index in batch.index_of.items() if index in rows]
    if plan.blocks:
        new = plan.blocks[group]
        others += [plan.ids[j] for j in _position_of_each(plan, new)[new.block_ids == block].tolist()]
    others = [r for r in others if r != me] or [me]
    refuse(
        f"{what}, which {others[0]!r} holds too: requests can share only what lies below the computed tokens of"
        " them all"
    )


def _held(table: BlockTable, plan: StepPlan) -> Int32[np.ndarray, "n"]:
    """Kernel blocks that each request has before the plan's are added."""
    held = np.zeros(len(plan.ids), np.int32)
    held[: plan.num_cached] = table.num_blocks[plan.indices]
    held[plan.returning] = 0
    return held


def _position_of_each(plan: StepPlan, new: NewBlocks) -> Int64[np.ndarray, "m"]:
    """Position of the request that brings each block."""
    return plan.growing if new.lengths is None else plan.growing.repeat(new.lengths)
