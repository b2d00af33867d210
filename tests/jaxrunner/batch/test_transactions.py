"""A plan is refused with nothing changed, or it is possible: never anything in between.

A possible plan is changed in one place. The naive rules, which share no code with validation, say whether it still is
possible: then all must be as the naive model has it; else there must be the one error, and a batch that is bit for bit
what it was and goes on with the plan as it was before.
"""

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, note, settings
from hypothesis import strategies as st

from jaxrunner.batch import SchedulerOutputError, prepare_inputs, update_states, validate
from jaxrunner.protocol import NewRequestData, SchedulerOutput
from tests.jaxrunner.batch.books import Driver, describe
from tests.jaxrunner.batch.naive_rules import complaint
from tests.jaxrunner.batch.picture import changes, picture
from tests.jaxrunner.batch.scenarios import at_random, wish

Change = Callable[[SchedulerOutput, Driver, Random], None]


def somebody(so: SchedulerOutput, d: Driver, random: Random) -> str:
    """An id: mostly one of the plan, else another that the runner knows, else nobody's."""
    ids = list(so.num_scheduled_tokens) * 3 + list(d.naive.requests) + ["nobody"]
    return random.choice(ids)


def count(so: SchedulerOutput, d: Driver, random: Random) -> None:
    so.num_scheduled_tokens[somebody(so, d, random)] = random.choice((0, -1, 1, 2, 3, 7, 99, 1.5))
    if random.random() < 0.8:
        so.total_num_scheduled_tokens = sum(so.num_scheduled_tokens.values())


def total(so: SchedulerOutput, d: Driver, random: Random) -> None:
    so.total_num_scheduled_tokens += random.choice((-1, 1, 100))


def no_count(so: SchedulerOutput, d: Driver, random: Random) -> None:
    so.num_scheduled_tokens.pop(somebody(so, d, random), None)
    so.total_num_scheduled_tokens = sum(so.num_scheduled_tokens.values())


def another_name(so: SchedulerOutput, d: Driver, random: Random) -> None:
    """Somebody else in the place of a cached or new request, with its count."""
    other, cached = somebody(so, d, random), so.scheduled_cached_reqs
    if so.scheduled_new_reqs and random.random() < 0.4:
        data = random.choice(so.scheduled_new_reqs)
        old, data.req_id = data.req_id, other
    elif cached.req_ids:
        i = random.randrange(len(cached.req_ids))
        old, cached.req_ids[i] = cached.req_ids[i], other
    else:
        return
    if random.random() < 0.7 and other not in so.num_scheduled_tokens:
        so.num_scheduled_tokens[other] = so.num_scheduled_tokens.pop(old)


def twice(so: SchedulerOutput, d: Driver, random: Random) -> None:
    cached = so.scheduled_cached_reqs
    if so.scheduled_new_reqs and random.random() < 0.4:
        so.scheduled_new_reqs.append(copy.deepcopy(random.choice(so.scheduled_new_reqs)))
    elif cached.req_ids:
        i = random.randrange(len(cached.req_ids))
        for column in (cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens):
            column.append(column[i])  # type: ignore[attr-defined]
        cached.new_token_ids.append([])
        cached.new_block_ids.append(None)


def members(so: SchedulerOutput, d: Driver, random: Random) -> None:
    cached = so.scheduled_cached_reqs
    ids: set[str] = random.choice((so.finished_req_ids, so.preempted_req_ids, cached.resumed_req_ids))
    ids ^= {somebody(so, d, random)}


def one_more(so: SchedulerOutput, d: Driver, random: Random) -> None:
    """A new request; there may be no index for it."""
    blocks = tuple([random.choice(free)] for free in d.free)
    so.scheduled_new_reqs.append(NewRequestData("one more", [1, 2], blocks))
    so.num_scheduled_tokens["one more"] = 2
    so.total_num_scheduled_tokens += 2


def computed(so: SchedulerOutput, d: Driver, random: Random) -> None:
    by = random.choice((-9, -4, -1, 1, 4, 0.0))
    cached = so.scheduled_cached_reqs
    if so.scheduled_new_reqs and random.random() < 0.4:
        random.choice(so.scheduled_new_reqs).num_computed_tokens += by  # type: ignore[assignment]
    elif cached.req_ids:
        cached.num_computed_tokens[random.randrange(len(cached.req_ids))] += by  # type: ignore[call-overload]


def outputs(so: SchedulerOutput, d: Driver, random: Random) -> None:
    column = so.scheduled_cached_reqs.num_output_tokens
    if column:
        column[random.randrange(len(column))] += random.choice((-20, -1, 1))


def a_list(so: SchedulerOutput, d: Driver, random: Random) -> None:
    """One entry less, or one more."""
    cached = so.scheduled_cached_reqs
    names = ("new_block_ids", "num_computed_tokens", "num_output_tokens", "new_token_ids")
    column: list[Any] = getattr(cached, random.choice(names))
    if column and random.random() < 0.5:
        column.pop()
    else:
        column.append(0 if column in (cached.num_computed_tokens, cached.num_output_tokens) else None)


def blocks(so: SchedulerOutput, d: Driver, random: Random) -> None:
    """Other ids, fewer, more, none, or for another number of groups."""
    cached, groups = so.scheduled_cached_reqs, d.limits.groups
    mine: list[Any] = [d.blocks[r] for r in d.blocks]
    lists: list[list[list[int]]] = []  # per request, per group
    owners: list[Callable[[Any], None]] = []
    for data in so.scheduled_new_reqs:
        lists.append([list(ids) for ids in data.block_ids])
        owners.append(lambda ids, data=data: setattr(data, "block_ids", ids))
    for i, ids in enumerate(cached.new_block_ids):
        lists.append([list(g) for g in ids] if ids else [[] for _ in groups])
        owners.append(lambda ids, i=i: cached.new_block_ids.__setitem__(i, ids))
    if not lists:
        return
    i, group = random.randrange(len(lists)), random.choice(groups)
    ids = lists[i][group]
    anyone = [block for per_group in mine for block in per_group[group]]
    other = random.choice([0, -1, d.limits.num_blocks, 2**31, "x", *anyone, *anyone])
    match random.randrange(6):
        case 0 if ids:
            ids[random.randrange(len(ids))] = other
        case 1:
            ids.append(other)
        case 2 if ids:
            ids.pop()
        case 3:
            ids += d.free[group][-random.randint(1, 9) :]
        case 4:
            lists[i] = random.choice(([*lists[i], []], lists[i][:-1]))
        case 5:
            owners[i](None) if i >= len(so.scheduled_new_reqs) else owners[i](tuple([] for _ in groups))
            return
    owners[i](tuple(lists[i]))


def tokens(so: SchedulerOutput, d: Driver, random: Random) -> None:
    """A token outside the vocabulary, or no integer, or another one, or one too few."""
    cached = so.scheduled_cached_reqs
    places: list[Any] = [data.prompt_token_ids for data in so.scheduled_new_reqs]
    places += [data.prefill_token_ids for data in so.scheduled_new_reqs if data.prefill_token_ids]
    places += [*so.scheduled_spec_decode_tokens.values(), *cached.all_token_ids.values(), *cached.new_token_ids]
    places = [place for place in places if place]
    if places:
        place = random.choice(places)
        if random.random() < 0.3:
            place.pop()
        else:
            place[random.randrange(len(place))] = random.choice((-1, d.limits.vocab_size, 2**40, 0.5, 3))


def drafts(so: SchedulerOutput, d: Driver, random: Random) -> None:
    req_id, more = somebody(so, d, random), [1, 2, 3][: random.randint(0, 3)]
    so.scheduled_spec_decode_tokens[req_id] = more
    if random.random() < 0.6 and req_id in so.num_scheduled_tokens:
        so.num_scheduled_tokens[req_id] += len(more)
        so.total_num_scheduled_tokens += len(more)


def sampled_elsewhere(so: SchedulerOutput, d: Driver, random: Random) -> None:
    cached = so.scheduled_cached_reqs
    if cached.req_ids:
        i = random.randrange(len(cached.req_ids))
        cached.new_token_ids = [[] for _ in cached.req_ids]
        cached.new_token_ids[i] = [5] * random.randint(1, 4)
        if random.random() < 0.5:
            cached.num_output_tokens = []


def comes_back_with(so: SchedulerOutput, d: Driver, random: Random) -> None:
    """Other tokens for who is resumed; somebody is, if there is anyone."""
    cached = so.scheduled_cached_reqs
    if cached.req_ids and not cached.resumed_req_ids:
        i = random.randrange(len(cached.req_ids))
        cached.resumed_req_ids.add(cached.req_ids[i])
        cached.new_block_ids[i] = tuple(free[-6:] for free in d.free)
    req_id = random.choice(sorted(cached.resumed_req_ids) or ["nobody"])
    cached.all_token_ids = {req_id: [4] * random.choice((0, 1, 5, 13, 24, 25, 60))}


CHANGES: tuple[Change, ...] = (
    count, total, no_count, another_name, twice, members, one_more, computed, outputs, a_list, blocks, tokens, drafts,
    sampled_elsewhere, comes_back_with,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_refused_with_no_change_or_possible(change: Change, seed: int, steps: int) -> None:
    random = Random(seed)
    d = at_random(random, steps)
    wish(d, random)
    d.resume(0)
    plan = d.plan()
    changed = copy.deepcopy(plan)
    change(changed, d, random)
    words, before = complaint(d.naive, changed), picture(d.batch)
    note(str(changed))
    try:
        update_states(d.batch, changed)
    except Exception as error:
        note(f"{type(error).__name__}: {error}")
        assert type(error) is SchedulerOutputError
        assert words is not None, f"refused, and it is possible: {error}"
        assert changes(before, picture(d.batch)) == []
        event("refused")
        d.execute(plan)
        d.step()
        return
    assert words is None, f"not refused: {words}"
    event("possible")
    d.naive.apply(changed)
    d.checker.check_batch()
    if changed.num_scheduled_tokens:
        d.checker.check_step(changed, prepare_inputs(d.batch, changed, d.shapes))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_looking_changes_nothing(seed: int, steps: int) -> None:
    """``validate`` of a possible plan leaves no trace either, and the naive rules agree that it is one."""
    random = Random(seed)
    d = at_random(random, steps)
    wish(d, random)
    plan, before = d.plan(), picture(d.batch)
    note(describe(plan))
    assert complaint(d.naive, plan) is None
    validate(d.batch, plan)
    assert changes(before, picture(d.batch)) == []
    d.execute(plan)


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_every_change_is_refused_at_times(change: Change) -> None:
    """So that the test above does not pass because it never asks."""
    for seed in range(200):
        random = Random(seed)
        d = at_random(random, 1 + seed % 6)
        plan = d.plan()
        change(plan, d, random)
        if complaint(d.naive, plan) is not None:
            return
    raise AssertionError("always possible")
