"""Checked prompts through a shared engine to their outputs, for callers that wait for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from jaxrunner.input_processor import RefusedPrompt, pair_priorities, raise_refusals
from jaxrunner.outputs import Prompt, RequestOutput
from jaxrunner.progress import NoProgress, RunProgress, make_progress
from jaxrunner.sampling_params import RequestOutputKind
from jaxrunner.shared_engine import Inbox, SharedEngine, Submission, checked_output

OnError = Literal["raise", "return"]


class RequestRunner:
    """Gives requests their ids and runs them. Several threads may use it at once."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        self._ids = itertools.count()

    def next_id(self) -> str:
        """An id for a request; they count up."""
        while self._shared.is_taken(request_id := str(next(self._ids))):
            pass
        return request_id

    def run(
        self,
        checked: list[Prompt | RefusedPrompt],
        use_tqdm: bool | Callable[..., Any],
        on_error: OnError,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The final outputs, in the order of the prompts; the arguments are ``LLM.generate``'s."""
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}")
        if on_error == "raise":
            raise_refusals(checked)
        ids = [self.next_id() for _ in checked]
        submissions = _submissions(checked, ids, priority, RequestOutputKind.FINAL_ONLY)
        outputs = {
            request_id: RequestOutput.refused(request_id, prompt.text, prompt.token_ids, str(prompt))
            for request_id, prompt in zip(ids, checked, strict=True)
            if isinstance(prompt, RefusedPrompt)
        }
        room = self._shared.engine.scheduler.max_model_len
        bar = make_progress(use_tqdm, len(submissions), sum(_most_tokens(s.prompt, room) for s in submissions))
        try:
            for output in self._outputs(submissions, bar):
                outputs[output.request_id] = output
        finally:
            bar.close()
        return [outputs[request_id] for request_id in ids]

    def stream(
        self, checked: list[Prompt | RefusedPrompt], priority: Sequence[int] | None = None
    ) -> Iterator[RequestOutput]:
        """Outputs as they come.

        Raises:
            ValueError: at once, for the prompts that were refused.
        """
        raise_refusals(checked)
        return self._outputs(_submissions(checked, [self.next_id() for _ in checked], priority), NoProgress())

    def _outputs(self, submissions: list[Submission], bar: RunProgress) -> Iterator[RequestOutput]:
        """Runs requests to their end. Whatever goes wrong on the way, they are gone from the engine then."""
        inbox = Inbox()
        self._shared.submit(submissions, inbox)
        try:
            while inbox.unfinished or inbox.outputs:
                self._shared.drive(inbox.has_news)
                arrived, tokens = inbox.take()
                bar.step(tokens, sum(isinstance(output, RequestOutput) and output.finished for output in arrived))
                yield from map(checked_output, arrived)
        finally:
            left = [s.request_id for s in submissions if self._shared.is_taken(s.request_id)]
            if left:
                self._shared.abort(left)


def _submissions(
    checked: Sequence[Prompt | RefusedPrompt],
    ids: Sequence[str],
    priority: Sequence[int] | None,
    output_kind: RequestOutputKind | None = None,
) -> list[Submission]:
    """What is left of ``checked`` without those refused."""
    priorities = pair_priorities(priority, len(checked))
    return [
        Submission(request_id, prompt, importance, output_kind)
        for request_id, prompt, importance in zip(ids, checked, priorities, strict=True)
        if isinstance(prompt, Prompt)
    ]


def _most_tokens(prompt: Prompt, max_model_len: int) -> int:
    room = max_model_len - len(prompt.token_ids)
    limit = prompt.params.max_tokens
    return prompt.params.n * (room if limit is None else min(limit, room))
