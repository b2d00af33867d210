"""A file of requests, one JSON object a line, and the lines that answer them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxrunner.field_checks import likely
from jaxrunner.outputs import RequestOutput
from jaxrunner.sampling_params import SamplingParams

_BYTE_ORDER_MARK = "\N{BYTE ORDER MARK}"  # some editors begin a file with it
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
_SAMPLING_KEYS = {f.name for f in fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class FileRequest:
    """One line: a prompt as ``LLM.generate`` takes it, and how to continue it."""

    prompt: Mapping[str, Any]
    params: SamplingParams


def read_requests(lines: Iterable[str], defaults: Mapping[str, Any], name: str = "input") -> list[FileRequest]:
    """Reads requests; empty lines are passed over.

    Args:
        lines: ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or ``{"messages": conversation}`` each, with any
            field of SamplingParams beside it.
        defaults: fields of SamplingParams for lines that don't name them.
        name: of the file, for errors.

    Raises:
        ValueError: a line that is no request, with the name and the line's number; a file that isn't UTF-8. What a
            line asks for may still turn out not to be servable; that is for the LLM to say, which knows the model.
    """
    requests = []
    try:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if not line.strip():
                continue
            try:
                requests.append(_request(line, defaults))
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{name}, line {number}: {error}") from None
    except UnicodeDecodeError as error:  # by whoever reads the lines
        raise ValueError(f"{name} isn't UTF-8: {error}; save it as UTF-8") from None
    return requests


def _request(line: str, defaults: Mapping[str, Any]) -> FileRequest:
    try:
        values = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.pos + 1}") from None
    if not isinstance(values, dict):
        raise ValueError(f'a line must be an object like {{"prompt": "..."}}, got {line.strip():.60}')
    given = [key for key in _PROMPT_KEYS if values.get(key) is not None]
    if not given or ("messages" in given and len(given) > 1):
        raise ValueError(f"a line needs 'prompt' or 'prompt_token_ids' (or 'messages' alone), got {sorted(values)}")
    if unknown := sorted(values.keys() - _SAMPLING_KEYS - set(_PROMPT_KEYS)):
        unknown_fields = likely(unknown, [*_PROMPT_KEYS, *_SAMPLING_KEYS])
        raise ValueError(f"unknown {unknown_fields}: beside the prompt, SamplingParams has {sorted(_SAMPLING_KEYS)}")
    sampling = {key: value for key, value in values.items() if key in _SAMPLING_KEYS}
    return FileRequest({key: values[key] for key in given}, SamplingParams.from_dict({**defaults, **sampling}))


def answer_lines(outputs: Iterable[RequestOutput]) -> Iterator[str]:
    """A JSON line for each output: index, prompt_token_ids, token_ids, text, finish_reason.

    A refused request has ``error`` too. With ``n`` > 1 each sequence has a line, with its number as ``sample``.
    """
    for index, output in enumerate(outputs):
        for sequence in output.outputs:
            line: dict[str, Any] = {
                "index": index,
                "prompt_token_ids": output.prompt_token_ids,
                "token_ids": sequence.token_ids,
                "text": sequence.text,
                "finish_reason": sequence.finish_reason,
            }
            if len(output.outputs) > 1:
                line["sample"] = sequence.index
            if output.error is not None:
                line["error"] = output.error
            yield json.dumps(line, ensure_ascii=False)
