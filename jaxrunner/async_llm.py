"""AsyncLLM: the same front door for an event loop. Requests of many tasks run in the same steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrunner.engine import EngineStats
from jaxrunner.llm import LLM
from jaxrunner.loading import LoadedModel
from jaxrunner.outputs import CompletionOutput, RequestOutput
from jaxrunner.sampling_params import RequestOutputKind, SamplingParams
from jaxrunner.shared_engine import Inbox, Submission, checked_output
from models import Decoder
from models.registry import DEFAULT_MODEL
from models.tokenizer import Tokenizer


class AsyncLLM:
    """Generates text for the tasks of an event loop.

        llm = AsyncLLM("smollm2-135m-instruct")
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    A thread runs the engine while there are requests, and only then. Tasks of several event loops may use one, and so
    may threads that use its ``llm``.

    Args:
        model: what ``LLM`` takes, or an LLM.
        options: of ``LLM``.

    Attributes:
        llm: the LLM behind it.
    """

    def __init__(self, model: str | Path | LoadedModel | LLM = DEFAULT_MODEL, **options: Any) -> None:
        if isinstance(model, LLM) and options:
            raise TypeError(f"an LLM has been made already: it takes no options any more, got {sorted(options)}")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Continues one prompt, and yields as tokens come.

        What an output holds is for ``SamplingParams.output_kind`` to say. A task that is slower than the engine misses
        nothing: DELTA outputs that have piled up come as one, and of CUMULATIVE ones the latest. If the iterator is
        closed or its task cancelled, the request is aborted.

        Args:
            prompt: a text, token ids, or one of ``LLM.generate``'s dicts.
            sampling_params: None: ``LLM.get_default_sampling_params()``.
            request_id: unique among the unfinished ones; None: one is made.
            priority: lower ones are served first; only with ``scheduling_policy="priority"``.

        Raises:
            ValueError: the prompt can't be served, or the id is taken.
            RuntimeError: a step failed, and with it all requests.
        """
        shared = self.llm.shared
        params = self.llm.get_default_sampling_params() if sampling_params is None else sampling_params
        process = self.llm.inputs.process
        if params.structured_outputs is None:
            checked = process(prompt, params)
        else:  # a grammar may take seconds to compile, in which other tasks go on
            checked = await asyncio.to_thread(process, prompt, params)
        request_id = self.llm.next_id() if request_id is None else request_id
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        inbox = Inbox(on_arrival=lambda: _wake(loop, arrived))
        shared.submit([Submission(request_id, checked, priority)], inbox)
        try:
            shared.drive_in_background()
            while inbox.unfinished or inbox.outputs:
                await arrived.wait()
                arrived.clear()
                outputs, _ = inbox.take()
                if outputs:
                    yield merged([checked_output(output) for output in outputs], params.output_kind)
        finally:
            if request_id in inbox.unfinished:
                await self.abort(request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; their iterators end with an output whose finish_reason is "abort"."""
        self.llm.shared.abort([request_id] if isinstance(request_id, str) else request_id)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """See ``LLM.reset_prefix_cache``."""
        await asyncio.to_thread(self.llm.reset_prefix_cache, reset_running_requests)

    async def update_weights(self, weights: Decoder | Mapping[str, Any], reset_running_requests: bool = True) -> None:
        """See ``LLM.update_weights``."""
        await asyncio.to_thread(self.llm.update_weights, weights, reset_running_requests)

    async def stats(self) -> EngineStats:
        """How busy the engine is, and how well the prefix cache does."""
        return await asyncio.to_thread(self.llm.stats)

    async def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer in use."""
        return self.llm.get_tokenizer()

    def shutdown(self) -> None:
        """Aborts all requests, and waits until the engine is idle."""
        self.llm.shared.shutdown()


def _wake(loop: asyncio.AbstractEventLoop, arrived: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(arrived.set)
    except RuntimeError:  # the loop is closed: nobody waits any more
        pass


def merged(outputs: list[RequestOutput], kind: RequestOutputKind) -> RequestOutput:
    """Outputs of one request that have piled up, as one."""
    last = outputs[-1]
    if kind is not RequestOutputKind.DELTA or len(outputs) == 1:
        return last
    parts: dict[int, CompletionOutput] = {}
    for output in outputs:
        for part in output.outputs:
            parts[part.index] = _joined(parts[part.index], part) if part.index in parts else part
    return replace(last, outputs=[parts[index] for index in sorted(parts)])


def _joined(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    logprobs = second.logprobs
    if logprobs is not None and first.logprobs:
        logprobs = first.logprobs + logprobs  # type: ignore[operator]  # both are FlatLogprobs
    return replace(
        second, text=first.text + second.text, token_ids=first.token_ids + second.token_ids, logprobs=logprobs
    )
