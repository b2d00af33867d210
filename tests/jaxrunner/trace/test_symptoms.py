"""Every fault of the symptom table, planted in a running batch, is named by the check."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrunner.batch import InputBatch, StepInputs, update_states
from jaxrunner.protocol import CachedRequestData, SchedulerOutput
from jaxrunner.trace import SYMPTOMS, check_trace, open_trace
from jaxrunner.trace.experiment import HostRunner
from tests.jaxrunner.trace.traffic import run_traffic


class Faulty(HostRunner):
    """A runner that believes ``plan_of(plan)``, and whose upload is changed by ``tamper``. It checks nothing."""

    plan_of: Callable[[SchedulerOutput], SchedulerOutput] = staticmethod(lambda plan: plan)
    tamper: Callable[[StepInputs], None] = staticmethod(lambda inputs: None)
    in_flight: Callable[[StepInputs], None] = staticmethod(lambda inputs: None)
    keeps_discarded = False

    def settle(self, plan: SchedulerOutput) -> None:
        update_states(self.batch, type(self).plan_of(plan), check=False)

    def prepare(self, plan: SchedulerOutput) -> StepInputs:
        told = type(self).plan_of(plan)
        total = int(self.batch.num_scheduled[: self.batch.num_reqs].sum())
        inputs = super().prepare(replace(told, total_num_scheduled_tokens=total))
        type(self).tamper(inputs)
        return inputs

    def sample(self, inputs: StepInputs) -> np.ndarray:
        type(self).in_flight(inputs)
        sampled = super().sample(inputs)
        return np.where(sampled < 0, 1, sampled) if self.keeps_discarded else sampled


def faulty(**changes: Any) -> dict[str, Any]:
    return {name: staticmethod(v) if callable(v) else v for name, v in changes.items()}


# ---------------------------------------------------------------- what the batch is told in place of the plan
def forget_preemption(plan: SchedulerOutput) -> SchedulerOutput:
    cached = plan.scheduled_cached_reqs
    return replace(
        plan, preempted_req_ids=set(), scheduled_cached_reqs=replace(cached, resumed_req_ids=set(), all_token_ids={})
    )


def without_one(plan: SchedulerOutput) -> SchedulerOutput:
    cached = plan.scheduled_cached_reqs
    if len(cached.req_ids) < 2:
        return plan
    counts = {r: n for r, n in plan.num_scheduled_tokens.items() if r != cached.req_ids[-1]}
    left = CachedRequestData(
        cached.req_ids[:-1],
        cached.resumed_req_ids,
        cached.new_block_ids[:-1],
        cached.num_computed_tokens[:-1],
        cached.num_output_tokens[:-1],
    )
    return replace(plan, scheduled_cached_reqs=left, num_scheduled_tokens=counts)


def with_the_finished(plan: SchedulerOutput) -> SchedulerOutput:
    if not plan.finished_req_ids or not plan.num_scheduled_tokens:
        return plan
    gone, cached = min(plan.finished_req_ids), plan.scheduled_cached_reqs
    known = CachedRequestData(
        [*cached.req_ids, gone],
        cached.resumed_req_ids,
        [*cached.new_block_ids, None],
        [*cached.num_computed_tokens, 0],
        [*cached.num_output_tokens, 0],
        all_token_ids=cached.all_token_ids,
    )
    counts = {r: plan.num_scheduled_tokens[r] for r in cached.req_ids} | {gone: 1} | plan.num_scheduled_tokens
    finished = plan.finished_req_ids - {gone}
    return replace(plan, finished_req_ids=finished, scheduled_cached_reqs=known, num_scheduled_tokens=counts)


def without_growth(plan: SchedulerOutput) -> SchedulerOutput:
    cached = plan.scheduled_cached_reqs
    grown = [ids if r in cached.resumed_req_ids else None
             for r, ids in zip(cached.req_ids, cached.new_block_ids, strict=True)]  # fmt: skip
    return replace(plan, scheduled_cached_reqs=replace(cached, new_block_ids=grown))


# ---------------------------------------------------------------- what the device is told in place of the upload
def change(field: str, how: Callable[[np.ndarray, StepInputs], None], when: Callable[[StepInputs], bool]):
    def tamper(inputs: StepInputs) -> None:
        if when(inputs):
            how(inputs[field], inputs)

    return tamper


def always(inputs: StepInputs) -> bool:
    return True


def starts_of_another_order(starts: np.ndarray, inputs: StepInputs) -> None:
    starts[1] = starts[2] - starts[1]  # the first two rows' lengths, exchanged


def lengths_differ(inputs: StepInputs) -> bool:
    starts = inputs.query_start_loc
    return inputs.num_reqs > 1 and starts[1] != starts[2] - starts[1]


def shift(values: np.ndarray, inputs: StepInputs) -> None:
    values[: inputs.num_logits] += 1


def turn(values: np.ndarray, inputs: StepInputs) -> None:
    values[: inputs.num_logits] = values[: inputs.num_logits][::-1].copy()


def add(n: int, cell: int = 0) -> Callable[[np.ndarray, StepInputs], None]:
    def how(values: np.ndarray, inputs: StepInputs) -> None:
        values[cell] += n

    return how


# ---------------------------------------------------------------- what is derived on the device
def derive(monkeypatch: pytest.MonkeyPatch, name: str, how: Callable[[StepInputs, Any], Any]) -> None:
    old = StepInputs.__dict__[name]
    value = old.func if hasattr(old, "func") else old
    if name in ("slot_mapping", "block_table"):
        monkeypatch.setattr(StepInputs, name, lambda self, group=0: how(self, value(self, group)))
    else:
        monkeypatch.setattr(StepInputs, name, property(lambda self: how(self, value(self))))


def whole_rows(inputs: StepInputs, right: np.ndarray) -> np.ndarray:
    table, rows = inputs._block_table[0].table, right.copy()
    rows[: inputs.num_reqs] = table[inputs["idx_mapping"][: inputs.num_reqs]]
    return rows


def stale_lengths(inputs: StepInputs, right: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(right)) < inputs.num_reqs, right, 7)


def keep_old_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept by row does not move with the rows."""
    refresh = InputBatch.refresh_metadata

    def stale(self: InputBatch) -> None:
        old = self.num_prompt.copy()
        refresh(self)
        kept = old[: self.num_reqs] != 0
        self.num_prompt[: self.num_reqs][kept] = old[: self.num_reqs][kept]

    monkeypatch.setattr(InputBatch, "refresh_metadata", stale)


# ---------------------------------------------------------------- plans that are wrong themselves
def steal_block(plan: SchedulerOutput) -> SchedulerOutput:
    """A running request is given the block that it or another has since the first step: 1."""
    cached = plan.scheduled_cached_reqs
    for i, ids in enumerate(cached.new_block_ids):
        if ids is not None and ids[0] and cached.req_ids[i] not in cached.resumed_req_ids:
            blocks = [*cached.new_block_ids]
            blocks[i] = ([1] * len(ids[0]),)
            return replace(plan, scheduled_cached_reqs=replace(cached, new_block_ids=blocks))
    return plan


def jump(plan: SchedulerOutput) -> SchedulerOutput:
    cached = plan.scheduled_cached_reqs
    if not cached.req_ids or cached.resumed_req_ids or plan.scheduled_new_reqs:
        return plan
    ahead = [n + 1 for n in cached.num_computed_tokens]
    return replace(plan, scheduled_cached_reqs=replace(cached, num_computed_tokens=ahead))


def wrong_total(plan: SchedulerOutput) -> SchedulerOutput:
    return replace(plan, total_num_scheduled_tokens=plan.total_num_scheduled_tokens + 1)


def many_tokens(inputs: StepInputs) -> bool:
    return inputs.num_tokens > 3


BATCH = {
    "stale_row": faulty(plan_of=with_the_finished),
    "missing_row": faulty(plan_of=without_one),
    "append_on_resume": faulty(plan_of=forget_preemption),
    "blocks_not_taken": faulty(plan_of=without_growth),
    "built_before_condense": faulty(tamper=change("query_start_loc", starts_of_another_order, lengths_differ)),
    "stale_tokens": faulty(tamper=change("token_ids", add(1), many_tokens)),
    "wrong_count": faulty(tamper=change("num_known", add(500), many_tokens)),
    "logits_off_by_one": faulty(tamper=change("logits_indices", shift, many_tokens)),
    "wrong_logits_rows": faulty(tamper=change("logits_indices", turn, lambda inputs: inputs.num_reqs > 1)),
    "discarded_sample_kept": faulty(keeps_discarded=True),
    "buffer_overwritten": faulty(in_flight=change("token_ids", add(1), many_tokens)),
}
DERIVED = {
    "wrong_position": ("positions", lambda inputs, right: right + (right > 5)),
    "padding_slot": ("slot_mapping", lambda inputs, right: np.maximum(right, 0)),
    "wrong_slot": ("slot_mapping", lambda inputs, right: np.where(right > 6, right - 1, right)),
    "stale_padding": ("seq_lens", stale_lengths),
    "wrong_seq_len": ("seq_lens", lambda inputs, right: np.where(right > 6, right + 100, right)),
    "stale_table_tail": ("block_table", whole_rows),
    "discard_by_length": ("discard", lambda inputs, right: inputs.query_lens > 1),
    "wrong_discard": ("discard", lambda inputs, right: right & (inputs.query_lens > 99)),
}
PLANS = {"shared_block_written": steal_block, "count_jumped": jump, "plan_contradiction": wrong_total}


def check(path: Path) -> Any:
    trace = open_trace(path)
    return check_trace(trace.lines(), trace.geometry)


def run_until_it_breaks(path: Path, **options: Any) -> Any:
    """Runs traffic; a fault may well break the run itself: the trace up to there is what is checked."""
    try:
        run_traffic(path, num_requests=30, **options)
    except Exception:
        pass
    return check(path)


@pytest.mark.parametrize("symptom", BATCH)
def test_a_fault_of_the_batch_is_named(tmp_path: Path, symptom: str):
    finding = run_until_it_breaks(tmp_path / "t.jsonl", make_runner=type("Planted", (Faulty,), BATCH[symptom]))
    assert finding is not None and finding.symptom.name == symptom, finding
    assert f"step {finding.step}" in str(finding) and finding.symptom.cause in str(finding)


@pytest.mark.parametrize("symptom", DERIVED)
def test_a_fault_of_what_is_derived_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symptom: str):
    name, how = DERIVED[symptom]
    derive(monkeypatch, name, how)
    finding = run_until_it_breaks(tmp_path / "t.jsonl", make_runner=Faulty)
    assert finding is not None and finding.symptom.name == symptom, finding


@pytest.mark.parametrize("symptom", PLANS)
def test_a_fault_of_the_scheduler_is_named(tmp_path: Path, symptom: str):
    finding = run_until_it_breaks(tmp_path / "t.jsonl", make_runner=Faulty, change_plan=PLANS[symptom])
    assert finding is not None and finding.symptom.name == symptom, finding


def test_what_did_not_move_with_its_row_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keep_old_prompts(monkeypatch)
    finding = run_until_it_breaks(tmp_path / "t.jsonl", make_runner=Faulty)
    assert finding is not None and finding.symptom.name == "row_not_moved" and finding.field == "prompt", finding
    assert finding.req_id is not None and finding.row is not None


def test_every_symptom_of_the_table_is_planted_here():
    assert {*BATCH, *DERIVED, *PLANS, "row_not_moved"} == set(SYMPTOMS)


def test_without_a_fault_the_same_runner_is_clean(tmp_path: Path):
    run_traffic(tmp_path / "t.jsonl", num_requests=20, make_runner=Faulty)
    assert check(tmp_path / "t.jsonl") is None
