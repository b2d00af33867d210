"""Prompts of every accepted form to token ids, and the question whether each can be served at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrunner.grammars import Grammars
from jaxrunner.logits_processors import LogitsProcessor, entered_columns
from jaxrunner.logprobs_lists import check_logprobs
from jaxrunner.outputs import Prompt
from jaxrunner.refusals import refuse_sampling_params
from jaxrunner.request_limits import RequestLimits
from jaxrunner.request_tables import check_tables
from jaxrunner.ruled_out import check_something_is_left
from jaxrunner.sampling_columns import MAX_STOP_TOKEN_IDS
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.structured_outputs import StructuredOutputsParams

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_FORMS = 'a text, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids} or {"messages": conversation}'


class RefusedPrompt(ValueError):
    """A prompt that can't be served. What is known of it travels along, for the output that stands for it."""

    def __init__(self, message: str, text: str | None, token_ids: list[int]) -> None:
        super().__init__(message)
        self.text, self.token_ids = text, token_ids


def split_prompts(prompts: Any) -> list[Any]:
    """What ``LLM.generate`` is given, as a list of single prompts.

    A text, a dict or a non-empty list of integers is one prompt. Any other list holds one prompt an entry; so ``[]``
    is no prompt at all, and ``[[]]`` an empty one.

    Raises:
        ValueError: neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        return [prompts] if any(map(_is_integer, prompts)) else list(prompts)
    raise ValueError(f"prompts must be {_FORMS}, or a list of those, got a {type(prompts).__name__}")


def split_conversations(messages: Any) -> list[Any]:
    """What ``LLM.chat`` is given, as a list of conversations: a list of messages is one."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ValueError(
            "messages must be a conversation, [{'role': 'user', 'content': '...'}, ...], or a list of conversations,"
            f" got a {type(messages).__name__}"
        )
    return [messages] if any(isinstance(m, Mapping) for m in messages) else list(messages)


def pair_params(params: Any, count: int, default: SamplingParams) -> list[SamplingParams]:
    """One SamplingParams for each prompt: the default, the one given for all, or the list given.

    Raises:
        ValueError: another type, or a list of another length.
    """
    if params is None:
        return [default] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, Sequence) and all(isinstance(p, SamplingParams) for p in params):
        if len(params) != count:
            raise ValueError(
                f"sampling_params has {len(params)} entries for {count} prompts: give one for all, or each"
            )
        return list(params)
    raise ValueError(f"sampling_params must be a SamplingParams or a list of them, got {params!r:.100}")


def pair_priorities(priority: Any, count: int) -> list[int]:
    """One priority for each prompt: 0, or the list given.

    Raises:
        ValueError: something else, or a list of another length.
    """
    if priority is None:
        return [0] * count
    if not isinstance(priority, Sequence) or not all(map(_is_integer, priority)):
        raise ValueError(f"priority must be a list of integers, one for each prompt, got {priority!r:.100}")
    if len(priority) != count:
        raise ValueError(f"priority has {len(priority)} entries for {count} prompts")
    return [int(value) for value in priority]


def checked_or_refused(check: Callable[..., Prompt], *arguments: Any) -> Prompt | RefusedPrompt:
    """What ``check`` gives, or the refusal that it raises."""
    try:
        return check(*arguments)
    except RefusedPrompt as refusal:
        return refusal


def raise_refusals(checked: Sequence[Prompt | RefusedPrompt]) -> None:
    """Raises one ValueError for all prompts that were refused, if any; each on a line of its own."""
    refusals = [f"prompt {i}: {p}" for i, p in enumerate(checked) if isinstance(p, RefusedPrompt)]
    if refusals:
        raise ValueError("\n".join(refusals))


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """Turns prompts into token ids and refuses those that can't be served.

    Attributes:
        tokenizer: None for a model without one: prompts are then token ids.
        vocab_size: of the model; ids of prompts and stop tokens lie below it.
        limits: how many tokens a request may have.
        eos_token_ids: the model's own.
        max_logprobs: log probabilities that a request may want of each token.
        grammars: compiles structured outputs; None: none are served.
        logits_processors: those of the model's user.
    """

    tokenizer: Any
    vocab_size: int
    limits: RequestLimits
    eos_token_ids: tuple[int, ...] = ()
    max_logprobs: int = 20
    grammars: Grammars | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def process(self, prompt: Any, params: SamplingParams) -> Prompt:
        """Checks one prompt and its parameters.

        Raises:
            RefusedPrompt: it can't be served; the message says why and what would help.
        """
        if isinstance(prompt, Mapping) and "messages" in prompt:
            if len(prompt) > 1:
                raise RefusedPrompt(f"'messages' stands alone in a prompt, got {sorted(map(str, prompt))}", None, [])
            return self.process_chat(prompt["messages"], params, {})
        text, given, salt = _parts(prompt)
        if text is not None and given is None:
            return self.check(Prompt(text, self._encode(text, add_special_tokens=True), params, salt))
        return self.check(Prompt(text, _plain_ids(given, text), params, salt))

    def process_chat(self, messages: Any, params: SamplingParams, template_options: Mapping[str, Any]) -> Prompt:
        """Checks one conversation. The template writes BOS where the model wants one; the tokenizer adds none."""
        if self.tokenizer is None:
            raise RefusedPrompt(
                "the model has no tokenizer, so no chat template: give token ids to generate()", None, []
            )
        try:
            text = self.tokenizer.apply_chat_template(messages, **template_options)
        except ValueError as error:
            raise RefusedPrompt(str(error), None, []) from None
        return self.check(Prompt(text, self._encode(text, add_special_tokens=False), params))

    def check(self, prompt: Prompt) -> Prompt:
        """The prompt, cut to ``truncate_prompt_tokens`` if that is set.

        Raises:
            RefusedPrompt: empty, too long, ids outside the vocabulary, parameters that this model can't serve.
        """
        ids, params = prompt.token_ids, prompt.params

        def refuse(message: str) -> RefusedPrompt:
            return RefusedPrompt(message, prompt.text, ids)

        if not ids:
            what = "has no tokens" if prompt.text is not None else "is empty"
            raise refuse(f"the prompt {what}; at least one token is needed")
        if params.truncate_prompt_tokens is not None:
            keep = params.truncate_prompt_tokens
            ids = prompt.token_ids = ids[-(self.limits.max_prompt if keep == -1 else keep) :]
        self._check_ids(ids, refuse)
        if (refusal := self.limits.refusal(len(ids))) is not None:
            raise refuse(refusal)
        prompt.params = params = self._with_bad_words(params)
        self._check_params(params, refuse)
        for processor in self.logits_processors:
            try:
                entered_columns(processor, params, np.array(ids, np.int32), np.empty(0, np.int32))
            except ValueError as error:
                raise refuse(str(error)) from error
        return prompt

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """``bad_words`` as token ids, without and with a space in front."""
        if not params.bad_words or params.bad_words_token_ids is not None or self.tokenizer is None:
            return params
        forms = [form for word in params.bad_words for form in (word.lstrip(), f" {word.lstrip()}")]
        ids = [self._encode(form, add_special_tokens=False) for form in forms]
        return replace(params, bad_words_token_ids=[i for i in ids if i])

    def _check_ids(self, ids: list[int], refuse: Any) -> None:
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise refuse(
                f"token id {bad} (at position {ids.index(bad)} of the prompt) is outside the vocabulary: ids are from 0"
                f" to {self.vocab_size - 1}"
            )

    def _check_params(self, params: SamplingParams, refuse: Any) -> None:
        try:
            refuse_sampling_params(params, [key for p in self.logits_processors for key in p.extra_args])
            check_tables(params, self.vocab_size)
            check_something_is_left(params, self.vocab_size)
            check_logprobs(params, self.max_logprobs, self.vocab_size)
            if isinstance(params.structured_outputs, StructuredOutputsParams):
                if self.grammars is None:
                    raise ValueError("structured_outputs need the model's tokenizer, and it has none")
                self.grammars.check(params.structured_outputs)
        except ValueError as error:
            raise refuse(str(error)) from None
        stops = tuple(params.stop_token_ids or ())
        for token_id in stops:
            if token_id >= self.vocab_size:
                raise refuse(
                    f"stop_token_ids holds {token_id}, which is outside the vocabulary: ids are from 0 to"
                    f" {self.vocab_size - 1}"
                )
        held = len({*stops, *self.eos_token_ids})
        if params.min_tokens and held > MAX_STOP_TOKEN_IDS:
            raise refuse(f"min_tokens can hold back {MAX_STOP_TOKEN_IDS} stop token ids at most, not {held}")
        if params.detokenize and self.tokenizer is None:
            raise refuse("the model has no tokenizer: use SamplingParams(detokenize=False)")

    def _encode(self, text: Any, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise RefusedPrompt("the model has no tokenizer: give the prompt as token ids", text, [])
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except ValueError as error:
            raise RefusedPrompt(str(error), text, []) from None


def _parts(prompt: Any) -> tuple[str | None, Any, str | None]:
    """(text, token ids or None, cache salt) of a prompt in any form."""
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, Mapping):
        return None, prompt, None
    unknown = [key for key in prompt if key not in _PROMPT_KEYS]
    text, ids, salt = (prompt.get(key) for key in _PROMPT_KEYS)
    problem = None
    if unknown:
        problem = f"a prompt given as a dict has the keys {list(_PROMPT_KEYS)}, got {unknown}"
        if "role" in unknown:
            problem += ": for messages there is chat()"
    elif text is None and ids is None:
        problem = "a prompt given as a dict needs 'prompt' or 'prompt_token_ids'"
    elif text is not None and not isinstance(text, str):
        problem = f"'prompt' must be a text, got {text!r:.100}"
    elif salt is not None and not isinstance(salt, str):
        problem = f"'cache_salt' must be a text, got {salt!r:.100}"
    if problem:
        raise RefusedPrompt(problem, text if isinstance(text, str) else None, [])
    return text, ids, salt


def _plain_ids(ids: Any, text: str | None) -> list[int]:
    if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu":
        return ids.tolist()
    if isinstance(ids, Sequence) and not isinstance(ids, str | bytes) and all(map(_is_integer, ids)):
        return [int(i) for i in ids]
    raise RefusedPrompt(f"a prompt must be {_FORMS}; got {ids!r:.100}", text, [])


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)
