"""Is this SchedulerOutput possible? Asked before anything moves, so that a bad one leaves the batch as it was.

The rules work on the arrays that reading made, all requests at once; only the few that enter or leave are looked at one
by one. A rule that fails names the request that broke it, with the numbers.
"""

from __future__ import annotations

import struct

import numpy as np
from jaxtyping import Int, Int32

from jaxrunner.batch import malformed
from jaxrunner.batch.errors import SchedulerOutputError, refuse
from jaxrunner.batch.input_batch import InputBatch
from jaxrunner.batch.request_state import NO_INDEX
from jaxrunner.batch.step_plan import StepPlan, leaving_indices, read_plan
from jaxrunner.batch.validate_blocks import check_blocks, check_owners
from jaxrunner.protocol import SchedulerOutput


def validate(batch: InputBatch, so: SchedulerOutput) -> None:
    """Checks ``so`` against ``batch`` and itself; changes nothing.

    Raises:
        SchedulerOutputError: naming the request, the numbers and what was expected.
    """
    read_and_validate(batch, so, keep=False)


def read_and_validate(batch: InputBatch, so: SchedulerOutput, *, keep: bool = True) -> StepPlan:
    """``read_plan``, checked.

    Args:
        keep: the plan is going to be merged, so the books of who holds which block follow it.

    Raises:
        SchedulerOutputError: as ``validate``.
    """
    try:
        plan = read_plan(batch, so)
    except (KeyError, IndexError, TypeError, ValueError, struct.error) as error:
        malformed.check_form(batch, so)
        raise SchedulerOutputError(str(error)) from error
    malformed.check_lengths(so)
    leaving = leaving_indices(batch, so) if plan.changed else []
    _check_names(batch, so, plan, len(leaving))
    _check_counts(batch, so, plan)
    if plan.states:
        _check_entering(batch, so, plan)
    known, drafts = _known_tokens(batch, so, plan), _check_drafts(batch, so, plan)
    end = plan.computed + (plan.each or plan.counts)
    bad = (plan.computed < 0) | (end > known + drafts) | (end > batch.max_model_len + batch.num_speculative_tokens)
    if np.count_nonzero(bad):
        i = int(bad.argmax())
        refuse(
            f"request {plan.ids[i]!r}: {plan.computed[i]} computed + {end[i] - plan.computed[i]} scheduled tokens, and"
            f" it has {(known + drafts)[i]} (drafts included); max_model_len is {batch.max_model_len}"
        )
    if plan.drafts is not None:
        _check_all_drafts_run(plan, end, known, np.broadcast_to(drafts, known.shape))
    check_blocks(batch, plan, end)
    check_owners(batch, plan, end, leaving, keep)
    return plan


def _check_names(batch: InputBatch, so: SchedulerOutput, plan: StepPlan, num_leaving: int) -> None:
    if plan.in_order is None:
        plan.in_order = list(so.num_scheduled_tokens) == plan.ids
    if not plan.in_order:  # in order, a dictionary's keys prove that nobody stands twice and nobody is missing
        malformed.check_names(batch, so)
    if not plan.changed:
        return
    scheduled, resumed = so.num_scheduled_tokens, so.scheduled_cached_reqs.resumed_req_ids
    new = {data.req_id for data in so.scheduled_new_reqs}
    for req_id in so.finished_req_ids:
        if req_id in scheduled and req_id not in new:
            refuse(f"request {req_id!r} is both finished and scheduled as cached")
    gone = [r for r in so.preempted_req_ids if r in scheduled and r not in new]
    gone += [plan.ids[i] for i in (plan.indices == NO_INDEX).nonzero()[0].tolist()]
    for req_id in gone:
        if req_id not in resumed:
            refuse(f"request {req_id!r} was preempted: name it in resumed_req_ids and send all its blocks")
    known = batch.requests
    for req_id in new:
        if req_id in known and req_id not in so.finished_req_ids:
            refuse(f"request {req_id!r} is new, and the runner has one of that id: finish it first")
    if stray := sorted(r for r in resumed if r not in scheduled or r in new):
        refuse(f"resumed requests {stray} are not in scheduled_cached_reqs")
    if unknown := sorted(r for r in so.preempted_req_ids if r not in known and r not in so.finished_req_ids):
        refuse(f"preempted requests {unknown} are unknown to the runner")
    available = batch.num_free_indices + num_leaving
    if len(plan.states) > available:
        refuse(
            f"{len(plan.states)} requests enter and {available} of max_num_reqs={batch.max_num_reqs} request indices"
            " are free: unscheduled requests keep theirs until they are finished or preempted"
        )


def _check_counts(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> None:
    total, counts = so.total_num_scheduled_tokens, plan.counts
    added = plan.each * len(plan.ids) if counts is None else int(counts.sum(dtype=np.int64))
    if added != total:
        refuse(f"num_scheduled_tokens adds up to {added}, total_num_scheduled_tokens is {total}")
    if counts is not None and len(counts) and counts.min() < 1:
        i = int(counts.argmin())
        refuse(f"request {plan.ids[i]!r} is scheduled for {counts[i]} tokens; at least 1 is needed")
    if total > batch.max_num_batched_tokens:
        refuse(f"{total} tokens are scheduled, the budget max_num_batched_tokens is {batch.max_num_batched_tokens}")


def _check_entering(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> None:
    """Lengths and tokens of new requests, and of those that come back with tokens sent along."""
    for data, tokens in zip(so.scheduled_new_reqs, plan.tokens, strict=False):
        name, prompt = f"request {data.req_id!r}", len(data.prompt_token_ids)
        if not prompt:
            refuse(f"{name} has an empty prompt")
        if len(tokens) < prompt:
            refuse(f"{name}: prefill_token_ids ({len(tokens)}) must hold the whole prompt ({prompt})")
        if len(tokens) > batch.max_model_len:
            refuse(f"{name} has {len(tokens)} tokens, max_model_len is {batch.max_model_len}")
    sent = so.scheduled_cached_reqs.all_token_ids
    for state, tokens in zip(plan.states, plan.tokens, strict=True):
        if state.req_id in sent and not state.num_prompt_tokens <= len(tokens) <= batch.max_model_len:
            refuse(
                f"request {state.req_id!r}: all_token_ids has {len(tokens)} tokens, expected from its prompt's"
                f" {state.num_prompt_tokens} to max_model_len {batch.max_model_len}"
            )
    # What a preempted request kept was looked at when it came; what lies in ``staged`` is looked at in one go.
    num_new = len(so.scheduled_new_reqs)
    came = [
        (s, t) for i, (s, t) in enumerate(zip(plan.states, plan.tokens, strict=True)) if i < num_new or s.req_id in sent
    ]
    arrays = [tokens for _, tokens in came if tokens.base is not plan.staged.base]
    if _outside(batch, plan.staged) or any(_outside(batch, tokens) for tokens in arrays):
        for state, tokens in came:
            what = "all_token_ids" if state.req_id in sent else "tokens"
            _check_vocabulary(batch, state.req_id, what, tokens)


def _known_tokens(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> Int32[np.ndarray, "n"]:
    """Tokens that each request has in this step, drafts not counted."""
    cached, k = so.scheduled_cached_reqs, plan.num_cached
    known = batch.num_tokens[plan.indices]
    new = len(plan.ids) - k
    lengths = list(map(len, plan.tokens))
    known[plan.returning] = lengths[new:]
    if cached.new_token_ids and any(map(len, cached.new_token_ids)):
        _join_new_tokens(batch, so, known)
    if plan.outputs is not None:
        if plan.outputs.min() < 0:
            refuse(f"num_output_tokens are not negative, got {cached.num_output_tokens}")
        prompts = batch.columns["num_prompt_tokens"][plan.indices]
        prompts[plan.returning] = [state.num_prompt_tokens for state in plan.states[new:]]
        np.minimum(known, prompts + plan.outputs, out=known)
    return np.concatenate((known, np.array(lengths[:new], np.int32))) if new else known


def _join_new_tokens(batch: InputBatch, so: SchedulerOutput, known: Int32[np.ndarray, "k"]) -> None:
    """Tokens another stage sampled must join on to those the batch has; ``known`` grows by those that are new."""
    cached = so.scheduled_cached_reqs
    for i, (req_id, tokens) in enumerate(zip(cached.req_ids, cached.new_token_ids, strict=True)):
        if not len(tokens):
            continue
        malformed.check_tokens(f"request {req_id!r}: its new_token_ids", tokens)
        _check_vocabulary(batch, req_id, "new_token_ids", np.asarray(tokens))
        computed, have = cached.num_computed_tokens[i], int(known[i])
        if not 0 <= computed <= have or computed + len(tokens) > batch.max_model_len:
            refuse(
                f"request {req_id!r}: new_token_ids are its tokens {computed} to {computed + len(tokens)}; it has"
                f" {have}, and max_model_len is {batch.max_model_len}"
            )
        known[i] = max(have, computed + len(tokens))


def _check_drafts(batch: InputBatch, so: SchedulerOutput, plan: StepPlan) -> int | Int32[np.ndarray, "n"]:
    """How many drafts each request has."""
    drafts = plan.drafts
    if drafts is None:
        return 0
    scheduled = plan.each if plan.counts is None else plan.counts[drafts.positions]
    too_many, alone = drafts.lengths > batch.num_speculative_tokens, drafts.lengths >= scheduled
    bad = too_many | alone
    if np.count_nonzero(bad):
        at = int(bad.argmax())
        req_id, length = plan.ids[int(drafts.positions[at])], drafts.lengths[at]
        if too_many[at]:
            refuse(
                f"request {req_id!r} has {length} draft tokens,"
                f" num_speculative_tokens is {batch.num_speculative_tokens}"
            )
        refuse(
            f"request {req_id!r} has {length} draft tokens among {so.num_scheduled_tokens[req_id]} scheduled ones:"
            " at least one more must be scheduled"
        )
    if _outside(batch, drafts.token_ids):
        for req_id, tokens in so.scheduled_spec_decode_tokens.items():
            _check_vocabulary(batch, req_id, "draft tokens", np.asarray(tokens))
    if drafts.each:
        return drafts.each
    lengths = np.zeros(len(plan.ids), np.int32)
    lengths[drafts.positions] = drafts.lengths
    return lengths


def _check_all_drafts_run(
    plan: StepPlan, end: Int32[np.ndarray, "n"], known: Int32[np.ndarray, "n"], drafts: Int32[np.ndarray, "n"]
) -> None:
    """Drafts are the last tokens of a row: who has any runs up to the last of them."""
    short = (drafts > 0) & (end < known + drafts)
    if np.count_nonzero(short):
        i = int(short.argmax())
        refuse(
            f"request {plan.ids[i]!r}: {plan.computed[i]} computed + {end[i] - plan.computed[i]} scheduled tokens end"
            f" before its {known[i]} tokens and {drafts[i]} drafts do: schedule all drafts that are sent"
        )


def _outside(batch: InputBatch, token_ids: Int32[np.ndarray, "n"]) -> bool:
    # Read without its sign, a negative number is larger than every token id.
    return len(token_ids) > 0 and int(token_ids.view(np.uint32).max()) >= batch.vocab_size


def _check_vocabulary(batch: InputBatch, req_id: str, what: str, token_ids: Int[np.ndarray, "n"]) -> None:
    bad = token_ids[(token_ids < 0) | (token_ids >= batch.vocab_size)]
    if len(bad):
        refuse(
            f"request {req_id!r}: token id {bad[0]} among its {what} is outside the vocabulary"
            f" 0..{batch.vocab_size - 1}"
        )
