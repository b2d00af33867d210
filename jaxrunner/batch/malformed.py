"""Words for a SchedulerOutput that cannot even be read: ids, types and lengths that don't fit together.

Reading (``batch.step_plan``) stops at such a thing without saying what it is; here it is looked for at leisure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import numpy as np

from jaxrunner.batch.errors import refuse
from jaxrunner.batch.input_batch import InputBatch
from jaxrunner.protocol import SchedulerOutput

_INT32 = np.iinfo(np.int32)


def check_form(batch: InputBatch, so: SchedulerOutput) -> None:
    """Raises SchedulerOutputError for the first thing that makes ``so`` unreadable; returns if there is none."""
    check_lengths(so)
    check_names(batch, so)
    check_number_of_requests(batch, so)
    _check_integers("num_scheduled_tokens", so.num_scheduled_tokens.values())
    cached, new = so.scheduled_cached_reqs, so.scheduled_new_reqs
    _check_integers("num_computed_tokens", [*cached.num_computed_tokens, *[d.num_computed_tokens for d in new]])
    _check_integers("num_output_tokens", cached.num_output_tokens)
    for data in new:
        tokens = data.prompt_token_ids if data.prefill_token_ids is None else data.prefill_token_ids
        check_tokens(f"request {data.req_id!r}: its tokens", tokens)
        _check_blocks(batch, data.req_id, data.block_ids)
    for req_id, tokens in cached.all_token_ids.items():
        check_tokens(f"request {req_id!r}: its all_token_ids", tokens)
    for req_id, tokens in zip(cached.req_ids, cached.new_token_ids, strict=False):
        check_tokens(f"request {req_id!r}: its new_token_ids", tokens)
    for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if blocks:
            _check_blocks(batch, req_id, blocks)
    for req_id, drafts in so.scheduled_spec_decode_tokens.items():
        if req_id not in so.num_scheduled_tokens:
            refuse(f"request {req_id!r} has draft tokens and is not scheduled")
        check_tokens(f"request {req_id!r}: its draft tokens", drafts)


def check_lengths(so: SchedulerOutput) -> None:
    """Every list of scheduled_cached_reqs has an entry for each request."""
    cached = so.scheduled_cached_reqs
    columns: dict[str, Sized] = {
        "new_block_ids": cached.new_block_ids,
        "num_computed_tokens": cached.num_computed_tokens,
        "num_output_tokens": cached.num_output_tokens or cached.req_ids,
        "new_token_ids": cached.new_token_ids or cached.req_ids,
    }
    for name, column in columns.items():
        if len(column) != len(cached.req_ids):
            refuse(f"scheduled_cached_reqs.{name} has {len(column)} entries for {len(cached.req_ids)} requests")


def check_names(batch: InputBatch, so: SchedulerOutput) -> None:
    """Who is scheduled: each id once, cached ones known, and num_scheduled_tokens names them all and no others."""
    cached, new = so.scheduled_cached_reqs.req_ids, [data.req_id for data in so.scheduled_new_reqs]
    _check_distinct("scheduled_cached_reqs", cached)
    _check_distinct("scheduled_new_reqs", new)
    for req_id in cached:
        if req_id in new:
            refuse(f"request {req_id!r} is both new and cached")
        if req_id not in batch.requests:
            refuse(f"request {req_id!r} is scheduled as cached, and the runner does not know it: send it as new")
    scheduled, expected = so.num_scheduled_tokens, {*cached, *new}
    if len(scheduled) != len(expected):
        refuse(
            "num_scheduled_tokens must name the new and the cached requests, no others; it differs in"
            f" {sorted(expected ^ scheduled.keys())}"
        )
    if missing := [req_id for req_id in new if req_id not in scheduled]:
        refuse(f"request {missing[0]!r} is new and not in num_scheduled_tokens")
    if missing := [req_id for req_id in cached if req_id not in scheduled]:
        refuse(f"requests {missing} are cached and not in num_scheduled_tokens")


def check_number_of_requests(batch: InputBatch, so: SchedulerOutput) -> None:
    """No more than there are rows."""
    n = len(so.scheduled_cached_reqs.req_ids) + len(so.scheduled_new_reqs)
    if n > batch.max_num_reqs:
        refuse(f"{n} requests are scheduled, and max_num_reqs is {batch.max_num_reqs}")


def _check_distinct(where: str, ids: Sequence[str]) -> None:
    if twice := sorted(req_id for req_id, count in Counter(ids).items() if count > 1):
        refuse(f"requests stand twice in {where}: {twice}")


def check_tokens(what: str, tokens: Any) -> None:
    """A flat list of integers of 32 bits."""
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        refuse(f"{what} must be a flat list of integers, got {array.dtype} of {array.ndim} dims")
    if array.size:
        _check_range(what, int(array.min()), int(array.max()))


def _check_blocks(batch: InputBatch, req_id: str, block_ids: Sequence[Sequence[int]]) -> None:
    if len(block_ids) != len(batch.block_table):
        refuse(
            f"request {req_id!r} brings blocks for {len(block_ids)} cache groups, there are {len(batch.block_table)}"
        )
    for group, ids in enumerate(block_ids):
        _check_integers(f"request {req_id!r}: block ids of cache group {group}", ids)


def _check_integers(what: str, values: Iterable[object]) -> None:
    kinds = set(map(type, values))
    if not all(issubclass(kind, int | np.integer) for kind in kinds):
        refuse(f"{what} must hold integers, got {sorted(kind.__name__ for kind in kinds)}")
    numbers: list[Any] = list(values)
    if numbers:
        _check_range(what, min(numbers), max(numbers))


def _check_range(what: str, low: int, high: int) -> None:
    if low < _INT32.min or high > _INT32.max:
        bad = low if low < _INT32.min else high
        refuse(f"{what} must fit into 32 bits, got {bad}")
