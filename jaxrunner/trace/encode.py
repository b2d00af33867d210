"""From what the step thread kept of a step to a line of the trace: the arrays as the device derives them.

Block tables are rebuilt here from the uploaded cells alone, so a line shows what the device was told, not what the
host believes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Int32

from jaxrunner.batch import InputBatch, StepInputs
from jaxrunner.batch.buffers import StepViews
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.shapes import StepLayout, StepShape
from jaxrunner.trace.plan_json import plan_to_json

MOST_BLOCKS = 64  # of a row that a line lists; its length is given in any case


@dataclass(frozen=True)
class Geometry:
    """What a reader must know of the batch to make sense of a step's addresses.

    Attributes:
        block_sizes, widths: per cache group: tokens a block as the kernels address it, blocks a table row holds.
        manager_block_sizes: tokens a block as a scheduler counts them.
    """

    max_num_reqs: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    token_row_stride: int
    block_sizes: tuple[int, ...]
    widths: tuple[int, ...]
    manager_block_sizes: tuple[int, ...]
    num_blocks: int | None
    num_speculative_tokens: int
    eos_token_ids: tuple[int, ...]
    seed: int

    @classmethod
    def of(cls, batch: InputBatch) -> Geometry:
        tables = batch.block_table.tables
        return cls(
            max_num_reqs=batch.max_num_reqs,
            max_model_len=batch.max_model_len,
            max_num_batched_tokens=batch.max_num_batched_tokens,
            vocab_size=batch.vocab_size,
            token_row_stride=batch.token_row_stride,
            block_sizes=tuple(table.block_size for table in tables),
            widths=tuple(table.width for table in tables),
            manager_block_sizes=batch.block_sizes,
            num_blocks=batch.num_blocks,
            num_speculative_tokens=batch.num_speculative_tokens,
            eos_token_ids=batch.eos_token_ids,
            seed=batch.seed,
        )

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> Geometry:
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in written.items()}
        return cls(**values)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def new_batch(self) -> InputBatch:
        """An empty batch of this geometry, for a replay."""
        return InputBatch(
            max_num_reqs=self.max_num_reqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            vocab_size=self.vocab_size,
            block_sizes=self.manager_block_sizes,
            kernel_block_sizes=self.block_sizes,
            num_blocks=self.num_blocks,
            num_speculative_tokens=self.num_speculative_tokens,
            eos_token_ids=self.eos_token_ids,
            seed=self.seed,
        )


@dataclass(slots=True)
class StepRecord:
    """What the step thread keeps of one step. ``buffer`` is None for a step in which nothing was scheduled."""

    plan: SchedulerOutput
    live: Int32[np.ndarray, "size"] | None = None  # the very memory that the step reads
    buffer: bytes | None = None  # its copy, taken before the step began
    layout: StepLayout | None = None
    shape: StepShape | None = None
    req_ids: Sequence[str] = ()
    overflow: Sequence[Any] = ()
    intact: bool = True
    sampled: Sequence[list[int]] = ()
    segments: Mapping[str, float] = MappingProxyType({})  # seconds
    error: str | None = None  # what the step raised


class _ShadowTable:
    """A block table as the device has it, made of uploads."""

    def __init__(self, num_indices: int, width: int, block_size: int) -> None:
        self.table = np.zeros((num_indices + 1, width), np.int32)
        self.width, self.block_size = width, block_size

    def set(self, cells: np.ndarray, values: np.ndarray) -> None:
        inside = (cells >= 0) & (cells < self.table.size)  # the rest is padding
        self.table.reshape(-1)[cells[inside]] = values[inside]


class _RecordedInputs(StepInputs):
    """A step's arrays once more, from the copy of its buffer and the shadow tables."""

    def __init__(
        self, layout: StepLayout, shape: StepShape, views: StepViews, req_ids: list[str], tables: Any, stride: int
    ) -> None:
        self.layout, self.shape, self._views, self.buffer = layout, shape, views, views["buffer"]
        self.req_ids, self.overflow, self.entered = req_ids, [], []
        self._block_table, self._token_row_stride = tables, stride


class Encoder:
    """Makes the lines of one trace, in order."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.reset()

    def reset(self) -> None:
        """Forgets what the device was told so far."""
        g = self.geometry
        self._tables = [_ShadowTable(g.max_num_reqs, w, b) for w, b in zip(g.widths, g.block_sizes, strict=True)]
        self._step = getattr(self, "_step", 0)

    def line(self, record: StepRecord) -> dict[str, Any]:
        """A step as plain lists and numbers; ``jaxrunner.trace.format`` lists the keys."""
        step = self._step
        self._step += 1
        line: dict[str, Any] = {"step": step, "req_ids": list(record.req_ids)}
        if record.buffer is not None:
            line |= self._arrays(record)
        line |= {
            "sampled": list(record.sampled),
            "buffer_intact": record.intact,
            "times_us": {name: round(seconds * 1e6, 1) for name, seconds in record.segments.items()},
        }
        if record.error is None:
            return line | {"plan": plan_to_json(record.plan)}
        try:
            plan = plan_to_json(record.plan)
        except Exception:  # no plan at all, as a scheduler may send one; the step was refused for that
            plan = None
        return {"event": "failed", "error": record.error} | line | {"plan": plan}

    def _arrays(self, record: StepRecord) -> dict[str, Any]:
        layout, shape = record.layout, record.shape
        assert layout is not None and shape is not None and record.buffer is not None
        buffer = np.frombuffer(record.buffer, np.int32)
        views = {name: buffer[at : at + n] for name, (at, n) in layout.fields.items()}
        views["buffer"] = buffer
        self._take_tables(record, views)
        inputs = _RecordedInputs(
            layout, shape, views, list(record.req_ids), self._tables, self.geometry.token_row_stride
        )
        groups = range(len(self._tables))
        block_rows, lengths = zip(*(_trimmed(inputs.block_table(g)) for g in groups), strict=True)
        return {
            "bucket": {
                "tokens": shape.num_tokens,
                "requests": shape.num_reqs,
                "logits_rows": shape.num_logits,
                "uniform": shape.uniform,
            },
            "mode": shape.mode.name,
            "num_tokens": inputs.num_tokens,
            "num_logits": inputs.num_logits,
            "flags": int(views["flags"][0]),
            "request_indices": views["idx_mapping"].tolist(),
            "scheduled": inputs.query_lens.tolist(),
            "computed": views["num_computed"].tolist(),
            "known": views["num_known"].tolist(),
            "prompt": views["num_prompt"].tolist(),
            "drafts": views["num_draft"].tolist(),
            "use_device": views["use_device"].tolist(),
            "query_start_loc": views["query_start_loc"].tolist(),
            "seq_lens": inputs.seq_lens.tolist(),
            "discard": inputs.discard.tolist(),
            "logits_indices": views["logits_indices"].tolist(),
            "token_ids": views["token_ids"].tolist(),
            "req_indices": inputs.req_indices.tolist(),
            "positions": inputs.positions.tolist(),
            "slot_mapping": [inputs.slot_mapping(g).tolist() for g in groups],
            "block_rows": list(block_rows),
            "block_row_lengths": list(lengths),
        }

    def _take_tables(self, record: StepRecord, views: StepViews) -> None:
        for updates in record.overflow:
            self._tables[updates.group].set(updates.cells, updates.values)
        for g, table in enumerate(self._tables):
            own = views["update_group"] == g
            table.set(views["update_cell"][own].astype(np.int64), views["update_value"][own])


def _trimmed(rows: Int32[np.ndarray, "R W"]) -> tuple[list[list[int]], list[int]]:
    """Rows without the null blocks at their end and cut at MOST_BLOCKS, and their lengths before the cut."""
    used = rows != 0
    lengths = np.where(used.any(axis=1), rows.shape[1] - used[:, ::-1].argmax(axis=1), 0).tolist()
    return [row[: min(n, MOST_BLOCKS)].tolist() for row, n in zip(rows, lengths, strict=True)], lengths
