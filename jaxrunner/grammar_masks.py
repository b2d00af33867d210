"""Allowed tokens of a step's requests with structured output: checked, and cut into uploads. Others need none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import numpy as np
from jaxtyping import Int32

from jaxrunner.batch import InputBatch
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.sampling_params import SamplingParams


def check_grammar_bitmask(batch: InputBatch, so: SchedulerOutput) -> None:
    """Is there a mask for every request with structured output that samples in this step, and for no other?

    Raises:
        ValueError: naming the request or the shape.
    """

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    given: set[str] = set()
    if (output := so.grammar_bitmask) is not None:
        ids, mask = output.structured_output_request_ids, output.grammar_bitmask
        given, words = set(ids), -(-batch.vocab_size // 32)
        if len(given) != len(ids):
            refuse(f"requests stand twice in grammar_bitmask: {ids}")
        if mask.shape != (len(ids), words) or mask.dtype != np.int32:
            refuse(f"grammar_bitmask must be int32 [{len(ids)}, {words}], got {mask.dtype} {list(mask.shape)}")
    new = {data.req_id: data for data in so.scheduled_new_reqs}
    for req_id in given:
        if req_id not in so.num_scheduled_tokens:
            refuse(f"request {req_id!r} has a grammar_bitmask and is not scheduled")
        params = new[req_id].sampling_params if req_id in new else batch.requests[req_id].sampling_params
        if not _has_grammar(params):
            refuse(f"request {req_id!r} has a grammar_bitmask and no structured_outputs in its sampling parameters")
    for req_id, data in new.items():
        if req_id not in given and _has_grammar(data.sampling_params):
            known = len(data.prompt_token_ids if data.prefill_token_ids is None else data.prefill_token_ids)
            if data.num_computed_tokens + so.num_scheduled_tokens.get(req_id, 0) >= known:
                refuse(f"request {req_id!r} has structured_outputs and samples in this step, without grammar_bitmask")


def grammar_uploads(
    batch: InputBatch, so: SchedulerOutput, capacity: int, padding: int
) -> Iterator[tuple[Int32[np.ndarray, "P"], Int32[np.ndarray, "P words"]]]:
    """(request indices, masks), ``capacity`` rows at a time; an index of ``padding`` stands for no request."""
    if so.grammar_bitmask is None:
        return
    ids, mask = so.grammar_bitmask.structured_output_request_ids, so.grammar_bitmask.grammar_bitmask
    indices = [batch.requests[req_id].request_index for req_id in ids]
    for at in range(0, len(ids), capacity):
        part = indices[at : at + capacity]
        index, words = np.full(capacity, padding, np.int32), np.zeros((capacity, mask.shape[1]), np.int32)
        index[: len(part)], words[: len(part)] = part, mask[at : at + len(part)]
        yield index, words


def _has_grammar(params: SamplingParams | None) -> bool:
    return params is not None and params.structured_outputs is not None
