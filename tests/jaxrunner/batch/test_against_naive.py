"""Random schedules, step by step, against dictionaries; every array, and the device's table rebuilt from uploads."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrunner.batch import InputBatch, StepInputs, prepare_inputs, record_sampled, update_states
from jaxrunner.batch.request_state import NO_INDEX
from jaxrunner.invariants import check_invariants
from jaxrunner.protocol import CachedRequestData, NewRequestData, SchedulerOutput
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.shapes import StepShapes
from tests.jaxrunner.batch.naive import NaiveBatch

ROWS, LENGTH, BUDGET, BLOCK, VOCAB, DRAFTS = 4, 24, 40, 4, 50, 2


class Schedule:
    """Draws plans that a scheduler could send: it keeps the books a scheduler keeps."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.batch = InputBatch(
            max_num_reqs=ROWS,
            max_model_len=LENGTH,
            max_num_batched_tokens=BUDGET,
            vocab_size=VOCAB,
            block_sizes=(BLOCK,),
            num_speculative_tokens=DRAFTS,
        )
        self.shapes = StepShapes(BUDGET, ROWS, num_speculative_tokens=DRAFTS, min_block_size=BLOCK)
        self.naive = NaiveBatch(BLOCK)
        self.device = np.zeros((ROWS + 1, self.batch.block_table[0].width), np.int32)
        self.running: dict[str, int] = {}  # id -> computed tokens
        self.preempted: list[str] = []
        self.names = 0
        self.next_block = 1

    def blocks(self, n: int) -> list[int]:
        self.next_block += n
        return list(range(self.next_block - n, self.next_block))

    def plan(self) -> SchedulerOutput:
        so, cached = SchedulerOutput(), CachedRequestData()
        so.scheduled_cached_reqs = cached
        budget = BUDGET
        finished_before = []
        for req_id in list(self.running) + list(self.preempted):
            if self.draw(st.sampled_from("ffkkkkkkkkkk")) == "f":
                so.finished_req_ids.add(req_id)
                finished_before.append(req_id)
                self.running.pop(req_id, None)
                if req_id in self.preempted:
                    self.preempted.remove(req_id)
        for req_id in list(self.running):
            tokens = self.naive.requests[req_id].tokens
            room = LENGTH - self.running[req_id]
            what = self.draw(st.sampled_from(["run", "run", "run", "skip", "preempt"]))
            if what == "preempt" and room:  # a full one has nothing left to run: it waits for its end
                so.preempted_req_ids.add(req_id)
                del self.running[req_id]
                self.preempted.append(req_id)
            elif what == "run" and budget and room:
                self._schedule_cached(so, req_id, len(tokens), budget, resumed=False)
                budget -= so.num_scheduled_tokens.get(req_id, 0)
        free = ROWS - len(self.running)
        for req_id in list(self.preempted):
            if free and budget and req_id not in so.preempted_req_ids and self.draw(st.booleans()):
                self.preempted.remove(req_id)
                self.running[req_id] = 0
                self._schedule_cached(so, req_id, len(self.naive.requests[req_id].tokens), budget, resumed=True)
                budget -= so.num_scheduled_tokens[req_id]
                free -= 1
        while free and budget and self.draw(st.booleans()):
            budget -= self._schedule_new(so, budget, finished_before)
            free -= 1
        so.total_num_scheduled_tokens = sum(so.num_scheduled_tokens.values())
        return so

    def _schedule_cached(self, so: SchedulerOutput, req_id: str, known: int, budget: int, resumed: bool) -> None:
        cached, computed = so.scheduled_cached_reqs, self.running[req_id]
        left = known - computed
        count = self.draw(st.integers(1, min(left, budget)))
        drafts: list[int] = []
        if count == left and budget > count and known + 1 < LENGTH - DRAFTS:
            drafts = self.draw(st.lists(st.integers(0, VOCAB - 1), max_size=min(DRAFTS, budget - count)))
        if drafts:
            so.scheduled_spec_decode_tokens[req_id] = drafts
            count += len(drafts)
        held = 0 if resumed else len(self.naive.requests[req_id].blocks)
        more = max(-(-(computed + count) // BLOCK) - held, 0)
        cached.req_ids.append(req_id)
        cached.num_computed_tokens.append(computed)
        cached.num_output_tokens.append(known - self.naive.requests[req_id].num_prompt)
        cached.new_block_ids.append((self.blocks(more),) if more else None)
        if resumed:
            cached.resumed_req_ids.add(req_id)
        so.num_scheduled_tokens[req_id] = count

    def _schedule_new(self, so: SchedulerOutput, budget: int, finished: list[str]) -> int:
        if finished and self.draw(st.booleans()):
            req_id = finished.pop()  # aborted and submitted again in one step
        else:
            self.names += 1
            req_id = f"r{self.names}"
        prompt = self.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
        computed = self.draw(st.integers(0, (len(prompt) - 1) // BLOCK)) * BLOCK  # a prefix hit
        count = self.draw(st.integers(1, min(len(prompt) - computed, budget)))
        params = SamplingParams(temperature=self.draw(st.sampled_from([0.0, 0.5, 1.0])), top_k=self.names)
        blocks = self.blocks(-(-(computed + count) // BLOCK))
        so.scheduled_new_reqs.append(NewRequestData(req_id, prompt, (blocks,), computed, params))
        so.num_scheduled_tokens[req_id] = count
        self.running[req_id] = computed
        return count

    def step(self) -> None:
        so = self.plan()
        views = self.naive.step(so)
        threshold = self.draw(st.sampled_from([None, None, 1, 3]))
        update_states(self.batch, so, reorder_threshold=threshold)
        if threshold is not None:
            self.decodes_come_first(so, threshold)
        assert sorted(self.batch.requests) == sorted(self.naive.requests)
        for req_id in self.naive.requests:
            holds_index = self.batch.requests[req_id].request_index != NO_INDEX
            assert holds_index == (req_id in self.running)
            assert self.batch.token_ids_of(req_id).tolist() == self.naive.requests[req_id].tokens
        assert sorted(self.batch.req_ids) == sorted(so.num_scheduled_tokens)
        if not views:
            return
        inputs = prepare_inputs(self.batch, so, self.shapes)
        check_invariants(self.batch, so, inputs)
        self.upload(inputs)
        self.compare(inputs, views)
        self.finish(so, inputs, views)

    def decodes_come_first(self, so: SchedulerOutput, threshold: int) -> None:
        """Rows come as decodes, short extends, long extends, prefills."""
        regions = []
        for req_id in self.batch.req_ids:
            request, count = self.naive.requests[req_id], so.num_scheduled_tokens[req_id]
            computed = request.computed
            short = 0 if computed >= request.num_prompt else 1
            regions.append(3 if computed == 0 else short if count <= threshold else 2)
        assert regions == sorted(regions)

    def upload(self, inputs: StepInputs) -> None:
        flat = self.device.reshape(-1)
        for ahead in inputs.overflow:
            flat[ahead.cells] = ahead.values
        here = inputs["update_cell"] < flat.size
        flat[inputs["update_cell"][here]] = inputs["update_value"][here]

    def compare(self, inputs: StepInputs, views: dict[str, dict]) -> None:
        starts = inputs.query_start_loc
        logits_at = 0
        for row, req_id in enumerate(inputs.req_ids):
            view, span = views[req_id], slice(starts[row], starts[row + 1])
            assert inputs["token_ids"][span].tolist() == view["tokens"]
            assert inputs.positions[span].tolist() == view["positions"]
            assert inputs.slot_mapping()[span].tolist() == view["slots"]
            assert inputs.seq_lens[row] == view["seq_len"]
            assert inputs.discard[row] == view["discard"]
            uploaded = self.device[inputs["idx_mapping"][row], : len(view["blocks"])]
            assert uploaded.tolist() == view["blocks"]
            rows, end = view["logits_rows"], int(starts[row + 1])
            assert inputs.logits_indices[logits_at : logits_at + rows].tolist() == list(range(end - rows, end))
            logits_at += rows
        assert inputs.num_logits == logits_at

    def finish(self, so: SchedulerOutput, inputs: StepInputs, views: dict[str, dict]) -> None:
        """Samples up to one token more than there were drafts, and commits them on both sides."""
        width = 1 + DRAFTS if so.scheduled_spec_decode_tokens else 1
        sampled = np.full((inputs.num_reqs, width), -1, np.int32)
        for row, req_id in enumerate(inputs.req_ids):
            request, view = self.naive.requests[req_id], views[req_id]
            self.running[req_id] = view["seq_len"]
            if view["discard"]:
                continue
            count = self.draw(st.integers(1, view["logits_rows"]))
            tokens = [(len(request.tokens) * 7 + row + j) % VOCAB for j in range(count)]
            sampled[row, :count] = tokens
            request.tokens += tokens
            self.running[req_id] -= view["logits_rows"] - count  # rejected drafts
        lists = record_sampled(self.batch, sampled)
        assert lists == [[t for t in row if t >= 0] for row in sampled.tolist()]


@settings(max_examples=60)
@given(st.data())
def test_random_schedules(data: st.DataObject) -> None:
    schedule = Schedule(data)
    for _ in range(25):
        schedule.step()
