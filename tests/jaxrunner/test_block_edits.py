"""Copies and clearings of blocks before a step: what is refused, and that the model attends to what was copied."""

from dataclasses import replace

import numpy as np
import pytest

from jaxrunner.batch import SchedulerOutputError
from jaxrunner.block_edits import EDIT_CAPACITY, block_edits
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.runner import ModelRunner
from tests.jaxrunner.plans import cached, compilations, new


def edited(copies=(), zeros=(), groups=1, num_blocks=65):
    """What the edits do to blocks that hold their own number, clearing with 0; as NumPy sees it."""
    blocks = np.arange(num_blocks)
    so = SchedulerOutput(block_copies=[list(copies)], new_block_ids_to_zero=[list(zeros)])
    edits = block_edits(so, groups, num_blocks)
    for edit in edits:
        assert len(edit.sources) == len(edit.targets) == len(edit.clear) == EDIT_CAPACITY
        values = np.where(edit.clear, 0, blocks[edit.sources])
        there = edit.targets < num_blocks
        blocks[edit.targets[there]] = values[there]
    return blocks, len(edits)


def test_clear_first_then_copy_in_as_many_uploads_as_needed():
    blocks, uploads = edited([(3, 5), (4, 6)], [3])
    assert (blocks[[3, 5, 6, 4]].tolist(), uploads) == ([0, 0, 4, 4], 2)
    copies = [(i, i + 30) for i in range(1, 30)]
    blocks, uploads = edited(copies)
    assert blocks[31:60].tolist() == list(range(1, 30)) and uploads == 2
    assert block_edits(SchedulerOutput(), 1, 65) == []
    assert block_edits(SchedulerOutput(block_copies=[[]]), 1, 65) == []


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"block_copies": [[(1, 0)]]}, "1 -> 0: blocks that can be written are 1..64, got 0"),
        ({"block_copies": [[(65, 1)]]}, "got 65"),
        ({"block_copies": [[(1, -1)]]}, "got -1"),
        ({"block_copies": [[(1, 2), (3, 2)]]}, "3 -> 2: a copy before it writes into one of the two"),
        ({"block_copies": [[(1, 2), (2, 3)]]}, "2 -> 3: a copy before it writes"),
        ({"block_copies": [[], []]}, "block_copies has 2 lists for 1 cache groups"),
        ({"new_block_ids_to_zero": [[0]]}, "new_block_ids_to_zero of cache group 0: .* got 0"),
    ],
)
def test_what_can_not_be_done_is_refused_before_anything_changes(runner: ModelRunner, plan, message):
    with pytest.raises(SchedulerOutputError, match=message):
        runner.execute_model(replace(new("x", [5, 6], 1), **plan))
    assert not runner.batch.requests
    assert block_edits(SchedulerOutput(block_copies=[[(1, 2), (3, 1)]]), 1, 65)  # read first, written later: fine


def test_a_sequence_branches_off_another_in_the_middle_of_a_block(fixture, runner: ModelRunner):
    """b shares two full blocks of a's prompt and copies the third, while a goes on writing into its own."""
    ids = fixture.ids.tolist()
    runner.execute_model(new("a", ids[:11], 1))
    plan = new("b", ids[:11], 40, computed=10)
    plan.scheduled_new_reqs[0].block_ids = ([1, 2, *range(40, 50)],)
    plan = replace(plan, block_copies=[[(3, 40)]])
    plan.scheduled_cached_reqs = cached({"a": 1}, {"a": 11}, {"a": 1}).scheduled_cached_reqs
    plan.num_scheduled_tokens, plan.total_num_scheduled_tokens = {"a": 1, "b": 1}, 2
    late = runner.executables.late
    with compilations() as events:
        runner.execute_model(plan)
    assert not events and runner.executables.late == late
    # Both go on with tokens of their own, up to the end of the block and past it.
    of_a = [runner.batch.token_ids[runner.batch.requests["a"].request_index, 11]]
    assert of_a[0] == fixture.logits[10].argmax()
    k = np.asarray(runner.kv_caches[0].k)
    np.testing.assert_array_equal(k[40, :2], k[3, :2])
    np.testing.assert_allclose(k[40, 2], k[3, 2], atol=1e-5, rtol=0)  # position 10, computed twice
    assert np.abs(k[40, 3] - k[3, 3]).max() > 0.01  # a wrote position 11 into its own block only
    outputs = {"a": 2, "b": 1}
    after = runner.execute_model(cached({"a": 1, "b": 1}, {"a": 12, "b": 11}, outputs), return_logits=True)
    assert np.isfinite(after.logits).all()
    tokens = runner.batch.token_ids[runner.batch.requests["b"].request_index, :12].tolist()
    runner.reset()
    alone = runner.execute_model(new("c", tokens, 5), return_logits=True)
    np.testing.assert_allclose(after.logits[after.req_id_to_index["b"]], alone.logits[0], atol=1e-4, rtol=0)


def test_a_step_without_tokens_still_edits(runner: ModelRunner):
    runner.execute_model(new("a", [5] * 9, 1))
    before = np.asarray(runner.kv_caches[1].v)
    assert np.abs(before[1]).max() > 0
    plan = SchedulerOutput(finished_req_ids={"a"}, new_block_ids_to_zero=[[2]], block_copies=[[(1, 9)]])
    runner.execute_model(plan)
    after = np.asarray(runner.kv_caches[1].v)
    assert not after[2].any()
    np.testing.assert_array_equal(after[9], before[1])
    np.testing.assert_array_equal(np.delete(after, [2, 9], 0), np.delete(before, [2, 9], 0))
