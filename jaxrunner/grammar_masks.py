"""Allowed tokens of a step's requests with structured output: checked, and cut into uploads. Others need none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32

from jaxrunner.batch import InputBatch
from jaxrunner.protocol import NewRequestData, SchedulerOutput
from jaxrunner.sampling_params import SamplingParams


class GrammarMasks:
    """The requests with structured output, and whether each step brings the masks that they need."""

    def __init__(self) -> None:
        self._req_ids: set[str] = set()

    def check(self, batch: InputBatch, so: SchedulerOutput) -> None:
        """Is there a mask for every request with structured output that samples in this step, and for no other?

        A request that sampled without one would take the mask of its last step, which its text has outgrown.

        Raises:
            ValueError: naming the request or the shape.
        """
        given = _checked_ids(so, batch.vocab_size)
        new = {data.req_id: data for data in so.scheduled_new_reqs}
        for req_id in given:
            if req_id not in so.num_scheduled_tokens:
                raise ValueError(f"request {req_id!r} has a grammar_bitmask and is not scheduled")
            has = _has_grammar(new[req_id].sampling_params) if req_id in new else req_id in self._req_ids
            if not has:
                raise ValueError(
                    f"request {req_id!r} has a grammar_bitmask and no structured_outputs in its sampling parameters"
                )
        sampling = [data.req_id for data in new.values() if _has_grammar(data.sampling_params) and _samples(data, so)]
        if self._req_ids:
            sampling += _sampling_again(batch, so, self._req_ids)
        for req_id in sampling:
            if req_id not in given:
                raise ValueError(
                    f"request {req_id!r} has structured_outputs and samples in this step, without grammar_bitmask"
                )

    def note(self, so: SchedulerOutput) -> None:
        """Requests that begin or end with this step."""
        if self._req_ids:
            self._req_ids -= so.finished_req_ids
        self._req_ids.update(data.req_id for data in so.scheduled_new_reqs if _has_grammar(data.sampling_params))


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


def _checked_ids(so: SchedulerOutput, vocab_size: int) -> set[str]:
    if (output := so.grammar_bitmask) is None:
        return set()
    ids, mask = output.structured_output_request_ids, output.grammar_bitmask
    words = -(-vocab_size // 32)
    if len(set(ids)) != len(ids):
        raise ValueError(f"requests stand twice in grammar_bitmask: {ids}")
    if mask.shape != (len(ids), words) or mask.dtype != np.int32:
        raise ValueError(f"grammar_bitmask must be int32 [{len(ids)}, {words}], got {mask.dtype} {list(mask.shape)}")
    return set(ids)


def _has_grammar(params: SamplingParams | None) -> bool:
    return params is not None and params.structured_outputs is not None


def _samples(data: NewRequestData, so: SchedulerOutput) -> bool:
    known = len(data.prompt_token_ids if data.prefill_token_ids is None else data.prefill_token_ids)
    return data.num_computed_tokens + so.num_scheduled_tokens.get(data.req_id, 0) >= known


def _sampling_again(batch: InputBatch, so: SchedulerOutput, wanted: set[str]) -> list[str]:
    """Which of the requests that the batch knows compute their last token in this step.

    A plan that contradicts the batch is refused later, and by a better message.
    """
    cached, found = so.scheduled_cached_reqs, []
    new_tokens = cached.new_token_ids or [()] * len(cached.req_ids)
    for i, req_id in enumerate(cached.req_ids):
        if req_id not in wanted or req_id not in batch.requests or i >= len(cached.num_computed_tokens):
            continue
        computed, known = cached.num_computed_tokens[i], len(batch.token_ids_of(req_id))
        if i < len(cached.num_output_tokens):
            known = min(known, batch.requests[req_id].num_prompt_tokens + cached.num_output_tokens[i])
        known = max(known, computed + len(new_tokens[i]) if i < len(new_tokens) and len(new_tokens[i]) else 0)
        if computed + so.num_scheduled_tokens.get(req_id, 0) >= known:
            found.append(req_id)
    return found
