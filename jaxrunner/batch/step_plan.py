"""A SchedulerOutput, read once: its lists as arrays. Validation and merging both work on these.

Reading changes nothing in the batch. Arrays are in the scheduler's order: the cached requests, then the new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np
from jaxtyping import Int32, Int64

from jaxrunner.batch.block_table import map_to_kernel_blocks
from jaxrunner.batch.input_batch import InputBatch
from jaxrunner.batch.packing import TOKENS_ROOM, equal, lookup, pack, pack_equal, pack_indices, pack_tokens, packer
from jaxrunner.batch.request_state import NO_INDEX, CachedRequestState
from jaxrunner.protocol import BlockIds, SchedulerOutput, TokenIds

_NONE = np.zeros(0, np.intp)
_FEW_DRAFTS = 24  # lists of drafts up to which it is faster to chain them
_FEW_TO_SEARCH = 128  # requests up to which it is faster to search them


@dataclass(slots=True)
class NewBlocks:
    """Blocks that a step brings in one cache group.

    Attributes:
        block_ids: kernel block ids, one request's after the other's.
        lengths: how many each request of ``StepPlan.growing`` gets; None: one each.
    """

    block_ids: Int32[np.ndarray, "m"]
    lengths: list[int] | None


@dataclass(slots=True)
class Drafts:
    """Draft tokens of a step.

    Attributes:
        positions: in the scheduler's order, of the requests that have an entry.
        lengths: how many each has.
        each: that number if it is the same for every scheduled request, else 0.
        token_ids: one request's after the other's.
    """

    positions: Int64[np.ndarray, "n"]
    lengths: Int32[np.ndarray, "n"]
    each: int
    token_ids: Int32[np.ndarray, "m"]


class StepPlan:
    """What ``read_plan`` found.

    Attributes:
        ids: request of each position; the first ``num_cached`` are cached, the others new.
        changed: the requests or their order differ from the last step's, or somebody left.
        indices: request index of each cached request, NO_INDEX for one that was preempted earlier.
        all_indices: the same array, with room for the new ones behind.
        returning: positions of the cached requests that get an index in this step.
        each: tokens scheduled for every request if that is one number, else 0.
        counts: [n], tokens scheduled for each; None where ``each`` says it.
        in_order: num_scheduled_tokens names the requests in this very order. (None: not looked at.)
        computed: [n], tokens computed before the step.
        outputs: [num_cached], output tokens as the scheduler counts them; None if it does not say.
        growing: positions of the requests that get blocks; ``blocks`` has them, by cache group.
        states: of the requests that get an index: the new ones, then the returning ones. For each of them
        tokens: what it has; views that hold until the next plan is read. Those that came as lists lie in ``staged``.
        words: what the batch's int32 columns will hold.
        drafts: None if no request has any.
    """

    __slots__ = (
        "all_indices",
        "blocks", "changed", "computed", "counts", "drafts", "each", "growing", "ids", "in_order", "indices",
        "num_cached", "outputs", "returning", "staged", "states", "tokens", "words",
    )  # fmt: skip

    ids: list[str]
    num_cached: int
    changed: bool
    indices: Int64[np.ndarray, "k"]
    all_indices: Int64[np.ndarray, "n"]
    returning: Int64[np.ndarray, "r"]
    each: int
    counts: Int32[np.ndarray, "n"] | None
    in_order: bool | None
    computed: Int32[np.ndarray, "n"]
    outputs: Int32[np.ndarray, "k"] | None
    growing: Int64[np.ndarray, "g"]
    blocks: list[NewBlocks]
    states: list[CachedRequestState]
    tokens: list[Int32[np.ndarray, "tokens"]]
    staged: Int32[np.ndarray, "tokens"]
    words: list[bytes]
    drafts: Drafts | None


def read_plan(batch: InputBatch, so: SchedulerOutput) -> StepPlan:
    """Reads ``so`` against ``batch``.

    Raises:
        KeyError: an unknown request, or one without a count.
        struct.error, TypeError, ValueError, IndexError: not integers, lists of the wrong length.
            ``jaxrunner.batch.malformed`` finds the words for each of these.
    """
    plan, cached, new = StepPlan(), so.scheduled_cached_reqs, so.scheduled_new_reqs
    plan.num_cached = len(cached.req_ids)
    plan.changed = bool(
        new
        or so.finished_req_ids
        or so.preempted_req_ids
        or cached.resumed_req_ids
        or cached.req_ids != batch.scheduled_ids
    )
    if plan.changed:
        _read_members(batch, so, plan)
    else:
        plan.ids, plan.indices = batch.scheduled_ids, batch.scheduled_indices
        plan.returning = _NONE
        plan.states, plan.tokens = [], []
    _read_numbers(batch, so, plan)
    _read_blocks(batch, so, plan)
    plan.drafts = _read_drafts(batch, so, plan) if so.scheduled_spec_decode_tokens else None
    return plan


def _read_members(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> None:
    cached, new, index_of = so.scheduled_cached_reqs, so.scheduled_new_reqs, batch.index_of
    plan.ids = cached.req_ids + [data.req_id for data in new] if new else cached.req_ids.copy()
    if len(plan.ids) > batch.max_num_reqs:
        raise ValueError("max_num_reqs")
    plan.all_indices = np.empty(len(plan.ids), np.intp)
    indices = pack_indices(plan.all_indices, lookup(index_of, cached.req_ids))
    plan.returning = _NONE
    if cached.resumed_req_ids:
        if any(index_of.get(r, NO_INDEX) != NO_INDEX for r in cached.resumed_req_ids):  # preempted in this very step
            gone = np.zeros(batch.max_num_reqs + 1, bool)
            gone[leaving_indices(batch, so)] = True
            indices[gone[indices]] = NO_INDEX
        plan.returning = (indices == NO_INDEX).nonzero()[0]
    plan.indices = indices
    _read_entering(batch, so, plan)


def leaving_indices(batch: InputBatch, so: SchedulerOutput) -> list[int]:
    """Request indices that are given up: of finished, preempted and resumed requests that hold one."""
    gone = chain(so.finished_req_ids, so.preempted_req_ids, so.scheduled_cached_reqs.resumed_req_ids)
    return list({batch.index_of.get(req_id, NO_INDEX) for req_id in gone} - {NO_INDEX})


def _read_entering(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> None:
    sent = so.scheduled_cached_reqs.all_token_ids
    states: list[CachedRequestState] = []
    sources: list[TokenIds] = []
    for data in so.scheduled_new_reqs:
        prompt = data.prompt_token_ids
        states.append(batch.new_state(data.req_id, data.sampling_params, len(prompt)))
        sources.append(prompt if data.prefill_token_ids is None else data.prefill_token_ids)
    for i in plan.returning.tolist():
        req_id = plan.ids[i]
        states.append(batch.requests[req_id])
        tokens = sent.get(req_id)
        sources.append(batch.kept_token_ids(req_id) if tokens is None else tokens)
    plan.states, plan.tokens = states, []
    if not states:
        return
    staging, at = batch.staging.of(sum(map(len, sources)) + TOKENS_ROOM), 0
    for tokens in sources:
        if isinstance(tokens, np.ndarray):
            plan.tokens.append(_as_int32(tokens))
        else:
            plan.tokens.append(pack_tokens(staging, tokens, at))
            at += len(tokens)
    plan.staged = staging[:at]
    plan.words = batch.words_of(states, plan.tokens)


def _as_int32(tokens: np.ndarray) -> Int32[np.ndarray, "n"]:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError("token ids")
    if tokens.dtype == np.int32:
        return tokens
    out = tokens.astype(np.int32)
    if (out != tokens).any():
        raise ValueError("token ids")
    return out


def _read_numbers(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> None:
    """Scheduled, computed and output tokens, packed in one call."""
    scheduled, cached, ids, k = so.num_scheduled_tokens, so.scheduled_cached_reqs, plan.ids, plan.num_cached
    n = len(ids)
    if len(scheduled) != n:
        raise KeyError("num_scheduled_tokens")
    counts: Sequence[int] = list(scheduled.values())
    plan.each, plan.counts, plan.in_order = 0, None, None
    if n and counts.count(counts[0]) == n and type(counts[0]) is int and counts[0] > 0:
        plan.each, counts = counts[0], ()
    else:
        plan.in_order = list(scheduled) == ids
        if not plan.in_order:
            counts = lookup(scheduled, ids)
    computed, outputs = cached.num_computed_tokens, cached.num_output_tokens
    entering = [data.num_computed_tokens for data in so.scheduled_new_reqs] if n > k else ()
    if len(computed) != k:
        raise ValueError("num_computed_tokens")
    if not k:
        outputs = []
    elif outputs and len(outputs) != k:
        raise ValueError("num_output_tokens")
    reading, behind = batch.reading, n + len(outputs)
    packer(behind + len(counts))(reading, 0, *computed, *entering, *outputs, *counts)
    plan.computed = reading[:n]
    plan.outputs = reading[n:behind] if outputs else None
    if not plan.each:
        plan.counts = reading[behind : behind + n]


def _read_blocks(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> None:
    blocks, k = so.scheduled_cached_reqs.new_block_ids, plan.num_cached
    if len(blocks) != k:
        raise ValueError("new_block_ids")
    plan.growing, plan.blocks = _NONE, []
    num_growing = k - blocks.count(None)
    if not num_growing and len(plan.ids) == k:
        return
    positions, brought = _who_grows(batch, plan, blocks, num_growing)
    if len(plan.ids) > k:
        positions += range(k, len(plan.ids))
        brought += [data.block_ids for data in so.scheduled_new_reqs]
    plan.growing = pack_indices(np.empty(len(positions), np.intp), positions)
    tables = batch.block_table.tables
    if len(tables) == 1:
        plan.blocks = [_flat([ids for (ids,) in brought], tables[0].ratio)]
        return
    groups = list(zip(*brought, strict=True))
    if brought and len(groups) != len(tables):
        raise ValueError("cache groups")
    plan.blocks = [_flat(lists, table.ratio) for lists, table in zip(groups, tables, strict=False)]


def _who_grows(
    batch: InputBatch, plan: StepPlan, blocks: Sequence[BlockIds | None], num_growing: int
) -> tuple[list[int], list[BlockIds]]:
    """Positions of the cached requests that get blocks, and what they get."""
    k = plan.num_cached
    if k > _FEW_TO_SEARCH and num_growing < k // 2:
        # Who runs out of blocks should be them. That it is so is seen sooner than it is found out by searching.
        table = batch.block_table.tables[0]
        end = plan.computed + (plan.each if plan.counts is None else plan.counts)
        grows = end[:k] > table.num_blocks[plan.indices] * table.block_size
        grows[plan.returning] = True
        positions = grows.nonzero()[0].tolist()
        if len(positions) == num_growing and None not in (brought := lookup(blocks, positions)):
            return positions, list(brought)
    return list(compress(range(k), blocks)), list(filter(None, blocks))


def _flat(lists: Sequence[Sequence[int]], ratio: int) -> NewBlocks:
    ids = list(chain.from_iterable(lists))
    flat = pack(np.empty(len(ids), np.int32), ids)
    counts = list(map(len, lists))
    lengths = None if counts.count(1) == len(counts) else counts  # a decode gets one
    if ratio > 1:
        lengths = [ratio * n for n in counts]
        flat = map_to_kernel_blocks(flat, ratio)
    return NewBlocks(flat, lengths)


def _read_drafts(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> Drafts | None:
    drafts, ids = so.scheduled_spec_decode_tokens, plan.ids
    lists, n = list(drafts.values()), len(ids)
    in_order, each = list(drafts) == ids, len(lists[0])
    if in_order and each and n > _FEW_DRAFTS:
        equally_many = pack_equal(lists, each)
        if equally_many is not None:
            return Drafts(batch.ascending[:n], equal(n, each), each, equally_many)
    if in_order:
        positions = batch.ascending[:n]
    else:
        position = {req_id: i for i, req_id in enumerate(ids)}
        positions = pack_indices(np.empty(len(lists), np.intp), lookup(position, list(drafts)))
    counts = list(map(len, lists))
    if not any(counts):
        return None
    flat = list(chain.from_iterable(lists))
    tokens = pack(np.empty(len(flat), np.int32), flat)
    if in_order and counts.count(each) == n:
        return Drafts(positions, equal(n, each), each, tokens)
    return Drafts(positions, pack(np.empty(len(lists), np.int32), counts), 0, tokens)
