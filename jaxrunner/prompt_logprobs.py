"""Log probabilities of prompt tokens: which rows of a step go through the head for them, and where the answers go.

A prompt's token i is judged by the hidden state of token i - 1. So a step that computes tokens c .. c + q of a prompt
brings those of tokens c + 1 .. c + q + 1, of all requests in one stream of rows, which goes through the head in chunks
of one size. Chunked prompts and those that are computed again after a preemption fill the same array, by position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from jaxrunner.batch import InputBatch, StepInputs
from jaxrunner.logprobs_lists import LogprobsLists
from jaxrunner.protocol import SchedulerOutput


@dataclass(frozen=True, slots=True)
class PromptRows:
    """One chunk: tokens of the step whose hidden states go through the head, and the tokens that follow them.

    Attributes:
        rows, targets: padded with 0 to the chunk's size.
        spans: (request, its first position, where in the chunk its rows begin and end).
    """

    rows: Int32[np.ndarray, "C"]
    targets: Int32[np.ndarray, "C"]
    spans: list[tuple[str, int, int, int]]


class PromptLogprobs:
    """The requests that wait for log probabilities of their prompt.

    Args:
        chunk: rows that go through the head at a time.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._waiting: dict[str, Int32[np.ndarray, "P-1 words"] | None] = {}

    def check(self, scheduler_output: SchedulerOutput) -> None:
        """Raises ValueError for a request part of whose prompt would never be computed."""
        cached = scheduler_output.scheduled_cached_reqs
        found = {
            data.req_id: data.num_computed_tokens
            for data in scheduler_output.scheduled_new_reqs
            if data.sampling_params is not None and data.sampling_params.prompt_logprobs is not None
        }
        if cached.resumed_req_ids:
            computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            found |= {r: computed[r] for r in cached.resumed_req_ids if r in self._waiting}
        for req_id, count in found.items():
            if count:
                raise ValueError(
                    f"request {req_id!r} wants prompt_logprobs and starts with {count} tokens computed: every token of"
                    " its prompt must be, so leave it out of prefix caching"
                )

    def note(self, scheduler_output: SchedulerOutput) -> None:
        """Requests that begin or end with this step."""
        for req_id in scheduler_output.finished_req_ids:
            self._waiting.pop(req_id, None)
        for data in scheduler_output.scheduled_new_reqs:
            if data.sampling_params is not None and data.sampling_params.prompt_logprobs is not None:
                if len(data.prompt_token_ids) > 1:  # of the first token nothing can be said
                    self._waiting[data.req_id] = None

    def rows_of(self, batch: InputBatch, inputs: StepInputs) -> Iterator[PromptRows]:
        """The step's rows, in chunks."""
        waiting = [row for row, req_id in enumerate(inputs.req_ids) if req_id in self._waiting] if self._waiting else []
        if not waiting:
            return
        row = np.array(waiting)
        index, starts = batch.row_indices[row], inputs.query_start_loc
        first = batch.num_computed[row].astype(np.int64)
        prompt = batch.columns["num_prompt_tokens"][index]
        counts = np.clip(np.minimum(first + starts[row + 1] - starts[row], prompt - 1) - first, 0, None)
        ends = np.cumsum(counts)
        within = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
        rows = np.repeat(starts[row].astype(np.int64), counts) + within
        targets = batch.token_ids[np.repeat(index, counts), np.repeat(first, counts) + within + 1]
        for at in range(0, len(rows), self._chunk):
            chunk = PromptRows(np.zeros(self._chunk, np.int32), np.zeros(self._chunk, np.int32), [])
            n = min(self._chunk, len(rows) - at)
            chunk.rows[:n], chunk.targets[:n] = rows[at : at + n], targets[at : at + n]
            for i in range(len(row)):
                begin, end = max(int(ends[i] - counts[i]), at), min(int(ends[i]), at + n)
                if begin < end:
                    position = int(first[i] + begin - (ends[i] - counts[i]))
                    chunk.spans.append((inputs.req_ids[row[i]], position, begin - at, end - at))
            yield chunk

    def take(
        self, batch: InputBatch, answers: list[tuple[PromptRows, Int32[np.ndarray, "C words"]]]
    ) -> dict[str, LogprobsLists]:
        """Stores what came back; the prompts that are complete with it."""
        complete = {}
        for chunk, words in answers:
            for req_id, position, begin, end in chunk.spans:
                num_prompt = batch.requests[req_id].num_prompt_tokens
                stored = self._waiting[req_id]
                if stored is None:
                    stored = self._waiting[req_id] = np.zeros((num_prompt - 1, words.shape[1]), np.int32)
                stored[position : position + end - begin] = words[begin:end]
                if position + end - begin == num_prompt - 1:
                    complete[req_id] = LogprobsLists(stored)
                    del self._waiting[req_id]
        return complete
