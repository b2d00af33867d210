"""Is this SchedulerOutput possible? Asked before anything moves, so that a bad one leaves the batch as it was."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Sized
from typing import NoReturn

import numpy as np

from jaxrunner.batch.errors import SchedulerOutputError
from jaxrunner.batch.input_batch import InputBatch
from jaxrunner.batch.request_state import NO_INDEX, CachedRequestState
from jaxrunner.protocol import NewRequestData, SchedulerOutput, TokenIds
from jaxrunner.sampling_params import SamplingParams

_MOST_BLOCKS = 2**27  # ids that stay int32 when a block is split into up to 16 kernel blocks


def validate(batch: InputBatch, so: SchedulerOutput) -> None:
    """Checks ``so`` against ``batch`` and itself; changes nothing.

    Raises:
        SchedulerOutputError: naming the request, the numbers and what was expected.
    """
    _check_ids(batch, so)
    _check_counts(batch, so)
    for data in so.scheduled_new_reqs:
        _check_new(batch, so, data)
        _check_sampling(batch, data.req_id, data.sampling_params, len(data.prompt_token_ids))
    _check_cached(batch, so)


def _fail(message: str) -> NoReturn:
    raise SchedulerOutputError(message)


def _check_ids(batch: InputBatch, so: SchedulerOutput) -> None:
    cached, known = so.scheduled_cached_reqs, batch.requests
    ids = cached.req_ids
    columns: dict[str, Sized] = {
        "new_block_ids": cached.new_block_ids,
        "num_computed_tokens": cached.num_computed_tokens,
    }
    optional: dict[str, Sized] = {"num_output_tokens": cached.num_output_tokens, "new_token_ids": cached.new_token_ids}
    columns |= {name: column for name, column in optional.items() if column}
    for name, column in columns.items():
        if len(column) != len(ids):
            _fail(f"scheduled_cached_reqs.{name} has {len(column)} entries for {len(ids)} requests")
    if ids == batch.scheduled_ids and not so.scheduled_new_reqs and not so.finished_req_ids:
        if not cached.resumed_req_ids and not so.preempted_req_ids:
            return
    id_set = set(ids)
    if len(id_set) != len(ids):
        _fail(f"requests stand twice in scheduled_cached_reqs: {sorted(r for r in id_set if ids.count(r) > 1)}")
    new_ids = [data.req_id for data in so.scheduled_new_reqs]
    if len(set(new_ids)) != len(new_ids):
        _fail(f"requests stand twice in scheduled_new_reqs: {sorted(r for r in set(new_ids) if new_ids.count(r) > 1)}")
    for req_id in ids:
        if req_id not in known:
            _fail(f"request {req_id!r} is scheduled as cached, and the runner does not know it: send it as new")
        if req_id in so.finished_req_ids:
            _fail(f"request {req_id!r} is both finished and scheduled as cached")
        without_index = known[req_id].request_index == NO_INDEX or req_id in so.preempted_req_ids
        if without_index and req_id not in cached.resumed_req_ids:
            _fail(f"request {req_id!r} was preempted: name it in resumed_req_ids and send all its blocks")
    for req_id in new_ids:
        if req_id in id_set:
            _fail(f"request {req_id!r} is both new and cached")
        if req_id in known and req_id not in so.finished_req_ids:
            _fail(f"request {req_id!r} is new, and the runner has one of that id: finish it first")
    if stray := sorted(cached.resumed_req_ids - id_set):
        _fail(f"resumed requests {stray} are not in scheduled_cached_reqs")
    if unknown := sorted(r for r in so.preempted_req_ids if r not in known and r not in so.finished_req_ids):
        _fail(f"preempted requests {unknown} are unknown to the runner")
    _check_capacity(batch, so)


def _check_capacity(batch: InputBatch, so: SchedulerOutput) -> None:
    def freed(ids: set[str]) -> int:
        return sum(1 for r in ids if r in batch.requests and batch.requests[r].request_index != NO_INDEX)

    resumed = so.scheduled_cached_reqs.resumed_req_ids
    available = batch.num_free_indices + freed(so.finished_req_ids | so.preempted_req_ids | resumed)
    needed = len(so.scheduled_new_reqs) + len(resumed)
    if needed > available:
        _fail(
            f"{needed} requests enter and {available} of max_num_reqs={batch.max_num_reqs} request indices are free:"
            " unscheduled requests keep theirs until they are finished or preempted"
        )


def _check_counts(batch: InputBatch, so: SchedulerOutput) -> None:
    scheduled, total = so.num_scheduled_tokens, so.total_num_scheduled_tokens
    expected = len(so.scheduled_cached_reqs.req_ids) + len(so.scheduled_new_reqs)
    if len(scheduled) != expected:
        ids = {*so.scheduled_cached_reqs.req_ids, *(d.req_id for d in so.scheduled_new_reqs)}
        _fail(
            "num_scheduled_tokens must name the new and the cached requests, no others; it differs in"
            f" {sorted(ids ^ scheduled.keys())}"
        )
    counts = list(scheduled.values())
    _check_integers("num_scheduled_tokens", counts)
    if sum(counts) != total:
        _fail(f"num_scheduled_tokens adds up to {sum(counts)}, total_num_scheduled_tokens is {total}")
    if counts and min(counts) < 1:
        bad = next(r for r, c in scheduled.items() if c < 1)
        _fail(f"request {bad!r} is scheduled for {scheduled[bad]} tokens; at least 1 is needed")
    if total > batch.max_num_batched_tokens:
        _fail(f"{total} tokens are scheduled, the budget max_num_batched_tokens is {batch.max_num_batched_tokens}")
    for req_id, drafts in so.scheduled_spec_decode_tokens.items():
        if req_id not in scheduled:
            _fail(f"request {req_id!r} has draft tokens and is not scheduled")
        if len(drafts) > batch.num_speculative_tokens:
            _fail(
                f"request {req_id!r} has {len(drafts)} draft tokens,"
                f" num_speculative_tokens is {batch.num_speculative_tokens}"
            )
        if len(drafts) >= scheduled[req_id]:
            _fail(
                f"request {req_id!r} has {len(drafts)} draft tokens among {scheduled[req_id]} scheduled ones:"
                " at least one more must be scheduled"
            )
        _check_token_ids(batch, req_id, "draft tokens", drafts)


def _check_new(batch: InputBatch, so: SchedulerOutput, data: NewRequestData) -> None:
    prefill = data.prompt_token_ids if data.prefill_token_ids is None else data.prefill_token_ids
    name, n = f"request {data.req_id!r}", len(prefill)
    if not len(data.prompt_token_ids):
        _fail(f"{name} has an empty prompt")
    if n < len(data.prompt_token_ids):
        _fail(f"{name}: prefill_token_ids ({n}) must hold the whole prompt ({len(data.prompt_token_ids)})")
    if n > batch.max_model_len:
        _fail(f"{name} has {n} tokens, max_model_len is {batch.max_model_len}")
    _check_token_ids(batch, data.req_id, "tokens", prefill)
    end = data.num_computed_tokens + so.num_scheduled_tokens.get(data.req_id, 0)
    if data.req_id not in so.num_scheduled_tokens:
        _fail(f"{name} is new and not in num_scheduled_tokens")
    known = n + len(so.scheduled_spec_decode_tokens.get(data.req_id, ()))
    if data.num_computed_tokens < 0 or end > known:
        _fail(
            f"{name}: {data.num_computed_tokens} computed + {so.num_scheduled_tokens[data.req_id]} scheduled,"
            f" and it has {known} tokens"
        )
    _check_blocks(batch, data.req_id, data.block_ids, held=(0,) * len(batch.block_table), end=end)


def _check_cached(batch: InputBatch, so: SchedulerOutput) -> None:
    cached = so.scheduled_cached_reqs
    k = len(cached.req_ids)
    if not k:
        return
    scheduled = so.num_scheduled_tokens
    missing = [r for r in cached.req_ids if r not in scheduled]
    if missing:
        _fail(f"requests {missing} are cached and not in num_scheduled_tokens")
    counts = np.fromiter(map(scheduled.__getitem__, cached.req_ids), np.int64, k)
    _check_integers("num_computed_tokens", cached.num_computed_tokens)
    computed = np.array(cached.num_computed_tokens, np.int64)
    end = computed + counts
    states = [batch.requests[r] for r in cached.req_ids]
    indices = np.fromiter((s.request_index for s in states), np.intp, k)
    known = batch.num_tokens[indices].astype(np.int64)
    if cached.resumed_req_ids:  # some may have an index still, and lose it in this step
        for i, req_id in enumerate(cached.req_ids):
            if req_id in cached.resumed_req_ids:
                known[i] = _check_returning(batch, so, states[i])
    if any(map(len, cached.new_token_ids)):
        known = _check_new_token_ids(batch, so, known)
    if cached.num_output_tokens:
        _check_integers("num_output_tokens", cached.num_output_tokens)
        if min(cached.num_output_tokens) < 0:
            _fail(f"num_output_tokens are not negative, got {cached.num_output_tokens}")
        prompts = np.fromiter((s.num_prompt_tokens for s in states), np.int64, k)
        known = np.minimum(known, prompts + np.array(cached.num_output_tokens, np.int64))
    if so.scheduled_spec_decode_tokens:
        drafts = so.scheduled_spec_decode_tokens
        known = known + np.fromiter((len(drafts.get(r, ())) for r in cached.req_ids), np.int64, k)
    bad = (computed < 0) | (end > known) | (end > batch.max_model_len + batch.num_speculative_tokens)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        _fail(
            f"request {cached.req_ids[i]!r}: {computed[i]} computed + {counts[i]} scheduled tokens, and it has"
            f" {known[i]} (drafts included); max_model_len is {batch.max_model_len}"
        )
    _check_capacity_of_cached(batch, so, indices, end)


def _check_returning(batch: InputBatch, so: SchedulerOutput, state: CachedRequestState) -> int:
    """How many tokens a resumed request comes back with."""
    tokens = so.scheduled_cached_reqs.all_token_ids.get(state.req_id)
    if tokens is None:
        return len(batch.token_ids_of(state.req_id))
    if not state.num_prompt_tokens <= len(tokens) <= batch.max_model_len:
        _fail(
            f"request {state.req_id!r}: all_token_ids has {len(tokens)} tokens, expected from its prompt's"
            f" {state.num_prompt_tokens} to max_model_len {batch.max_model_len}"
        )
    _check_token_ids(batch, state.req_id, "all_token_ids", tokens)
    return len(tokens)


def _check_new_token_ids(batch: InputBatch, so: SchedulerOutput, known: np.ndarray) -> np.ndarray:
    """Tokens another stage sampled must join on to those the batch has; how many each request then has."""
    cached, after = so.scheduled_cached_reqs, known.copy()
    for i, (req_id, tokens) in enumerate(zip(cached.req_ids, cached.new_token_ids, strict=True)):
        if not len(tokens):
            continue
        _check_token_ids(batch, req_id, "new_token_ids", tokens)
        computed, have = cached.num_computed_tokens[i], int(known[i])
        if computed > have or computed + len(tokens) > batch.max_model_len:
            _fail(
                f"request {req_id!r}: new_token_ids are its tokens {computed} to {computed + len(tokens)}; it has"
                f" {have}, and max_model_len is {batch.max_model_len}"
            )
        after[i] = max(have, computed + len(tokens))
    return after


def _check_sampling(batch: InputBatch, req_id: str, params: SamplingParams | None, num_prompt_tokens: int) -> None:
    if params is not None:
        try:
            batch.record_of(req_id, params, num_prompt_tokens)
        except ValueError as e:
            _fail(f"request {req_id!r}: {e}")


def _check_integers(name: str, values: Collection[object]) -> None:
    kinds = set(map(type, values))
    if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
        _fail(f"{name} must hold integers, got {sorted(kind.__name__ for kind in kinds)}")


def _check_capacity_of_cached(batch: InputBatch, so: SchedulerOutput, indices: np.ndarray, end: np.ndarray) -> None:
    cached = so.scheduled_cached_reqs
    held = [table.num_blocks[indices].astype(np.int64) for table in batch.block_table.tables]
    for i, (req_id, blocks) in enumerate(zip(cached.req_ids, cached.new_block_ids, strict=True)):
        resumed = req_id in cached.resumed_req_ids
        if resumed and not blocks:
            _fail(f"request {req_id!r} is resumed without blocks: send all its block ids")
        if blocks:
            before = tuple(0 if resumed else int(h[i]) for h in held)
            _check_blocks(batch, req_id, blocks, before, int(end[i]))
            for group, h in enumerate(held):
                h[i] = before[group] + len(blocks[group]) * batch.block_table[group].ratio
    for group, h in enumerate(held):
        room = h * batch.block_table[group].block_size
        if (end > room).any():
            i = int(np.flatnonzero(end > room)[0])
            _fail(
                f"request {cached.req_ids[i]!r}: position {end[i] - 1} lies behind its {h[i]} blocks of"
                f" {batch.block_table[group].block_size} tokens in cache group {group}"
            )


def _check_blocks(
    batch: InputBatch, req_id: str, block_ids: Sequence[Sequence[int]], held: Sequence[int], end: int
) -> None:
    name = f"request {req_id!r}"
    if len(block_ids) != len(batch.block_table):
        _fail(f"{name} brings blocks for {len(block_ids)} cache groups, there are {len(batch.block_table)}")
    for group, ids in enumerate(block_ids):
        table = batch.block_table[group]
        count = held[group] + len(ids) * table.ratio
        if count > table.width:
            _fail(f"{name} would hold {count} blocks in cache group {group}, its table has {table.width} columns")
        if count * table.block_size < end:
            _fail(
                f"{name}: position {end - 1} lies behind its {count} blocks of {table.block_size} tokens"
                f" in cache group {group}"
            )
        if len(ids):
            _check_integers(f"{name}: block ids of cache group {group}", ids)
            limit = _MOST_BLOCKS if batch.num_blocks is None else batch.num_blocks
            if min(ids) < 0 or max(ids) >= limit:
                bad = min(ids) if min(ids) < 0 else max(ids)
                _fail(f"{name} brings block {bad} in cache group {group}; its block ids are 0..{limit - 1}")


def _check_token_ids(batch: InputBatch, req_id: str, what: str, token_ids: TokenIds) -> None:
    if not len(token_ids):
        return
    array = np.asarray(token_ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        _fail(f"request {req_id!r}: its {what} must be a flat list of integers, got {array.dtype} of {array.ndim} dims")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= batch.vocab_size:
        bad = low if low < 0 else high
        vocabulary = f"0..{batch.vocab_size - 1}"
        _fail(f"request {req_id!r}: token id {bad} among its {what} is outside the vocabulary {vocabulary}")
