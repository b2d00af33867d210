"""Which plans are possible, one request and one block at a time, in the words of the documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxrunner.protocol import SchedulerOutput
from tests.jaxrunner.batch.naive import NaiveBatch


def complaint(naive: NaiveBatch, so: SchedulerOutput) -> str | None:
    """Why ``so`` contradicts what the runner has been told before, or itself; None if it doesn't."""
    for rule in (_names, _counts, _new, _cached, _drafts, _blocks):
        for words in rule(naive, so):
            return words
    return None


def integers(values: Any) -> bool:
    return all(isinstance(v, int) for v in values)


def _names(naive: NaiveBatch, so: SchedulerOutput) -> Iterator[str]:
    cached, new = so.scheduled_cached_reqs, [d.req_id for d in so.scheduled_new_reqs]
    ids, known = cached.req_ids, naive.requests
    for column in (cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, cached.new_token_ids):
        optional = column is cached.num_output_tokens or column is cached.new_token_ids
        if len(column) != len(ids) and not (optional and not column):
            yield "a list is too short or too long"
    if len({*ids, *new}) != len(ids) + len(new):
        yield "a request stands twice"
    if {*ids, *new} != so.num_scheduled_tokens.keys():
        yield "who is scheduled and who has a count differ"
    for req_id in ids:
        if req_id not in known:
            yield f"{req_id} is unknown"
        elif req_id in so.finished_req_ids:
            yield f"{req_id} is finished and cached"
        elif known[req_id].blocks is None or req_id in so.preempted_req_ids:
            if req_id not in cached.resumed_req_ids:
                yield f"{req_id} was preempted and is not resumed"
    for req_id in new:
        if req_id in known and req_id not in so.finished_req_ids:
            yield f"{req_id} is new and known"
    if not cached.resumed_req_ids <= set(ids):
        yield "somebody is resumed and not scheduled"
    if not so.preempted_req_ids <= known.keys() | so.finished_req_ids:
        yield "somebody is preempted and unknown"
    leaving = so.finished_req_ids | so.preempted_req_ids | cached.resumed_req_ids
    staying = [r for r in naive.holders() if r not in leaving]
    if len(staying) + len(new) + len(cached.resumed_req_ids) > naive.limits.max_num_reqs:
        yield "no request index is free"


def _counts(naive: NaiveBatch, so: SchedulerOutput) -> Iterator[str]:
    counts = so.num_scheduled_tokens.values()
    if not integers(counts):
        yield "a count is no integer"
    elif any(count < 1 for count in counts):
        yield "somebody is scheduled for nothing"
    elif sum(counts) != so.total_num_scheduled_tokens:
        yield "the sum is not the total"
    elif sum(counts) > naive.limits.max_num_batched_tokens:
        yield "over the budget"


def _tokens(naive: NaiveBatch, tokens: Any) -> bool:
    return integers(tokens) and all(0 <= t < naive.limits.vocab_size for t in tokens)


def _new(naive: NaiveBatch, so: SchedulerOutput) -> Iterator[str]:
    for data in so.scheduled_new_reqs:
        prefill = data.prompt_token_ids if data.prefill_token_ids is None else data.prefill_token_ids
        if not data.prompt_token_ids or len(prefill) < len(data.prompt_token_ids):
            yield f"{data.req_id} has no prompt, or less than its prompt to feed in"
        if len(prefill) > naive.limits.max_model_len or not _tokens(naive, prefill):
            yield f"{data.req_id} has too many tokens, or one outside the vocabulary"
        if not integers([data.num_computed_tokens]) or data.num_computed_tokens < 0:
            yield f"{data.req_id} has no possible number of computed tokens"
        end = data.num_computed_tokens + so.num_scheduled_tokens[data.req_id]
        yield from _end(so, data.req_id, end, len(prefill))


def _cached(naive: NaiveBatch, so: SchedulerOutput) -> Iterator[str]:
    cached, longest = so.scheduled_cached_reqs, naive.limits.max_model_len
    for i, req_id in enumerate(cached.req_ids):
        request, computed = naive.requests[req_id], cached.num_computed_tokens[i]
        tokens = request.tokens
        if req_id in cached.resumed_req_ids and req_id in cached.all_token_ids:
            tokens = list(cached.all_token_ids[req_id])
            if not request.num_prompt <= len(tokens) <= longest or not _tokens(naive, tokens):
                yield f"{req_id} cannot come back with these tokens"
        known = len(tokens)
        if not integers([computed]) or computed < 0:
            yield f"{req_id} has no possible number of computed tokens"
        if cached.new_token_ids and len(cached.new_token_ids[i]):
            more = cached.new_token_ids[i]
            if computed > known or computed + len(more) > longest or not _tokens(naive, more):
                yield f"{req_id}: tokens sampled elsewhere do not join on"
            known = max(known, computed + len(more))
        if cached.num_output_tokens:
            if not integers(cached.num_output_tokens) or cached.num_output_tokens[i] < 0:
                yield f"{req_id} has no possible number of outputs"
            known = min(known, request.num_prompt + cached.num_output_tokens[i])
        end = computed + so.num_scheduled_tokens[req_id]
        yield from _end(so, req_id, end, known)
        if end > longest + naive.limits.num_speculative_tokens:
            yield f"{req_id} goes past max_model_len"


def _end(so: SchedulerOutput, req_id: str, end: int, known: int) -> Iterator[str]:
    drafts = len(so.scheduled_spec_decode_tokens.get(req_id, []))
    if end > known + drafts:
        yield f"{req_id} has fewer tokens than that"
    elif drafts and end < known + drafts:
        yield f"{req_id}: not all drafts are scheduled"


def _drafts(naive: NaiveBatch, so: SchedulerOutput) -> Iterator[str]:
    for req_id, drafts in so.scheduled_spec_decode_tokens.items():
        if req_id not in so.num_scheduled_tokens:
            yield f"{req_id} has drafts and is not scheduled"
        elif len(drafts) > naive.limits.num_speculative_tokens:
            yield f"{req_id} has too many drafts"
        elif len(drafts) >= so.num_scheduled_tokens[req_id]:
            yield f"{req_id} is scheduled for drafts alone"
        elif not _tokens(naive, drafts):
            yield f"{req_id} has a draft outside the vocabulary"


def _blocks(naive: NaiveBatch, so: SchedulerOutput) -> Iterator[str]:
    """Who would hold what after the plan, and who writes where."""
    limits, cached = naive.limits, so.scheduled_cached_reqs
    leaving = so.finished_req_ids | so.preempted_req_ids | cached.resumed_req_ids
    held = {r: [list(ids) for ids in q.blocks or ()] for r, q in naive.holders().items() if r not in leaving}
    start = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    start |= {data.req_id: data.num_computed_tokens for data in so.scheduled_new_reqs}
    brought = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
    brought |= {data.req_id: data.block_ids for data in so.scheduled_new_reqs}
    for req_id, per_group in brought.items():
        mine = held.setdefault(req_id, [[] for _ in limits.groups])
        if per_group and len(per_group) != len(limits.block_sizes):
            yield f"{req_id} brings blocks for another number of groups"
        for ids, more in zip(mine, per_group or (), strict=False):
            if not integers(more) or any(not 0 <= block < limits.num_blocks for block in more):
                yield f"{req_id} brings a block that does not exist"
            ids += more
    for group, size in enumerate(limits.block_sizes):
        holders: dict[int, list[str]] = {}
        for req_id, per_group in held.items():
            if len(per_group[group]) > -(-limits.max_model_len // size):
                yield f"{req_id} has more blocks than a table row"
            for block in per_group[group]:
                holders.setdefault(block, []).append(req_id)
        kernel_size = limits.kernel_sizes[group]
        for req_id, computed in start.items():
            end = computed + so.num_scheduled_tokens[req_id]
            if end > len(held[req_id][group]) * size:
                yield f"{req_id} has no block for its last position"
                continue
            # A kernel block is what is written or shared.
            for position in range(computed // kernel_size * kernel_size, end):
                block = held[req_id][group][position // size]
                if block == 0 or len(holders[block]) > 1:
                    yield f"{req_id} writes position {position} to block {block}, which {holders[block]} hold"
