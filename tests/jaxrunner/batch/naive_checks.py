"""The batch, its columns, its tables and a step's arrays against the naive model: everything, at every index and row.

A column or a field of the upload that stands in no table here is a failure too: say what it must hold.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from jaxrunner.batch import InputBatch, StepInputs
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.sampling_columns import FILTERED, HELD_BACK, RANDOM, SAMPLING_COLUMNS
from jaxrunner.sampling_params import SamplingParams
from tests.jaxrunner.batch.naive import NaiveBatch, NaiveRequest, View

KNOWN_FLAGS = RANDOM | FILTERED | HELD_BACK
PAST_EVERY_TABLE = 2**31 - 1


def same(what: str, got: object, expected: object) -> None:
    got, expected = (v.tolist() if isinstance(v, np.ndarray | np.generic) else v for v in (got, expected))
    if got != expected:
        raise AssertionError(f"{what}: got {got}, expected {expected}")


# What a declared column holds of a request that has an index.
COLUMNS: dict[str, Callable[[NaiveRequest], object]] = {
    "num_tokens": lambda r: len(r.tokens),
    "num_prompt_tokens": lambda r: r.num_prompt,
    "num_computed_tokens": lambda r: r.computed,
    "num_draft_tokens": lambda r: len(r.drafts),
    "token_ids": lambda r: r.tokens,
    "sampling_flags": lambda r: request_flags(r),
    "sampling_record": lambda r: record(r),
}


def request_flags(request: NaiveRequest) -> int:
    p = request.params
    if p.temperature == 0:
        return 0
    return RANDOM | (FILTERED if p.top_k > 0 or p.top_p < 1 or p.min_p > 0 else 0)


def record(request: NaiveRequest) -> dict[str, object]:
    """Of the record's columns, those that the tests' requests set."""
    p = request.params
    return {
        "temperature": p.temperature,
        "top_k": p.top_k,
        "top_p": p.top_p,
        "min_p": p.min_p,
        "min_length": request.num_prompt + p.min_tokens if p.min_tokens else 0,
    }


def unpacked(words: np.ndarray) -> dict[str, object]:
    """The same columns of a record as it is in the batch."""
    names = record(NaiveRequest([], 0, SamplingParams(), None))
    out, at = {}, 0
    for column in SAMPLING_COLUMNS:
        if column.name in names:
            (out[column.name],) = struct.unpack(f"<{column.word}", words[at : at + 1].tobytes())
        at += column.width
    return out


class Checker:
    """Compares a batch with the naive model, and remembers what must not change: indices, records."""

    def __init__(self, batch: InputBatch, naive: NaiveBatch) -> None:
        self.batch, self.naive = batch, naive
        self.indices: dict[str, int] = {}
        self.records: dict[str, bytes] = {}
        size = naive.limits.max_num_reqs + 1  # the scratch index of padding rows
        self.device_tables = [np.full((size, width), -9, np.int32) for width in batch.block_table.widths]
        self.device_records: dict[int, bytes] = {}

    # ------------------------------------------------------------------ the batch
    def check_batch(self, drafts: bool = True) -> None:
        """Everything the batch holds; ``drafts``: their tokens too, which the recorded ones take the place of."""
        batch, naive = self.batch, self.naive
        holders = naive.holders()
        same("requests", sorted(batch.requests), sorted(naive.requests))
        same("rows", batch.req_ids, naive.rows)
        same("num_reqs", batch.num_reqs, len(naive.rows))
        same("req_id_to_index", batch.req_id_to_index, {r: i for i, r in enumerate(naive.rows)})
        index_of = {r: int(batch.requests[r].request_index) for r in naive.requests}
        for req_id in naive.requests.keys() - holders.keys():
            same(f"{req_id}: no index while preempted", index_of[req_id], -1)
            same(f"{req_id}: tokens kept", batch.token_ids_of(req_id), naive.requests[req_id].tokens)
        held = {index_of[r]: r for r in holders}
        same("distinct indices", len(held), len(holders))
        capacity = naive.limits.max_num_reqs
        same("indices in range", [i for i in held if not 0 <= i < capacity], [])
        same("free indices", batch.num_free_indices, capacity - len(held))
        padding = capacity - len(naive.rows)
        same("idx_mapping", batch.idx_mapping, [index_of[r] for r in batch.req_ids] + [-1] * padding)
        rows = [naive.rows.index(held[i]) if held.get(i) in naive.rows else -1 for i in range(capacity)]
        same("row_of_index", batch.row_of_index, rows)
        for req_id, index in index_of.items():
            if req_id in holders and req_id not in naive.entered:
                same(f"{req_id}: index is permanent", index, self.indices.get(req_id, index))
        self.indices = {r: index_of[r] for r in holders}
        for index in range(capacity):
            self._check_index(index, held.get(index), drafts)

    def _check_index(self, index: int, req_id: str | None, drafts: bool) -> None:
        batch, naive = self.batch, self.naive
        request = naive.requests[req_id] if req_id is not None else None
        for column in batch.columns.columns:
            what = f"column {column.name} of index {index} ({req_id})"
            if column.name not in COLUMNS:
                raise AssertionError(f"{what}: the naive model does not know it; say what it holds in {__name__}")
            got = batch.columns[column.name][index]
            if request is None:
                if column.valid is None:
                    same(f"{what}, free", got, np.full(column.shape, column.fill, column.dtype))
                continue
            expected = COLUMNS[column.name](request)
            if column.name == "token_ids":
                expected = request.tokens + request.drafts if drafts else request.tokens
                got = got[: len(expected)]
            elif column.name == "sampling_record":
                before = self.records.get(req_id)
                if req_id in naive.entered or before is None:
                    self.records[req_id] = got.tobytes()
                else:
                    same(f"{what}: as it was when it entered", got.tobytes(), before)
                got, expected = unpacked(got), {k: _float32(v) for k, v in expected.items()}
            elif column.name == "sampling_flags":
                got = int(got) & KNOWN_FLAGS
            same(what, got, expected)
        for group, table in enumerate(batch.block_table.tables):
            blocks = naive.kernel_blocks(request, group) if request is not None else []
            what = f"blocks of index {index} ({req_id}), group {group}"
            same(f"{what}: count", table.num_blocks[index], len(blocks))
            same(what, table.table[index], blocks + [0] * (table.table.shape[1] - len(blocks)))
            if req_id is not None:
                same(f"{what}: by id", batch.block_ids_of(req_id, group), blocks)

    def check_order(self, so: SchedulerOutput, threshold: int) -> None:
        """Rows have become decodes, short extends, long extends, prefills; none moved without need."""
        naive, counts = self.naive, so.num_scheduled_tokens
        before = [naive.view(r, counts[r], threshold).region for r in naive.rows]
        same("the same requests", sorted(self.batch.req_ids), sorted(naive.rows))
        after = [naive.view(r, counts[r], threshold).region for r in self.batch.req_ids]
        same("regions of the rows", after, sorted(before))
        for row, req_id in enumerate(naive.rows):
            if before[row] == after[row]:
                same(f"row {row}, in its region already", self.batch.req_ids[row], req_id)
        naive.rows = list(self.batch.req_ids)

    # ------------------------------------------------------------------ the step
    def check_step(self, so: SchedulerOutput, inputs: StepInputs) -> dict[str, View]:
        views = {r: self.naive.view(r, so.num_scheduled_tokens[r]) for r in self.naive.rows}
        self._check_upload(so, inputs, list(views.values()))
        self._check_derived(inputs, list(views.values()))
        self._receive(inputs)
        self.naive.entered.clear()
        return views

    def _check_upload(self, so: SchedulerOutput, inputs: StepInputs, views: list[View]) -> None:
        naive, rows = self.naive, self.naive.rows
        requests = [naive.requests[r] for r in rows]
        layout, n, t = inputs.layout, len(rows), so.total_num_scheduled_tokens
        logits = [
            end - v.num_logits + j for end, v in zip(_ends(views), views, strict=True) for j in range(v.num_logits)
        ]
        flags = 0
        for request in requests:
            flags |= request_flags(request)
            if len(request.tokens) < request.num_prompt + request.params.min_tokens and request.params.min_tokens:
                flags |= HELD_BACK
        fields: dict[str, tuple[list[int], int]] = {  # values, and what padding holds
            "num_reqs": ([n], 0),
            "num_tokens": ([t], 0),
            "num_logits": ([len(logits)], 0),
            "flags": ([flags], 0),
            "query_start_loc": ([0, *_ends(views)], t),
            "idx_mapping": ([self.indices[r] for r in rows], naive.limits.max_num_reqs),
            "num_computed": ([r.computed for r in requests], 0),
            "num_known": ([len(r.tokens) for r in requests], 0),
            "num_prompt": ([r.num_prompt for r in requests], 0),
            "num_draft": ([len(r.drafts) for r in requests], 0),
            "use_device": ([0] * n, 0),
            "logits_indices": (logits, 0),
            "token_ids": ([token for v in views for token in v.tokens], 0),
        }
        updates = {"update_group", "update_cell", "update_value"}  # compared through the tables they build
        unknown = layout.fields.keys() - fields.keys() - updates
        if unknown:
            raise AssertionError(f"the naive model does not know {unknown}; say what they hold in {__name__}")
        same("requests of the step", inputs.req_ids, rows)
        same("shape", (inputs.num_reqs, inputs.num_tokens, inputs.num_logits), (n, t, len(logits)))
        for name, (values, padding) in fields.items():
            got = inputs[name]
            if name == "flags":
                got = got & KNOWN_FLAGS
            same(f"upload's {name}", got, values + [padding] * (layout.fields[name][1] - len(values)))
            at, length = layout.fields[name]
            same(f"{name} in the buffer", inputs.buffer[at : at + length], inputs[name])

    def _check_derived(self, inputs: StepInputs, views: list[View]) -> None:
        batch, layout = self.batch, inputs.layout
        stride = batch.columns["token_ids"].shape[1]
        per_token: dict[str, tuple[list[int], int]] = {
            "req_indices": ([row for row, v in enumerate(views) for _ in v.positions], layout.num_reqs),
            "query_pos": ([j for v in views for j in range(len(v.positions))], 0),
            "positions": ([p for v in views for p in v.positions], 0),
            "token_indices": (
                [
                    self.indices[r] * stride + p
                    for r, v in zip(self.naive.rows, views, strict=True)
                    for p in v.positions
                ],
                0,
            ),
        }
        per_row: dict[str, tuple[list[int], int]] = {
            "query_lens": ([len(v.positions) for v in views], 0),
            "seq_lens": ([v.seq_len for v in views], 0),
            "discard": ([v.discard for v in views], False),
            "is_prefilling": ([v.prefilling for v in views], False),
        }
        for length, arrays in ((layout.num_tokens, per_token), (layout.num_reqs, per_row)):
            for name, (values, padding) in arrays.items():
                same(name, getattr(inputs, name), values + [padding] * (length - len(values)))
        t = inputs.num_tokens
        gathered = batch.columns["token_ids"].reshape(-1)[inputs.token_indices[:t]]
        same("gathered tokens", gathered, inputs["token_ids"][:t])
        for group, table in enumerate(batch.block_table.tables):
            width = table.table.shape[1]
            rows = [v.blocks[group] + [0] * (width - len(v.blocks[group])) for v in views]
            rows += [[0] * width] * (layout.num_reqs - len(rows))
            same(f"block table of group {group}", inputs.block_table(group), rows)
            slots = [slot for v in views for slot in v.slots[group]]
            same(f"slots of group {group}", inputs.slot_mapping(group), slots + [-1] * (layout.num_tokens - t))
        self._check_drafts(inputs, views)

    def _check_drafts(self, inputs: StepInputs, views: list[View]) -> None:
        metadata, drafts = inputs.spec_decode_metadata, [self.naive.requests[r].drafts for r in self.naive.rows]
        judged = [inputs["token_ids"][p] for p in metadata.draft_token_positions]
        same("drafts by position", [int(t) for t in judged], [t for d in drafts for t in d])
        ends = [sum(v.num_logits for v in views[: i + 1]) for i in range(len(views))]
        same("bonus rows", metadata.bonus_logits_indices, [end - 1 for end in ends])
        targets = [end - v.num_logits + j for end, v in zip(ends, views, strict=True) for j in range(v.num_logits - 1)]
        same("target rows", metadata.target_logits_indices, targets)

    def _receive(self, inputs: StepInputs) -> None:
        """Plays the device: tables and records rebuilt from uploads alone have what every holder of an index needs."""
        naive, batch = self.naive, self.batch
        for ahead in inputs.overflow:
            self.device_tables[ahead.group].reshape(-1)[ahead.cells] = ahead.values
        cells = list(zip(inputs["update_group"].tolist(), inputs["update_cell"].tolist(), strict=True))
        real = [cell for cell in cells if cell[1] != PAST_EVERY_TABLE]
        same("no cell twice in an upload", len(set(real)), len(real))
        same("padding of the updates is behind them", cells, real + [(0, PAST_EVERY_TABLE)] * (len(cells) - len(real)))
        for (group, cell), value in zip(real, inputs["update_value"].tolist(), strict=False):
            self.device_tables[group].reshape(-1)[cell] = value
        same("indices to initialise", sorted(inputs.entered), sorted(self.indices[r] for r in naive.entered))
        for index in inputs.entered:
            self.device_records[index] = batch.columns["sampling_record"][index].tobytes()
        for req_id, request in naive.holders().items():
            index = self.indices[req_id]
            same(f"{req_id}: record on the device", self.device_records[index], self.records[req_id])
            for group, table in enumerate(self.device_tables):
                blocks = naive.kernel_blocks(request, group)
                same(f"{req_id}: table on the device, group {group}", table[index, : len(blocks)], blocks)


def _ends(views: list[View]) -> list[int]:
    return [sum(len(v.positions) for v in views[: i + 1]) for i in range(len(views))]


def _float32(value: object) -> object:
    return float(np.float32(value)) if isinstance(value, float) else value
