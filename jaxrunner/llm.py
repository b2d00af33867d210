"""LLM: the front door. A model by its name, prompts in, texts out."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from jaxrunner import embedding
from jaxrunner.compilation_cache import use_compilation_cache
from jaxrunner.embedding import EmbeddingRequestOutput, ScoringRequestOutput
from jaxrunner.engine import Engine, EngineStats
from jaxrunner.grammars import Grammars
from jaxrunner.input_processor import (
    InputProcessor,
    RefusedPrompt,
    pair_params,
    pair_priorities,
    raise_refusals,
    split_conversations,
    split_prompts,
)
from jaxrunner.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from jaxrunner.llm_config import LLMConfig, tuples, unknown_options
from jaxrunner.loading import LoadedModel, load_model, recommended_params
from jaxrunner.logits_processors import LogitsProcessor
from jaxrunner.outputs import Prompt, RequestOutput
from jaxrunner.pooling import PoolingParams
from jaxrunner.progress import NoProgress, RunProgress, compile_status, make_progress
from jaxrunner.runner import ModelRunner
from jaxrunner.sampling_params import RequestOutputKind, SamplingParams
from jaxrunner.shared_engine import Inbox, SharedEngine, Submission, checked_output
from models import Decoder
from models.registry import DEFAULT_MODEL
from models.tokenizer import Tokenizer

OnError = Literal["raise", "return"]
_OPTIONS = {f.name for f in fields(LLMConfig)}


class LLM:
    """Generates text with a model, many prompts at once.

    Args:
        model: a Hugging Face folder, a .gguf file, the name of a fetched model, a hub id, or a LoadedModel.
        tokenizer: another tokenizer than the model's own: a Tokenizer, or a folder or file that has one.
        dtype: "float32", "bfloat16", or "auto": float32 on CPU, bfloat16 elsewhere.
        generation_config: "auto": ``generate`` without parameters uses those that the checkpoint recommends (its
            generation_config.json); "vllm": it uses SamplingParams' defaults.
        quiet: say nothing on stderr of the warm-up, and of the KV cache's plan where its blocks were not given.
        logits_processors: of your own, compiled into the step; see docs/sampling.md.
        options: see ``LLMConfig``, whose fields they are: max_model_len, max_num_seqs, max_num_batched_tokens, ...

    Attributes:
        runner: the ModelRunner; ``runner.attention_choice``, ``runner.cache_plan`` and ``runner.times`` tell how it
            works.
        engine: runs requests step by step, for who wants to do that; while nobody does, ``shared`` is for all others.
        shared: the engine as several threads may use it.
        model: the loaded model.

    Several threads may use it at once; their requests run in the same steps.

    Raises:
        TypeError: an option that there is not; the message lists those there are.
        ValueError: a model that can't be found or loaded, options that contradict each other.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = DEFAULT_MODEL,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        dtype: str = "auto",
        generation_config: Literal["auto", "vllm"] = "auto",
        quiet: bool = False,
        logits_processors: Sequence[LogitsProcessor] = (),
        **options: Any,
    ) -> None:
        if unknown := options.keys() - _OPTIONS:
            known = {*_OPTIONS, "model", "tokenizer", "dtype", "generation_config", "quiet", "logits_processors"}
            raise unknown_options(sorted(unknown), known)
        if generation_config not in ("auto", "vllm"):
            raise ValueError(f"generation_config must be 'auto' or 'vllm', got {generation_config!r}")
        self.config = LLMConfig(**{name: tuples(value) for name, value in options.items()})
        # Before the first array: JAX decides at its first compilation whether there is a cache.
        use_compilation_cache(self.config.compilation_cache)
        if isinstance(model, LoadedModel):
            self.model = model
        else:
            self.model = load_model(model, tokenizer, dtype, self.config.check_model)
        model_config = self.model.decoder.config
        runner_config = self.config.check_model(model_config, self.model.decoder.dtype)
        eos_token_ids = self.model.eos_token_ids
        with compile_status(quiet) as tell:
            self.runner = ModelRunner(
                self.model.decoder,
                runner_config,
                eos_token_ids=eos_token_ids,
                on_compiled=tell,
                logits_processors=logits_processors,
            )
        if not quiet and runner_config.num_blocks is None:
            print(f"KV cache: {self.runner.cache_plan.why}", file=sys.stderr)
        cache_config = kv_cache_config(self.runner)
        grammars = Grammars(self.model.tokenizer, model_config.vocab_size, eos_token_ids)
        self.engine = Engine(
            self.runner,
            cache_config,
            self.model.tokenizer,
            eos_token_ids=eos_token_ids,
            grammars=grammars,
            enable_prefix_caching=self.config.enable_prefix_caching,
            long_prefill_token_threshold=self.config.long_prefill_token_threshold,
            max_num_partial_prefills=self.config.max_num_partial_prefills,
            max_long_partial_prefills=self.config.max_long_partial_prefills,
            scheduling_policy=self.config.scheduling_policy,
        )
        self.shared = SharedEngine(self.engine)
        self.inputs = InputProcessor(
            self.model.tokenizer,
            model_config.vocab_size,
            self.engine.scheduler.limits,
            eos_token_ids,
            runner_config.max_logprobs,
            grammars,
            tuple(logits_processors),
        )
        recommended = self.model.generation_config if generation_config == "auto" else {}
        self._default_params = recommended_params(recommended)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        on_error: OnError = "raise",
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts.

        Args:
            prompts: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; or a list of those,
                mixed as you like. (``[]`` holds no prompt, ``[[]]`` an empty one.)
            sampling_params: for all prompts, or one each. None: ``get_default_sampling_params()``.
            use_tqdm: show a progress bar on stderr; or a callable like tqdm, to be used instead.
            on_error: what happens to a prompt that can't be served (empty, too long, ids outside the vocabulary,
                parameters that aren't served). "raise": a ValueError names every one of them, and nothing runs.
                "return": its output has ``error`` and finish_reason "error", and the others run.
            priority: one for each prompt, lower ones served first; only with ``scheduling_policy="priority"``.

        Returns:
            An output for each prompt, in the same order.

        Raises:
            ValueError: see ``on_error``; also for arguments of a wrong type, whatever it says.
        """
        return self._run(self._process(prompts, sampling_params), use_tqdm, on_error, priority)

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Continues prompts, and yields as tokens come, until all have finished.

        Each output is of one request (``request_id``; they count up in the order of the prompts). What it holds is
        for ``SamplingParams.output_kind`` to say: CUMULATIVE all so far, DELTA only what is new, FINAL_ONLY nothing
        before the end. No text is taken back: a half character, or what may become a stop string, waits. Requests
        whose iterator is closed before its end are aborted.

        Args:
            prompts, sampling_params, priority: as in ``generate``.

        Raises:
            ValueError: a prompt that can't be served; names all there are, and nothing runs.
        """
        checked = self._process(prompts, sampling_params)
        raise_refusals(checked)
        return self._outputs(self._submissions(checked, [self.next_id() for _ in checked], priority), NoProgress())

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        on_error: OnError = "raise",
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Continues conversations, written as text by the model's chat template.

        Args:
            messages: a conversation, [{"role": "user", "content": "..."}, ...], or a list of conversations.
            add_generation_prompt: end with the words that open the assistant's turn.
            chat_template: a Jinja template to use instead of the model's.
            chat_template_kwargs: further names that the template reads.
            tools: JSON schemas of functions that the model may call.
            sampling_params, use_tqdm, on_error: as in ``generate``. A conversation that the template refuses is one
                that can't be served.

        Returns:
            An output for each conversation, in the same order; ``prompt`` is the template's text.
        """
        conversations = split_conversations(messages)
        params = pair_params(sampling_params, len(conversations), self._default_params)
        options = {
            **(chat_template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "chat_template": chat_template,
            "tools": tools,
        }
        checked = [
            self._checked(self.inputs.process_chat, c, q, options) for c, q in zip(conversations, params, strict=True)
        ]
        return self._run(checked, use_tqdm, on_error)

    def embed(
        self,
        prompts: Any,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings of prompts: hidden states after the final norm, of the last token or the mean over all.

        Args:
            prompts: as in ``generate``.
            pooling_params: None: the last token's, normalized.

        Raises:
            ValueError: a prompt that can't be served; names all there are, and nothing runs.
        """
        checked = self._process(prompts, embedding.ONE_TOKEN)
        raise_refusals(checked)
        pooled = embedding.with_pooling(checked, pooling_params, self.runner.model_config.hidden_size)
        return [embedding.embedding_output(output) for output in self._run([*pooled], use_tqdm, "raise")]

    def score(
        self,
        text_1: Any,
        text_2: Any,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[ScoringRequestOutput]:
        """How near texts are to each other: the cosine of their embeddings.

        Args:
            text_1: one prompt, to be compared with each of ``text_2``; or as many as there are of those.
        """
        first, second = split_prompts(text_1), split_prompts(text_2)
        if len(first) not in (1, len(second)):
            raise ValueError(f"text_1 has {len(first)} texts and text_2 {len(second)}: give one, or as many")
        return embedding.scores(self.embed([*first, *second], pooling_params, use_tqdm=use_tqdm), len(first))

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer in use."""
        return self.model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``generate`` uses when it is given no parameters: the checkpoint's recommendation, if it has one."""
        return self._default_params

    def abort(self, request_ids: str | Sequence[str]) -> None:
        """Ends requests of ``stream`` or ``generate``, from any thread. Their outputs have finish_reason "abort"."""
        self.shared.abort([request_ids] if isinstance(request_ids, str) else request_ids)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Nothing computed so far will be found again, as is right after a change of weights.

        Args:
            reset_running_requests: requests that other threads run are computed again from their first token on;
                otherwise they go on with what they have.
        """
        self.shared.call(lambda: self.engine.scheduler.reset_prefix_cache(reset_running_requests))

    def update_weights(self, weights: Decoder | Mapping[str, Any]) -> None:
        """Replaces the model's weights in place, between two steps: nothing recompiles, and the prefix cache is reset.

        Args:
            weights: a Decoder; arrays by the names in ``runner.functions.graphdef.names``, some or all; or all tensors
                of a checkpoint by their Hugging Face names. They are copied.

        Raises:
            ValueError: they don't fit the model, each misfit named; the old ones stay.
            RuntimeError: there are unfinished requests, whose keys and values are the old weights'.
        """
        self.shared.call(lambda: self.engine.update_weights(weights))

    def stats(self) -> EngineStats:
        """How busy the engine is, and how well the prefix cache does."""
        return self.shared.call(self.engine.stats)

    def _process(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Prompt | RefusedPrompt]:
        singles = split_prompts(prompts)
        params = pair_params(sampling_params, len(singles), self._default_params)
        return [self._checked(self.inputs.process, p, q) for p, q in zip(singles, params, strict=True)]

    @staticmethod
    def _checked(check: Callable[..., Prompt], *arguments: Any) -> Prompt | RefusedPrompt:
        try:
            return check(*arguments)
        except RefusedPrompt as refusal:
            return refusal

    def _run(
        self,
        checked: list[Prompt | RefusedPrompt],
        use_tqdm: bool | Callable[..., Any],
        on_error: OnError,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}")
        if on_error == "raise":
            raise_refusals(checked)
        ids = [self.next_id() for _ in checked]
        submissions = self._submissions(checked, ids, priority, RequestOutputKind.FINAL_ONLY)
        outputs = {
            request_id: RequestOutput.refused(request_id, prompt.text, prompt.token_ids, str(prompt))
            for request_id, prompt in zip(ids, checked, strict=True)
            if isinstance(prompt, RefusedPrompt)
        }
        room = self.engine.scheduler.max_model_len
        bar = make_progress(use_tqdm, len(submissions), sum(_most_tokens(s.prompt, room) for s in submissions))
        try:
            for output in self._outputs(submissions, bar):
                outputs[output.request_id] = output
        finally:
            bar.close()
        return [outputs[request_id] for request_id in ids]

    def next_id(self) -> str:
        """An id for a request; they count up."""
        while self.shared.is_taken(request_id := str(next(self._ids))):
            pass
        return request_id

    def _submissions(
        self,
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

    def _outputs(self, submissions: list[Submission], bar: RunProgress) -> Iterator[RequestOutput]:
        """Runs requests to their end. Whatever goes wrong on the way, they are gone from the engine then."""
        inbox = Inbox()
        self.shared.submit(submissions, inbox)
        try:
            while inbox.unfinished or inbox.outputs:
                self.shared.drive(inbox.has_news)
                arrived, tokens = inbox.take()
                bar.step(tokens, sum(isinstance(output, RequestOutput) and output.finished for output in arrived))
                yield from map(checked_output, arrived)
        finally:
            left = [s.request_id for s in submissions if self.shared.is_taken(s.request_id)]
            if left:
                self.shared.abort(left)


def _most_tokens(prompt: Prompt, max_model_len: int) -> int:
    room = max_model_len - len(prompt.token_ids)
    limit = prompt.params.max_tokens
    return prompt.params.n * (room if limit is None else min(limit, room))


def kv_cache_config(runner: ModelRunner) -> KVCacheConfig:
    """The blocks that a runner has, as an ``Engine`` over it wants to know them."""
    layers = runner.model_config.attention_layers()
    spec = FullAttentionSpec(
        block_size=runner.config.block_size,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        dtype=runner.kv_caches[0].k.dtype.name,
    )
    return KVCacheConfig(runner.num_blocks, [KVCacheGroup(range(len(layers)), spec)])
