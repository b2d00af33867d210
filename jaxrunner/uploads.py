"""What a step brings to the device that does not fit into its own upload: new requests, large tables, masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxrunner.batch import InputBatch, StepInputs
from jaxrunner.executables import ENTER_CAPACITY, TABLE_CAPACITY, StepExecutables
from jaxrunner.grammar_masks import grammar_uploads
from jaxrunner.logits_processors import CustomEntry
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.sampling_columns import RECORD_WORDS

_PADDING_INDEX = np.iinfo(np.int32).max  # past every table: a scatter drops it


def uploads_ahead(
    run: StepExecutables, batch: InputBatch, so: SchedulerOutput, inputs: StepInputs, custom: Iterable[CustomEntry]
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """(executable, what it takes after the device's state), in the order in which they are to run.

    Each returns the new state.

    Args:
        custom: what ``CustomStates.enter`` gave for the step.
    """
    entered = inputs.entered
    for at in range(0, len(entered), ENTER_CAPACITY):
        part = entered[at : at + ENTER_CAPACITY]
        indices = np.full(ENTER_CAPACITY, _PADDING_INDEX, np.int32)
        records = np.zeros((ENTER_CAPACITY, RECORD_WORDS), np.int32)
        indices[: len(part)] = part
        records[: len(part)] = batch.columns["sampling_record"][part]
        yield run.enter(), (indices, records)
    for index in entered:
        tables = batch.tables_of(index)
        if tables is not None:
            yield run.enter_tables(), (np.int32(index), tables)
    for k, index, row in custom:
        yield run.enter_custom(k), (np.int32(index), row)
    for updates in inputs.overflow:
        for at in range(0, len(updates.cells), TABLE_CAPACITY):
            part_cells = updates.cells[at : at + TABLE_CAPACITY]
            cells = np.full(TABLE_CAPACITY, _PADDING_INDEX, np.int32)
            values = np.zeros(TABLE_CAPACITY, np.int32)
            cells[: len(part_cells)] = part_cells
            values[: len(part_cells)] = updates.values[at : at + TABLE_CAPACITY]
            yield run.update_table(updates.group), (cells, values)
    for rows, masks in grammar_uploads(batch, so, run.mask_capacity, _PADDING_INDEX):
        yield run.set_allowed(), (rows, masks)
