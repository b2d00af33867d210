"""LLM: the front door. A model by its name, prompts in, texts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from jaxrunner import embedding
from jaxrunner.compilation_cache import use_compilation_cache
from jaxrunner.embedding import EmbeddingRequestOutput, ScoringRequestOutput
from jaxrunner.engine import EngineStats
from jaxrunner.grammars import Grammars
from jaxrunner.input_processor import (
    RefusedPrompt,
    checked_or_refused,
    pair_params,
    raise_refusals,
    split_conversations,
    split_prompts,
)
from jaxrunner.llm_config import LLMConfig, tuples, unknown_options
from jaxrunner.llm_parts import make_engine, make_input_processor, make_runner
from jaxrunner.loading import LoadedModel, load_model, recommended_params
from jaxrunner.logits_processors import LogitsProcessor
from jaxrunner.outputs import Prompt, RequestOutput
from jaxrunner.pooling import PoolingParams
from jaxrunner.run_requests import OnError, RequestRunner
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.shared_engine import SharedEngine
from models import Decoder
from models.registry import DEFAULT_MODEL
from models.tokenizer import Tokenizer

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
        self.runner = make_runner(self.model, runner_config, quiet, logits_processors)
        grammars = Grammars(self.model.tokenizer, model_config.vocab_size, self.model.eos_token_ids)
        self.engine = make_engine(self.runner, self.model, self.config, grammars)
        self.shared = SharedEngine(self.engine)
        self.inputs = make_input_processor(self.engine, self.model, grammars, logits_processors)
        self._requests = RequestRunner(self.shared)
        recommended = self.model.generation_config if generation_config == "auto" else {}
        self._default_params = recommended_params(recommended)

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
        return self._requests.run(self._process(prompts, sampling_params), use_tqdm, on_error, priority)

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
        return self._requests.stream(self._process(prompts, sampling_params), priority)

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
            messages: a conversation, [{"role": "user", "content": "..."}, ...], or a list of conversations. Of a
                content in parts, those of type "text" are served; they become lines.
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
        process = self.inputs.process_chat
        checked = [checked_or_refused(process, c, q, options) for c, q in zip(conversations, params, strict=True)]
        return self._requests.run(checked, use_tqdm, on_error)

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
        return [embedding.embedding_output(output) for output in self._requests.run([*pooled], use_tqdm, "raise")]

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

    def update_weights(self, weights: Decoder | Mapping[str, Any], reset_running_requests: bool = True) -> None:
        """Replaces the model's weights in place, between two steps: nothing recompiles, and the prefix cache is reset.

        Requests that other threads run keep the tokens they have, and take their next ones from the new weights.

        Args:
            weights: a Decoder; arrays by the names in ``runner.functions.graphdef.names``, some or all; or all tensors
                of a checkpoint by their Hugging Face names. They are copied.
            reset_running_requests: requests that run are computed again from their first token on, so that all of
                their keys and values are the new weights'. False: they go on with those they have, the old weights'.

        Raises:
            ValueError: they don't fit the model, each misfit named; the old ones stay, and nothing is reset.
        """
        self.shared.call(lambda: self.engine.update_weights(weights, reset_running_requests))

    def stats(self) -> EngineStats:
        """How busy the engine is, and how well the prefix cache does."""
        return self.shared.call(self.engine.stats)

    def next_id(self) -> str:
        """An id for a request; they count up."""
        return self._requests.next_id()

    def _process(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Prompt | RefusedPrompt]:
        singles = split_prompts(prompts)
        params = pair_params(sampling_params, len(singles), self._default_params)
        return [checked_or_refused(self.inputs.process, p, q) for p, q in zip(singles, params, strict=True)]
