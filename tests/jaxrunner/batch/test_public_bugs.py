"""Faults that engines of this kind have shipped, each with its right value here.

A number in a comment is the public thread in which it was reported (vllm-project/vllm unless another is named).
"""

import copy
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from jaxrunner.batch import (
    BufferRing,
    InputBatch,
    SchedulerOutputError,
    prepare_inputs,
    record_sampled,
    update_states,
)
from jaxrunner.protocol import CachedRequestData, NewRequestData, SchedulerOutput
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.shapes import StepShapes
from tests.cases_by_id import case
from tests.jaxrunner.batch.scenarios import at_random

SHAPES = StepShapes(32, 8, num_speculative_tokens=2, min_block_size=4, token_buckets=(8, 32))


def batch_of(*requests: NewRequestData, counts: dict[str, int] | None = None, **limits: int) -> InputBatch:
    """A batch that has these requests in its first step, with all their tokens unless ``counts`` says else."""
    batch = InputBatch(
        **{"max_num_reqs": 8, "max_model_len": 32, "max_num_batched_tokens": 32, "vocab_size": 100} | limits,
        block_sizes=(4,),
        num_blocks=200,
        num_speculative_tokens=2,
    )
    update_states(batch, new(*requests, counts=counts))
    return batch


def new(*requests: NewRequestData, counts: dict[str, int] | None = None) -> SchedulerOutput:
    counts = {r.req_id: len(r.prefill_token_ids or r.prompt_token_ids) - r.num_computed_tokens for r in requests} | (
        counts or {}
    )
    return SchedulerOutput([*requests], num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()))


def cached(
    rows: dict[str, tuple[int, int, int]],
    blocks: dict[str, list[int]] | None = None,
    resumed: str = "",
    drafts: dict[str, list[int]] | None = None,
    **more: set[str],
) -> SchedulerOutput:
    """``rows``: per request how many tokens are scheduled, computed and output before the step."""
    blocks = blocks or {}
    columns = CachedRequestData(
        list(rows),
        set(resumed),
        [(blocks[r],) if r in blocks else None for r in rows],
        [computed for _, computed, _ in rows.values()],
        [outputs for _, _, outputs in rows.values()],
    )
    counts = {r: count for r, (count, _, _) in rows.items()}
    return SchedulerOutput([], columns, counts, sum(counts.values()), drafts or {}, **more)


def record(batch: InputBatch, **tokens: list[int]) -> None:
    """The step's samples: tokens by request, nothing for the others."""
    width = max(map(len, tokens.values()), default=1) or 1
    sampled = np.full((batch.num_reqs, width), -1, np.int32)
    for req_id, ids in tokens.items():
        sampled[batch.req_id_to_index[req_id], : len(ids)] = ids
    record_sampled(batch, sampled)


def parameters(batch: InputBatch, column: str) -> list[object]:
    """What each row's request asked for."""
    return [getattr(batch.requests[r].sampling_params, column) for r in batch.req_ids]


# ---------------------------------------------------------------------- rows that move
def test_a_vacated_row_constrains_nobody() -> None:
    """43894: who takes the row, or the index, of a constrained request is not constrained."""
    only = SamplingParams(allowed_token_ids=[13])
    batch = batch_of(*(NewRequestData(r, [1], ([i + 1],), 0, only if r == "c" else None) for i, r in enumerate("abc")))
    update_states(batch, cached({"b": (1, 0, 0), "c": (1, 0, 0)}, finished_req_ids={"a"}))
    assert dict(zip(batch.req_ids, parameters(batch, "allowed_token_ids"), strict=True))["c"] == only.allowed_token_ids
    for next_id, gone in (("d", "c"), ("e", "b")):
        plan = new(NewRequestData(next_id, [1], ([20 + ord(next_id)],)))
        plan.finished_req_ids = {gone}
        update_states(batch, plan)
        row = batch.req_id_to_index[next_id]
        assert parameters(batch, "allowed_token_ids")[row] is None
        assert batch.columns["sampling_record"][batch.idx_mapping[row]].tolist() == (
            np.frombuffer(batch.record_of(next_id, SamplingParams(temperature=0.0), 1), np.int32).tolist()
        )


@pytest.mark.parametrize("column", ["allowed_token_ids", "min_tokens"])
def test_a_swap_exchanges_both_rows(column: str) -> None:
    """48419, 51890: masks {1} and {2}, budgets 5 and 9; after the swap {2}, {1} and 9, 5, not the same twice."""
    values = {"allowed_token_ids": ([1], [2]), "min_tokens": (5, 9)}[column]
    batch = batch_of(
        *(NewRequestData(r, [1], ([i + 1],), 0, SamplingParams(**{column: values[i]})) for i, r in enumerate("ab"))
    )
    before, records = parameters(batch, column), batch.columns["sampling_record"][batch.idx_mapping[:2]].copy()
    batch.swap_states(0, 1)
    assert batch.req_ids == ["b", "a"]
    assert parameters(batch, column) == before[::-1]
    assert batch.columns["sampling_record"][batch.idx_mapping[:2]].tolist() == records[::-1].tolist()


def test_cycles_of_more_than_two_rows() -> None:
    """27739, 27367: nine requests, of which six change places; the plan's numbers go with them."""
    given, expected = case("runner_cases", "reorder_nine")
    # Small numbers in place of the report's: the regions are the same.
    rows = [[min(s, 5), min(c, 8), min(p, 8 if c else 5)] for s, c, p in given["sched_computed_prompt"]]
    requests, at = [], 1
    for i, (scheduled, computed, prompt) in enumerate(rows):
        tokens = [(7 * i + j) % 100 for j in range(computed + scheduled)]
        blocks = list(range(at, at + -(-len(tokens) // 4)))
        at += len(blocks)
        requests.append(NewRequestData(str(i), tokens[:prompt], (blocks,), computed, None, tokens))
    plan = new(*requests)
    batch = InputBatch(max_num_reqs=9, max_model_len=16, max_num_batched_tokens=64, vocab_size=100, block_sizes=(4,))
    update_states(batch, plan, reorder_threshold=given["threshold"])
    assert [int(r) for r in batch.req_ids] == expected["order"]
    inputs = prepare_inputs(batch, plan, StepShapes(64, 9, min_block_size=4))
    assert inputs.query_lens[:9].tolist() == [rows[i][0] for i in expected["order"]]
    first = [inputs["token_ids"][start] for start in inputs.query_start_loc[:9]]
    assert first == [requests[i].prefill_token_ids[rows[i][1]] for i in expected["order"]]


@pytest.mark.parametrize("lands", ["before the move", "after the move"])
def test_counts_that_arrive_late_stay_with_their_request(lands: str) -> None:
    """51571: accepted counts a, b, c = 3, 1, 2; a is dropped and rows are c, b: they read 2, 1 whenever it lands."""
    plan = new(*(NewRequestData(r, [1, 2], ([i + 1],)) for i, r in enumerate("abc")))
    batch = batch_of(*plan.scheduled_new_reqs)
    step = prepare_inputs(batch, plan, SHAPES)
    on_device, accepted = np.ones(batch.max_num_reqs + 1, np.int32), np.array([3, 1, 2])

    def land() -> None:
        on_device[step["idx_mapping"][:3]] = accepted

    if lands == "before the move":
        land()
    update_states(batch, cached({"b": (1, 1, 0), "c": (1, 1, 0)}, finished_req_ids={"a"}))
    if lands == "after the move":
        land()
    assert batch.req_ids == ["c", "b"]
    assert on_device[batch.idx_mapping[:2]].tolist() == [2, 1]


def test_a_row_has_no_drafts_of_its_predecessor() -> None:
    """45100: the first decode of a request in the row, and at the index, of one with two drafts counts none."""
    batch = batch_of(NewRequestData("a", [1, 2], ([1],)))
    record(batch, a=[3])
    update_states(batch, cached({"a": (3, 2, 1)}, {"a": [2]}, drafts={"a": [8, 9]}))
    plan = new(NewRequestData("b", [4, 5], ([3],)))
    plan.finished_req_ids = {"a"}
    update_states(batch, plan)
    inputs = prepare_inputs(batch, plan, SHAPES)
    assert inputs["num_draft"].tolist() == [0] * inputs.layout.num_reqs and inputs.num_logits == 1
    assert inputs["token_ids"][:2].tolist() == [4, 5]


def test_the_next_input_is_the_last_committed_token() -> None:
    """38556: two drafts of which none is accepted leave neither a draft nor a placeholder behind."""
    batch = batch_of(NewRequestData("a", [1, 2], ([1],)))
    record(batch, a=[3])
    update_states(batch, cached({"a": (3, 2, 1)}, {"a": [2]}, drafts={"a": [8, 9]}))
    record(batch, a=[5, -1, -1])
    plan = cached({"a": (1, 3, 2)})
    update_states(batch, plan)
    inputs = prepare_inputs(batch, plan, SHAPES)
    assert inputs["token_ids"][:2].tolist() == [5, 0] and inputs.positions[0] == 3 and inputs["num_known"][0] == 4


def test_free_indices_do_not_depend_on_the_order_of_a_set() -> None:
    """Machines that run one batch together must give a request the same index, whatever their sets' order."""

    class Ordered(set[str]):
        order = ""

        def __iter__(self) -> Iterator[str]:
            return iter(self.order)

    found = set()
    for order in ("abc", "bca", "cba"):
        batch = batch_of(*(NewRequestData(r, [1], ([i + 1],)) for i, r in enumerate("abc")))
        plan = new(*(NewRequestData(r, [1], ([i + 7],)) for i, r in enumerate("def")))
        plan.finished_req_ids = Ordered(order)
        plan.finished_req_ids.order = order
        update_states(batch, plan)
        found.add(tuple(batch.idx_mapping[:3].tolist()))
    assert len(found) == 1


# ---------------------------------------------------------------------- block table, slots, padding
def test_slots_of_padding_start_at_the_actual_count() -> None:
    """36580: a step of 8 tokens, then one of 3 in the same buffer: slots 3 to 7 are nowhere."""
    ring = BufferRing(max(layout.size for layout in SHAPES.layouts.values()), depth=1)
    first = new(NewRequestData("a", list(range(8)), ([5, 6],)))
    batch = batch_of(*first.scheduled_new_reqs)
    assert (prepare_inputs(batch, first, SHAPES, buffers=ring).slot_mapping()[:8] >= 0).all()
    plan = new(NewRequestData("b", [1, 2, 3], ([7],)))
    plan.finished_req_ids = {"a"}
    update_states(batch, plan)
    assert prepare_inputs(batch, plan, SHAPES, buffers=ring).slot_mapping().tolist() == [28, 29, 30] + [-1] * 5


def test_five_requests_padded_to_eight() -> None:
    """34903: everything that has a row a request has 8; padding rows are empty, and lead to the null block."""
    requests = [NewRequestData(str(i), [i], ([i + 1],)) for i in range(5)]
    batch, plan = batch_of(*requests), new(*requests)
    inputs = prepare_inputs(batch, plan, SHAPES)
    assert inputs.layout.num_reqs == 8
    assert inputs.seq_lens.tolist() == [1] * 5 + [0] * 3 == inputs.query_lens.tolist()
    assert inputs.block_table().shape == (8, 8) and not inputs.block_table()[5:].any()
    assert inputs.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5]
    assert [len(inputs[name]) for name in ("num_computed", "num_known", "num_prompt", "num_draft")] == [8] * 4


def test_a_position_past_the_table_is_refused() -> None:
    """54296: the column after a row's last is the next row's first; no plan gets that far."""
    batch = batch_of(NewRequestData("a", [1] * 15, ([1, 2, 3, 4],)), max_model_len=16)
    record(batch, a=[2])
    update_states(batch, cached({"a": (1, 15, 1)}))
    record(batch, a=[3])  # the last sample of a full request
    with pytest.raises(SchedulerOutputError, match="'a'.*(16|5 blocks)"):
        update_states(batch, cached({"a": (1, 16, 2)}))
    with pytest.raises(SchedulerOutputError, match="'a' would hold 5 blocks .* 4 columns"):
        update_states(batch, cached({"a": (1, 16, 2)}, {"a": [5]}))


def test_rows_of_the_table_left_by_a_larger_step() -> None:
    """49757: after a step of three, a step of one sees no block of the other two, in no row."""
    requests = [NewRequestData(r, [1] * 8, ([3 * i + 1, 3 * i + 2],)) for i, r in enumerate("abc")]
    batch = batch_of(*requests)
    plan = cached({"c": (1, 7, 0)})
    update_states(batch, plan)  # a and b hold their blocks, and are not in the step
    table = prepare_inputs(batch, plan, SHAPES).block_table()
    assert table[0].tolist() == [7, 8] + [0] * 6 and not table[1:].any()


# ---------------------------------------------------------------------- preemption, gaps, drafts
def test_outputs_survive_preemption() -> None:
    """26385: outputs [7, 8]; the resumed request's history ends 7, 8, and there is no placeholder in it."""
    batch = batch_of(NewRequestData("a", [1, 2, 3], ([1],)))
    record(batch, a=[7])
    update_states(batch, cached({"a": (1, 3, 1)}))
    record(batch, a=[8])
    update_states(batch, SchedulerOutput(preempted_req_ids={"a"}))
    plan = cached({"a": (5, 0, 2)}, {"a": [4, 5]}, resumed="a")
    update_states(batch, plan)
    assert batch.output_token_ids_of("a").tolist() == [7, 8]
    assert prepare_inputs(batch, plan, SHAPES)["token_ids"][:5].tolist() == [1, 2, 3, 7, 8]


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_request_comes_back_before_anything_was_sampled_for_it(in_one_step: bool) -> None:
    """41177: preempted in the middle of its prompt and back at once: its history is found."""
    batch = batch_of(NewRequestData("a", list(range(10)), ([1],)), counts={"a": 4})
    record(batch)
    if not in_one_step:
        update_states(batch, SchedulerOutput(preempted_req_ids={"a"}))
    plan = cached({"a": (10, 0, 0)}, {"a": [2, 3, 4]}, resumed="a", preempted_req_ids={"a"} if in_one_step else set())
    update_states(batch, plan)
    inputs = prepare_inputs(batch, plan, SHAPES)
    assert inputs["token_ids"][:10].tolist() == list(range(10)) and batch.block_ids_of("a").tolist() == [2, 3, 4]


def test_a_gap_leaves_no_placeholder_among_the_inputs() -> None:
    """46899, 40768, 43434, 44734: two drafts, nothing recorded, a step without the request: no input id below 0."""
    batch = batch_of(NewRequestData("a", [1, 2], ([1],)), NewRequestData("b", [1, 2], ([2],)))
    record(batch, a=[3], b=[4])
    update_states(batch, cached({"a": (3, 2, 1), "b": (1, 2, 1)}, {"a": [3]}, drafts={"a": [8, 9]}))
    record(batch, a=[-1, -1, -1], b=[5, -1, -1])
    update_states(batch, cached({"b": (1, 3, 2)}))
    record(batch, b=[6])
    plan = cached({"a": (1, 2, 1), "b": (1, 4, 3)}, {"b": [4]})
    update_states(batch, plan)
    inputs = prepare_inputs(batch, plan, SHAPES)
    assert (inputs["token_ids"] >= 0).all() and sorted(inputs["token_ids"][:2].tolist()) == [3, 6]
    assert batch.token_ids_of("a").tolist() == [1, 2, 3]


def test_drafts_are_gone_when_the_next_step_has_none() -> None:
    """38711: near max_model_len the drafter cannot run; the step after has one logits row, and no draft of before."""
    batch = batch_of(NewRequestData("a", [1] * 12, ([1, 2, 3],)), max_model_len=16)
    record(batch, a=[2])
    update_states(batch, cached({"a": (3, 12, 1)}, {"a": [4]}, drafts={"a": [8, 9]}))
    record(batch, a=[8, 9, 3])
    plan = cached({"a": (1, 15, 4)})
    update_states(batch, plan)
    inputs = prepare_inputs(batch, plan, SHAPES)
    assert inputs.num_logits == 1 and not inputs["num_draft"].any()
    assert inputs["token_ids"][0] == 3 and not batch.columns["num_draft_tokens"].any()


# ---------------------------------------------------------------------- reported by users
def test_abort_in_the_middle_of_a_prompt() -> None:
    """torch-spyre/sendnn-inference 577: aborted after chunk 1 of 4: the others go on, its index and blocks are free."""
    batch = batch_of(
        NewRequestData("a", [1] * 16, ([1],)), NewRequestData("b", [2, 3], ([9],)), counts={"a": 4, "b": 2}
    )
    record(batch, b=[4])
    plan = cached({"b": (1, 2, 1)}, finished_req_ids={"a"})
    update_states(batch, plan)
    inputs = prepare_inputs(batch, plan, SHAPES)
    assert inputs["token_ids"][0] == 4 and inputs.slot_mapping()[0] == 9 * 4 + 2
    assert batch.num_free_indices == 7 and np.count_nonzero(batch.block_table[0].table) == 1
    update_states(batch, new(NewRequestData("c", [5], ([1],))))  # its block, at once


def test_preempted_and_back_with_a_prefix_hit() -> None:
    """GeeeekExplorer/nano-vllm 233: back with computed tokens that lie in blocks which another one holds too."""
    shared = list(range(8))
    batch = batch_of(NewRequestData("a", [*shared, 50], ([1, 2, 3],)), NewRequestData("b", [*shared, 60], ([4, 5, 6],)))
    record(batch, a=[51], b=[61])
    update_states(batch, cached({"b": (1, 9, 1)}, preempted_req_ids={"a"}))
    record(batch, b=[62])
    plan = cached({"b": (1, 10, 2), "a": (2, 8, 1)}, {"a": [4, 5, 7]}, resumed="a")
    update_states(batch, plan)
    inputs = prepare_inputs(batch, plan, SHAPES)
    row = batch.req_id_to_index["a"]
    tokens = slice(*inputs.query_start_loc[row : row + 2])
    assert inputs["token_ids"][tokens].tolist() == [50, 51]
    assert inputs.slot_mapping()[tokens].tolist() == [28, 29]
    assert inputs.block_table()[row].tolist() == [4, 5, 7, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("tokens", [15, 16, 17])
def test_prompts_around_max_model_len(tokens: int) -> None:
    """42381, 16445: max - 1 and max have a place, and one for the sample behind them; max + 1 is refused by number."""
    blocks = list(range(1, 1 + -(-tokens // 4)))
    request = NewRequestData("a", [1] * tokens, (blocks,))
    if tokens == 17:
        with pytest.raises(SchedulerOutputError, match="'a' has 17 tokens, max_model_len is 16"):
            batch_of(request, max_model_len=16)
        return
    batch = batch_of(request, max_model_len=16)
    record(batch, a=[7])
    assert batch.output_token_ids_of("a").tolist() == [7]


def test_a_plan_is_neither_changed_nor_kept() -> None:
    """2881: what the caller does with its lists and objects afterwards, or gets to see in them, is its own affair."""
    for seed in range(10):
        d = at_random(Random(seed), seed % 5)
        d.submit(prompt=9, params=1)
        plan = d.plan()
        before = copy.deepcopy(plan)
        d.execute(plan)
        assert plan == before
        for data in plan.scheduled_new_reqs:
            data.prompt_token_ids[:] = [0] * len(data.prompt_token_ids)
            for ids in data.block_ids:
                ids.clear()
        cached = plan.scheduled_cached_reqs
        for column in (cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, plan.num_scheduled_tokens):
            column.clear()
        d.checker.check_batch(drafts=False)
        d.step()


def test_token_arrays_are_not_kept_either() -> None:
    prompt = np.arange(10, dtype=np.int32)
    batch = batch_of(NewRequestData("a", prompt, ([1, 2, 3],)))
    update_states(batch, SchedulerOutput(preempted_req_ids={"a"}))
    kept = batch.token_ids_of("a").tolist()
    prompt[:] = 0
    assert batch.token_ids_of("a").tolist() == kept == list(range(10))
    again = np.arange(20, 30, dtype=np.int32)
    plan = cached({"a": (10, 0, 0)}, {"a": [4, 5, 6]}, resumed="a")
    plan.scheduled_cached_reqs.all_token_ids = {"a": again}
    update_states(batch, plan)
    again[:] = 0
    assert batch.token_ids_of("a").tolist() == list(range(20, 30))
