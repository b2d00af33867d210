"""A request while it runs: its sequences, their texts, and what its caller is told after a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxrunner.logprobs import FlatLogprobs, SequenceLogprobs, prompt_logprobs
from jaxrunner.logprobs_lists import LogprobsLists
from jaxrunner.outputs import CompletionOutput, Prompt, RequestMetrics, RequestOutput, SequenceDelta
from jaxrunner.request import Request
from jaxrunner.sampling_params import RequestOutputKind, SamplingParams
from jaxrunner.scheduler import RequestUpdate
from jaxrunner.sequence_text import SequenceText


@dataclass(slots=True, eq=False)
class ActiveSequence:
    """One of the sequences of a request: the scheduler's request, its text, and where its output goes."""

    parent: ActiveRequest
    request: Request
    text: SequenceText
    logprobs: SequenceLogprobs
    output: CompletionOutput

    def take(self, update: RequestUpdate, logprobs: LogprobsLists | None = None, row: int = 0) -> SequenceDelta:
        """Takes in what a step brought; the delta says whether that ended the sequence.

        Args:
            row: of ``logprobs`` that is this sequence's.
        """
        text, output = self.text, self.output
        tokens, reason = update.new_token_ids, update.finish_reason
        stop_reason: int | str | None = update.stop_reason
        taken = text.append(tokens, ends_with_stop_token=reason == "stop")
        if taken < len(tokens):
            tokens = tokens[:taken]
        if text.stop_reason is not None:
            reason, stop_reason = "stop", text.stop_reason
        output.token_ids.extend(tokens)
        output.text = text.text
        new = None
        if logprobs is not None and taken:
            new = self.logprobs.append(logprobs, row)
            output.cumulative_logprob = self.logprobs.cumulative
        return self._delta(tokens, reason, stop_reason, new)

    def take_prompt_logprobs(self, lists: LogprobsLists) -> None:
        """The log probabilities of the prompt's tokens, all at once; of the first there are none."""
        top = self.request.sampling_params.prompt_logprobs
        if top is not None:
            self.parent.output.prompt_logprobs = prompt_logprobs(lists, top, self.logprobs.text)

    def end(self, reason: str) -> SequenceDelta:
        """Ended from outside: what was held back of its text may be shown."""
        return self._delta([], reason, None)

    def _delta(
        self,
        tokens: list[int],
        reason: str | None,
        stop_reason: int | str | None,
        logprobs: FlatLogprobs | None = None,
    ) -> SequenceDelta:
        output = self.output
        if reason is not None:
            output.finish_reason, output.stop_reason = reason, stop_reason
        shown = self.text.take_delta(finished=reason is not None)
        return SequenceDelta(self.parent.request_id, output.index, shown, tokens, reason, stop_reason, logprobs)

    def so_far(self) -> CompletionOutput:
        """All tokens, and as much of the text as nothing later takes back."""
        output = self.output
        positions = self.logprobs.positions
        logprobs = None if positions is None else positions.part(0)
        return CompletionOutput(
            output.index,
            self.text.shown,
            list(output.token_ids),
            output.cumulative_logprob,
            logprobs,
            output.finish_reason,
            output.stop_reason,
        )


class ActiveRequest:
    """What the engine keeps of a request until its last sequence has ended.

    Attributes:
        output: everything so far; the caller's once ``output.finished``.
        kind: how much of it the caller is told, and when.
        running: sequences that have not ended.
    """

    def __init__(self, request_id: str, prompt: Prompt, kind: RequestOutputKind) -> None:
        self.request_id = request_id
        self.kind = kind
        self.output = RequestOutput(request_id, prompt.text, prompt.token_ids, [], False, metrics=RequestMetrics())
        if prompt.params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]
        self.sequences: list[ActiveSequence] = []
        self.running: set[ActiveSequence] = set()

    def add(self, request: Request, text: SequenceText, logprobs: SequenceLogprobs) -> ActiveSequence:
        """One more sequence."""
        output = CompletionOutput(len(self.sequences), "", [], logprobs.cumulative, logprobs.positions)
        sequence = ActiveSequence(self, request, text, logprobs, output)
        self.output.outputs.append(output)
        self.sequences.append(sequence)
        self.running.add(sequence)
        return sequence

    def close(self, sequence: ActiveSequence) -> None:
        """A sequence has ended; with the last one the output is complete."""
        self.running.discard(sequence)
        metrics = self.output.metrics
        assert metrics is not None  # made with the output
        metrics.num_preemptions += sequence.request.num_preemptions
        if not self.running:
            self.output.num_cached_tokens = self.sequences[0].request.num_cached_tokens
            self.output.finished = True
            metrics.finished_time = time.monotonic()

    def told(self, deltas: Sequence[SequenceDelta]) -> RequestOutput | None:
        """What the caller is to be told of a step that brought ``deltas``; None: nothing yet."""
        self.output.num_cached_tokens = self.sequences[0].request.num_cached_tokens
        if self.kind is RequestOutputKind.DELTA:
            return self.output.with_outputs([_part(delta) for delta in deltas])
        if self.output.finished:
            return self.output
        if self.kind is RequestOutputKind.CUMULATIVE:
            return self.output.with_outputs([sequence.so_far() for sequence in self.sequences])
        return None


def _part(delta: SequenceDelta) -> CompletionOutput:
    return CompletionOutput(
        delta.index, delta.text, delta.token_ids, None, delta.logprobs, delta.finish_reason, delta.stop_reason
    )


def fan_out(request_id: str, params: SamplingParams) -> list[tuple[str, SamplingParams]]:
    """The sequences of a request, as (id, parameters): sequence i is seeded with ``seed + i``, so that they differ.

    Without a seed their ids make them differ. The prompt is the same for all, so only the first reports on it.
    """
    if params.n == 1:
        return [(request_id, params)]
    sequences = []
    for i in range(params.n):
        seed = None if params.seed is None else (params.seed + i) % 2**64
        prompt_logprobs = None if i else params.prompt_logprobs
        sequences.append((f"{i}_{request_id}", replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)))
    return sequences
