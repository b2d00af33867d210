"""A block that a step writes is one request's alone; below the computed tokens of all its holders it may be shared."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from jaxrunner.batch import InputBatch, SchedulerOutputError, prepare_inputs, record_sampled, update_states
from jaxrunner.protocol import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput
from jaxrunner.shapes import StepShapes
from tests.jaxrunner.batch.picture import changes, picture

PROMPT = list(range(10, 19))
SHAPES = StepShapes(64, 6, num_groups=2, min_block_size=4)


def batch() -> InputBatch:
    """a has computed 9 tokens and sampled one more, b is unscheduled after 4 of 12. Blocks of 4 and of 8 tokens; the
    first ones are split in two for the kernels.
    """
    b = InputBatch(
        max_num_reqs=6,
        max_model_len=32,
        max_num_batched_tokens=64,
        vocab_size=100,
        block_sizes=(4, 8),
        kernel_block_sizes=(2, 8),
        num_blocks=50,
    )
    update_states(
        b,
        plan(
            new=[NewRequestData("a", PROMPT, ([1, 2, 3], [1, 2])), NewRequestData("b", [5] * 12, ([11, 12], [11]))],
            counts={"a": 9, "b": 4},
        ),
    )
    record_sampled(b, np.array([[7], [-1]], np.int32))
    update_states(b, plan(cached={"a": 9}))
    record_sampled(b, np.array([[8]], np.int32))
    return b


def plan(
    new: list[NewRequestData] | None = None,
    cached: dict[str, int] | None = None,
    blocks: dict[str, BlockIds] | None = None,
    counts: dict[str, int] | None = None,
    resumed: str = "",
    finished: str = "",
    preempted: str = "",
) -> SchedulerOutput:
    """``cached``: computed tokens by request; one token each unless ``counts`` says else."""
    cached, blocks = cached or {}, blocks or {}
    columns = CachedRequestData(list(cached), set(resumed), [blocks.get(r) for r in cached], list(cached.values()))
    scheduled = {r: 1 for r in cached} | {data.req_id: 1 for data in new or []} | (counts or {})
    return SchedulerOutput(
        new or [],
        columns,
        scheduled,
        sum(scheduled.values()),
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
    )


def hit(req_id: str, *own: list[int], computed: int = 8) -> NewRequestData:
    """A request with a's first 8 tokens, in a's blocks, and blocks of its own behind them."""
    return NewRequestData(req_id, PROMPT, ([1, 2, *own[0]], [1, *own[1]]), computed)


LEGAL: dict[str, Callable[[], SchedulerOutput]] = {
    "a prefix hit beside its holder": lambda: plan([hit("c", [20], [20])], {"a": 10}),
    "several copies of one prompt": lambda: plan([hit("c", [20], [20]), hit("d", [21], [21])], {"a": 10}),
    "a prefix whose holder is unscheduled": lambda: plan([hit("c", [20], [20])]),
    "blocks of who has finished": lambda: plan([NewRequestData("c", [1] * 3, ([3], [2]))], finished="a"),
    "blocks of who is preempted": lambda: plan([NewRequestData("c", [1] * 3, ([3], [2]))], {"b": 4}, preempted="a"),
    "the same block ids in another group": lambda: plan(
        [NewRequestData("c", [1] * 3, ([20], [3]))], {"a": 10}, counts={"c": 3}
    ),
    "back in the step of its preemption, in its own blocks": lambda: plan(
        cached={"a": 0}, blocks={"a": ([3, 2, 1], [2, 1])}, resumed="a", counts={"a": 11}
    ),
    "back into shared blocks": lambda: plan(
        [hit("c", [20], [20])], {"a": 8}, blocks={"a": ([1, 2, 22], [1, 22])}, resumed="a", counts={"a": 3}
    ),
    "two exchange their blocks": lambda: plan(
        cached={"a": 0, "b": 0},
        blocks={"a": ([11, 12, 13], [11, 12]), "b": ([1, 2, 3], [1, 2])},
        resumed="ab",
        counts={"a": 11, "b": 12},
    ),
}

# Who writes, which block, in which group, and who holds it too.
ILLEGAL: dict[str, tuple[Callable[[], SchedulerOutput], str, int, int, str]] = {
    "two new ones in one block": (
        lambda: plan([NewRequestData("c", [1] * 3, ([20], [20])), NewRequestData("d", [1] * 3, ([20], [21]))]),
        "c", 20, 0, "d",
    ),
    "a new one in the block of one that decodes": (
        lambda: plan([NewRequestData("c", [1] * 3, ([3], [20]))], {"a": 10}), "[ac]", 3, 0, "[ac]",
    ),
    "a new one in the block of one that is unscheduled": (
        lambda: plan([NewRequestData("c", [1] * 3, ([20], [11]))]), "c", 11, 1, "b",
    ),
    "a hit on a block that is not wholly computed": (  # 37152
        lambda: plan([NewRequestData("c", [5] * 12, ([11, 12, 20], [11, 20]), 8)], {"b": 4}, counts={"b": 4, "c": 4}),
        "b", 12, 0, "c",
    ),
    "a hit that recomputes what it shares": (
        lambda: plan([hit("c", [20], [20], computed=4)], {"a": 10}, counts={"c": 5}), "c", 2, 0, "a",
    ),
    "one that grows into another's block": (
        lambda: plan(cached={"b": 4}, blocks={"b": ([3], [21])}, counts={"b": 8}), "b", 3, 0, "a",
    ),
    "one that comes back into another's block": (
        lambda: plan(cached={"a": 0}, blocks={"a": ([1, 12, 3], [1, 2])}, resumed="a", counts={"a": 11}),
        "a", 12, 0, "b",
    ),
    "one block twice in a row": (
        lambda: plan([NewRequestData("c", [1] * 6, ([20, 20], [20]))], counts={"c": 6}), "c", 20, 0, "c",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_sharing_below_the_computed_tokens_of_all(name: str) -> None:
    b, so = batch(), LEGAL[name]()
    update_states(b, so)
    inputs = prepare_inputs(b, so, SHAPES)
    written = [inputs.slot_mapping(group)[: inputs.num_tokens].tolist() for group in (0, 1)]
    assert all(len(set(slots)) == len(slots) for slots in written)


@pytest.mark.parametrize("name", ILLEGAL)
def test_writing_where_another_is_refused(name: str) -> None:
    make, writer, block, group, other = ILLEGAL[name]
    b = batch()
    before = picture(b)
    with pytest.raises(SchedulerOutputError) as error:
        update_states(b, make())
    words = rf"request '{writer}'.* positions .* block {block} in cache group {group}.*'{other}'"
    assert re.search(words, str(error.value)), str(error.value)
    assert changes(before, picture(b)) == []
    so = LEGAL["a prefix hit beside its holder"]()
    update_states(b, so)  # and what is right goes through
    assert b.req_ids == ["a", "c"]


def test_nobody_writes_the_null_block() -> None:
    b = batch()
    with pytest.raises(SchedulerOutputError, match="'c'.*block 0 in cache group 1.*null block"):
        update_states(b, plan([NewRequestData("c", [1] * 3, ([20], [0]))]))


def test_the_null_block_stands_for_what_is_no_longer_looked_at() -> None:
    """Below the computed tokens, where a window has passed, any number of requests may have it."""
    b = batch()
    new = [NewRequestData(r, PROMPT, ([0, 0, 20 + i], [0, 20 + i]), 8) for i, r in enumerate("cd")]
    update_states(b, plan(new))
    assert b.block_ids_of("d").tolist() == [0, 1, 0, 1, 42, 43]


def test_a_holder_that_leaves_frees_the_block_for_writing() -> None:
    """The books follow whoever comes and goes, also without validation and without a plan."""
    b = batch()
    shared = plan([hit("c", [20], [20])])
    update_states(b, shared)
    again = plan(cached={"a": 4}, counts={"a": 5})  # a recomputes its second block
    with pytest.raises(SchedulerOutputError, match="'a'.*block 2 in cache group 0.*'c'"):
        update_states(b, again)
    b.remove_request("c")
    update_states(b, again)
    update_states(b, plan([hit("d", [21], [21])]), check=False)
    with pytest.raises(SchedulerOutputError, match="'a'.*block 2 in cache group 0.*'d'"):
        update_states(b, again)
    update_states(b, plan([NewRequestData("e", [1], ([2], [30]))], finished="a", preempted="d"))
