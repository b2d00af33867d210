"""Where a request's tokens come from, and which features a step is told to need."""

import numpy as np
import pytest

from jaxrunner.batch import InputBatch, prepare_inputs, record_sampled, update_states
from jaxrunner.protocol import CachedRequestData, NewRequestData, SchedulerOutput
from jaxrunner.sampling_columns import FILTERED, HELD_BACK, RANDOM
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.shapes import StepShapes
from tests.jaxrunner.batch.books import Driver


def batch_with(params: SamplingParams | None = None, tokens: int = 3) -> InputBatch:
    """One request, A, that has computed its prompt and sampled 7."""
    b = InputBatch(max_num_reqs=2, max_model_len=16, max_num_batched_tokens=16, vocab_size=100, block_sizes=(4,))
    new = NewRequestData("A", list(range(1, tokens + 1)), ([1],), 0, params)
    update_states(b, SchedulerOutput([new], num_scheduled_tokens={"A": tokens}, total_num_scheduled_tokens=tokens))
    record_sampled(b, np.array([[7]], np.int32))
    return b


def cached(count: int, computed: int, outputs: int, blocks: list[int] | None = None, **more) -> SchedulerOutput:
    """A is scheduled for ``count`` tokens; ``resumed`` with all of ``blocks``, or with more of them."""
    resumed = {"A"} if more.pop("resumed", False) else set()
    columns = CachedRequestData(["A"], resumed, [(blocks,) if blocks else None], [computed], [outputs], **more)
    return SchedulerOutput([], columns, {"A": count}, count)


def test_a_resumed_request_has_its_own_tokens_unless_others_are_sent() -> None:
    for sent, expected in ((None, [1, 2, 3, 7]), ([1, 2, 3, 8], [1, 2, 3, 8])):
        b = batch_with()
        update_states(b, SchedulerOutput(preempted_req_ids={"A"}))
        assert b.token_ids_of("A").tolist() == [1, 2, 3, 7] and not b.num_reqs
        tokens = {} if sent is None else {"all_token_ids": {"A": sent}}
        update_states(b, cached(4, 0, 1, [5], resumed=True, **tokens))
        assert b.token_ids_of("A").tolist() == expected
        assert b.block_ids_of("A").tolist() == [5]


def test_preempted_and_resumed_in_one_step_replaces_its_blocks() -> None:
    """The same ids as last step, so only the resumed set says that anything changed."""
    b = batch_with()
    update_states(b, cached(4, 0, 1, [6, 7], resumed=True))
    assert b.block_ids_of("A").tolist() == [6, 7] and b.token_ids_of("A").tolist() == [1, 2, 3, 7]


def test_outputs_the_scheduler_does_not_count_are_dropped() -> None:
    b = batch_with()
    update_states(b, cached(1, 2, 0))
    assert b.token_ids_of("A").tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("params", "flags"),
    [
        (SamplingParams(temperature=0), 0),
        (SamplingParams(), RANDOM),
        (SamplingParams(top_k=3), RANDOM | FILTERED),
        (SamplingParams(temperature=0, min_tokens=2), HELD_BACK),  # 5 tokens needed, 4 there
        (SamplingParams(temperature=0, min_tokens=1), 0),  # 4 needed, 4 there: the next may stop
    ],
    ids=str,
)
def test_features_of_a_step(params: SamplingParams, flags: int) -> None:
    b = batch_with(params)
    so = cached(1, 3, 1)
    update_states(b, so)
    assert int(prepare_inputs(b, so, StepShapes(16, 2, min_block_size=4))["flags"][0]) == flags


def test_padding_of_a_step_after_a_larger_one() -> None:
    """The buffer is the larger step's: nothing of it may be left behind the smaller one's numbers."""
    from jaxrunner.batch import BufferRing

    b = InputBatch(max_num_reqs=4, max_model_len=16, max_num_batched_tokens=16, vocab_size=100, block_sizes=(4,))
    shapes = StepShapes(16, 4, min_block_size=4, token_buckets=(16,))
    ring = BufferRing(shapes.layouts[16].size, depth=1)
    new = [NewRequestData(r, [5, 6, 7], ([i + 1],)) for i, r in enumerate("ABCD")]
    so = SchedulerOutput(new, num_scheduled_tokens=dict.fromkeys("ABCD", 3), total_num_scheduled_tokens=12)
    update_states(b, so)
    prepare_inputs(b, so, shapes, buffers=ring)
    columns = CachedRequestData(["A"], set(), [None], [2], [0])
    so = SchedulerOutput([], columns, {"A": 1}, 1, finished_req_ids=set("BCD"))
    update_states(b, so)
    inputs = prepare_inputs(b, so, shapes, buffers=ring)
    assert inputs.query_start_loc.tolist() == [0, 1, 1, 1, 1]
    assert inputs["idx_mapping"].tolist() == [b.requests["A"].request_index, 4, 4, 4]
    for name in ("num_computed", "num_known", "num_prompt", "num_draft", "logits_indices", "token_ids"):
        assert not inputs[name][1:].any(), name
    assert (inputs["update_cell"] == 2**31 - 1).all()


def test_cells_that_do_not_fit_go_ahead_and_none_twice() -> None:
    """A prefix hit of 12 tokens brings 4 blocks to a step of one token, whose upload has room for 2 cells."""
    b = InputBatch(max_num_reqs=1, max_model_len=16, max_num_batched_tokens=16, vocab_size=100, block_sizes=(4,))
    shapes = StepShapes(16, 1, min_block_size=4, token_buckets=(1, 16))
    new = NewRequestData("A", list(range(13)), ([9, 8, 7, 6],), 12)
    so = SchedulerOutput([new], num_scheduled_tokens={"A": 1}, total_num_scheduled_tokens=1)
    update_states(b, so)
    inputs = prepare_inputs(b, so, shapes)
    (ahead,) = inputs.overflow
    room = inputs.layout.num_updates
    assert room == 2 and ahead.cells.tolist() == [0, 1] and ahead.values.tolist() == [9, 8]
    assert inputs["update_cell"].tolist() == [2, 3] and inputs["update_value"].tolist() == [7, 6]


def test_rows_that_moved_between_steps_have_their_own_counts() -> None:
    """An abort, condensed and reordered: the next plan names the very requests that are left, so nothing seems new."""
    d = Driver()
    for prompt in (3, 1, 6):
        d.submit(prompt=prompt)
    d.step()
    d.step()
    d.abort_now(0)
    d.swap_now(0, 1)
    d.step()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=str)
def test_drafts_follow_rows_that_move_before_the_upload(order: list[int]) -> None:
    b = InputBatch(
        max_num_reqs=2, max_model_len=16, max_num_batched_tokens=16, vocab_size=100, block_sizes=(4,),
        num_speculative_tokens=2,
    )  # fmt: skip
    new = [NewRequestData(r, [5, 6], ([i + 1],)) for i, r in enumerate("AB")]
    update_states(b, SchedulerOutput(new, num_scheduled_tokens={"A": 2, "B": 2}, total_num_scheduled_tokens=4))
    record_sampled(b, np.array([[7], [8]], np.int32))
    so = SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(["A", "B"], set(), [([3],), ([4],)], [2, 2], [1, 1]),
        num_scheduled_tokens={"A": 3, "B": 3},
        total_num_scheduled_tokens=6,
        scheduled_spec_decode_tokens={"A": [11, 12], "B": [21, 22]},
    )
    update_states(b, so)
    b.reorder(order)
    inputs = prepare_inputs(b, so, StepShapes(16, 2, 2, min_block_size=4))
    tokens = [[7, 11, 12], [8, 21, 22]]
    assert inputs["token_ids"][:6].tolist() == tokens[order[0]] + tokens[order[1]]
