"""What every array of a step must be, from dictionaries and loops: nothing of the code that it checks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from jaxrunner.batch import StepInputs
from jaxrunner.protocol import ModelRunnerOutput, SchedulerOutput
from jaxrunner.sampling_columns import column_offset
from scripts.host_bench.workload import TraceStep


class Reference:
    """Follows a trace beside the batch; one cache group.

    The block table and the KV slots are looked up in ``device``, a table that is filled from uploads alone.
    """

    def __init__(self, block_size: int, max_num_reqs: int, table_width: int) -> None:
        self.block_size = block_size
        self.device = np.zeros((max_num_reqs, table_width), np.int32)
        self.records: dict[int, float] = {}  # temperature that the device has been told, by request index
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.temperature: dict[str, float] = {}
        self.computed: dict[str, int] = {}

    def begin(self, so: SchedulerOutput) -> None:
        """The step's plan, before the batch gets it."""
        for req_id in so.finished_req_ids:
            del self.tokens[req_id], self.blocks[req_id], self.prompts[req_id], self.temperature[req_id]
        for req_id in so.preempted_req_ids:
            self.blocks[req_id] = []
        self.computed = {}
        cached = so.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            more = cached.new_block_ids[i]
            held = [] if req_id in cached.resumed_req_ids else self.blocks[req_id]
            self.blocks[req_id] = held + (list(more[0]) if more else [])
            self.computed[req_id] = cached.num_computed_tokens[i]
        for data in so.scheduled_new_reqs:
            assert data.sampling_params is not None
            self.tokens[data.req_id], self.prompts[data.req_id] = (
                list(data.prompt_token_ids),
                len(data.prompt_token_ids),
            )
            self.blocks[data.req_id] = list(data.block_ids[0])
            self.computed[data.req_id] = data.num_computed_tokens
            self.temperature[data.req_id] = data.sampling_params.temperature

    def upload(self, inputs: StepInputs, records: np.ndarray) -> None:
        """What the device is told before and with the step. ``records``: the batch's sampling records."""
        flat, cells = self.device.reshape(-1), inputs["update_cell"]
        used = cells < flat.size
        same(inputs, "cache groups of the table's updates", set(inputs["update_group"].tolist()), {0})
        told = [*(a.cells for a in inputs.overflow), cells[used]]
        every = np.concatenate(told)
        same(inputs, "no table cell is written twice", len(np.unique(every)), len(every))
        for ahead in inputs.overflow:
            flat[ahead.cells] = ahead.values
        flat[cells[used]] = inputs["update_value"][used]
        for index in inputs.entered:
            self.records[index] = float(records[index, column_offset("temperature")].view(np.float32))

    def compare(self, so: SchedulerOutput, inputs: StepInputs) -> None:
        """Raises AssertionError naming the array if anything differs."""
        size, rows = self.block_size, inputs.req_ids
        same(inputs, "scheduled requests", sorted(rows), sorted(so.num_scheduled_tokens))
        starts = [0]
        ids, positions, slots, logits, row_of_token = (list[int]() for _ in range(5))
        counts: dict[str, list[int]] = {name: [] for name in ("num_computed", "num_known", "num_prompt", "num_draft")}
        table = self.device[inputs["idx_mapping"][: len(rows)]]
        for row, req_id in enumerate(rows):
            count, begin = so.num_scheduled_tokens[req_id], self.computed[req_id]
            drafts = so.scheduled_spec_decode_tokens.get(req_id, [])
            ids += (self.tokens[req_id] + drafts)[begin : begin + count]
            positions += range(begin, begin + count)
            row_of_token += [row] * count
            slots += [self.blocks[req_id][p // size] * size + p % size for p in range(begin, begin + count)]
            starts.append(starts[-1] + count)
            logits += range(starts[-1] - 1 - len(drafts), starts[-1])
            for name, value in zip(
                counts, (begin, len(self.tokens[req_id]), self.prompts[req_id], len(drafts)), strict=True
            ):
                counts[name].append(value)
            used = -(-(begin + count) // size)
            same(inputs, f"block table of {req_id}", table[row, :used].tolist(), self.blocks[req_id][:used])
            told = self.records[int(inputs["idx_mapping"][row])]
            same(inputs, f"sampling of {req_id}", told, float(np.float32(self.temperature[req_id])))
        n, t = len(rows), len(ids)
        lengths = [b + so.num_scheduled_tokens[r] for r, b in zip(rows, counts["num_computed"], strict=True)]
        p = np.array(positions)
        from_device = table[np.array(row_of_token), p // size] * size + p % size
        indices = inputs["idx_mapping"][:n].tolist()
        expected = {
            "token_ids": (inputs["token_ids"], ids, 0),
            "positions": (inputs.positions, positions, 0),
            "query_start_loc": (inputs.query_start_loc, starts, t),
            "seq_lens": (inputs.seq_lens, lengths, 0),
            "slot_mapping": (inputs.slot_mapping(), slots, -1),
            "logits_indices": (inputs.logits_indices, logits, 0),
            "discard": (
                inputs.discard,
                [length < known for length, known in zip(lengths, counts["num_known"], strict=True)],
                0,
            ),
            "idx_mapping": (inputs["idx_mapping"], indices, len(self.device)),
            **{name: (inputs[name], values, 0) for name, values in counts.items()},
        }
        for name, (array, values, padding) in expected.items():
            same(inputs, name, array.tolist(), values + [padding] * (len(array) - len(values)))
        same(inputs, "slots through the device's table", from_device.tolist(), slots)
        same(inputs, "distinct request indices", len(set(indices)), n)
        numbers = (inputs.num_reqs, inputs.num_tokens, inputs.num_logits)
        same(inputs, "numbers of rows, tokens, logits rows", numbers, (n, t, len(logits)))

    def end(self, step: TraceStep, inputs: StepInputs, output: ModelRunnerOutput) -> None:
        """The output must be what was sampled; it becomes part of the requests."""
        same(inputs, "requests of the output", output.req_ids, inputs.req_ids)
        rows = {req_id: row for row, req_id in enumerate(inputs.req_ids)}
        same(inputs, "rows of the output", output.req_id_to_index, rows)
        given = {req_id: output.sampled_token_ids[row] for req_id, row in rows.items()}
        same(inputs, "sampled tokens", given, step.sampled)
        assert output.flat_token_ids is not None and output.token_offsets is not None
        flat, ends = output.flat_token_ids.tolist(), output.token_offsets.tolist()
        runs = [flat[begin:end] for begin, end in pairwise(ends)]
        same(inputs, "sampled tokens, flat", runs, output.sampled_token_ids)
        for req_id, tokens in step.sampled.items():
            self.tokens[req_id] += tokens


def same(inputs: StepInputs, what: str, value: object, expected: object) -> None:
    if value != expected:
        raise AssertionError(
            f"step of {inputs.num_reqs} requests, {inputs.num_tokens} tokens: {what}:"
            f" got {value!r:.200}, expected {expected!r:.200}"
        )
