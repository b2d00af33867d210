"""A scheduler's plan as JSON and back: what a trace keeps of it, enough to run the step again."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrunner.pooling import PoolingParams
from jaxrunner.protocol import BlockIds, CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from jaxrunner.repetition import RepetitionDetectionParams
from jaxrunner.sampling_params import RequestOutputKind, SamplingParams
from jaxrunner.structured_outputs import StructuredOutputsParams

_PLAIN = (str, int, float, bool, type(None))
# Of a request or a plan, what has no form in JSON. A trace says that it was there; a replay refuses the step.
_UNWRITTEN_REQUEST = ("prompt_embeds", "mm_features", "lora_request")
_UNWRITTEN_PLAN = ("scheduled_encoder_inputs", "free_encoder_mm_hashes")


def plan_to_json(so: SchedulerOutput) -> dict[str, Any]:
    """The plan's non-empty fields under their own names, as plain lists, dicts and numbers."""
    cached = so.scheduled_cached_reqs
    plan: dict[str, Any] = {
        "new": [_request_to_json(data) for data in so.scheduled_new_reqs],
        "cached": {
            "req_ids": list(cached.req_ids),
            "resumed_req_ids": sorted(cached.resumed_req_ids),
            "new_block_ids": [None if ids is None else _groups(ids) for ids in cached.new_block_ids],
            "num_computed_tokens": [int(n) for n in cached.num_computed_tokens],
            "num_output_tokens": [int(n) for n in cached.num_output_tokens],
            "new_token_ids": [_ints(ids) for ids in cached.new_token_ids],
            "all_token_ids": {req_id: _ints(ids) for req_id, ids in cached.all_token_ids.items()},
        },
        "num_scheduled_tokens": {req_id: int(n) for req_id, n in so.num_scheduled_tokens.items()},
        "total_num_scheduled_tokens": int(so.total_num_scheduled_tokens),
        "scheduled_spec_decode_tokens": {r: _ints(ids) for r, ids in so.scheduled_spec_decode_tokens.items()},
        "finished_req_ids": sorted(so.finished_req_ids),
        "preempted_req_ids": sorted(so.preempted_req_ids),
        "num_common_prefix_blocks": [int(n) for n in so.num_common_prefix_blocks],
        "block_copies": [[[int(a), int(b)] for a, b in copies] for copies in so.block_copies],
        "new_block_ids_to_zero": [_ints(ids) for ids in so.new_block_ids_to_zero],
    }
    unwritten = [name for name in _UNWRITTEN_PLAN if getattr(so, name)]
    if so.grammar_bitmask is not None:
        plan["grammar_bitmask"] = _grammar_to_json(so.grammar_bitmask)
    if unwritten:
        plan["unwritten"] = unwritten
    return plan


def plan_from_json(plan: Mapping[str, Any]) -> SchedulerOutput:
    """The plan that ``plan_to_json`` was given.

    Raises:
        ValueError: it used a field that a trace does not keep.
    """
    _refuse(plan, "the step")
    cached = plan["cached"]
    return SchedulerOutput(
        scheduled_new_reqs=[_request_from_json(data) for data in plan["new"]],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(cached["req_ids"]),
            resumed_req_ids=set(cached["resumed_req_ids"]),
            new_block_ids=[None if ids is None else tuple(ids) for ids in cached["new_block_ids"]],
            num_computed_tokens=list(cached["num_computed_tokens"]),
            num_output_tokens=list(cached["num_output_tokens"]),
            new_token_ids=list(cached["new_token_ids"]),
            all_token_ids=dict(cached["all_token_ids"]),
        ),
        num_scheduled_tokens=dict(plan["num_scheduled_tokens"]),
        total_num_scheduled_tokens=plan["total_num_scheduled_tokens"],
        scheduled_spec_decode_tokens=dict(plan["scheduled_spec_decode_tokens"]),
        finished_req_ids=set(plan["finished_req_ids"]),
        preempted_req_ids=set(plan["preempted_req_ids"]),
        num_common_prefix_blocks=list(plan["num_common_prefix_blocks"]),
        block_copies=[[(a, b) for a, b in copies] for copies in plan["block_copies"]],
        new_block_ids_to_zero=list(plan["new_block_ids_to_zero"]),
        grammar_bitmask=_grammar_from_json(plan["grammar_bitmask"]) if "grammar_bitmask" in plan else None,
    )


def snapshot(so: SchedulerOutput) -> SchedulerOutput:
    """The plan with a copy of each token list: a scheduler may go on appending to them before they are written."""
    cached, grammar = so.scheduled_cached_reqs, so.grammar_bitmask
    if grammar is not None:
        so = dataclasses.replace(
            so, grammar_bitmask=dataclasses.replace(grammar, grammar_bitmask=grammar.grammar_bitmask.copy())
        )
    if not (so.scheduled_new_reqs or cached.all_token_ids):
        return so
    new = [
        dataclasses.replace(
            data,
            prompt_token_ids=_copy(data.prompt_token_ids),
            prefill_token_ids=None if data.prefill_token_ids is None else _copy(data.prefill_token_ids),
        )
        for data in so.scheduled_new_reqs
    ]
    tokens = {req_id: _copy(ids) for req_id, ids in cached.all_token_ids.items()}
    return dataclasses.replace(
        so, scheduled_new_reqs=new, scheduled_cached_reqs=dataclasses.replace(cached, all_token_ids=tokens)
    )


def _request_to_json(data: NewRequestData) -> dict[str, Any]:
    request: dict[str, Any] = {
        "req_id": data.req_id,
        "prompt_token_ids": _ints(data.prompt_token_ids),
        "prefill_token_ids": None if data.prefill_token_ids is None else _ints(data.prefill_token_ids),
        "block_ids": _groups(data.block_ids),
        "num_computed_tokens": int(data.num_computed_tokens),
        "sampling_params": None if data.sampling_params is None else params_to_json(data.sampling_params),
    }
    if data.pooling_params is not None:
        request["pooling_params"] = dataclasses.asdict(data.pooling_params)
    carried = {name: getattr(data, name) for name in _UNWRITTEN_REQUEST}
    unwritten = [name for name, value in carried.items() if value is not None and not _is_empty(value)]
    if unwritten:
        request["unwritten"] = unwritten
    return request


def _request_from_json(request: Mapping[str, Any]) -> NewRequestData:
    _refuse(request, f"request {request['req_id']!r}")
    params, pooling = request["sampling_params"], request.get("pooling_params")
    return NewRequestData(
        request["req_id"],
        request["prompt_token_ids"],
        tuple(request["block_ids"]),
        request["num_computed_tokens"],
        None if params is None else params_from_json(params),
        request["prefill_token_ids"],
        pooling_params=None if pooling is None else PoolingParams(**pooling),
    )


def _grammar_to_json(grammar: GrammarOutput) -> dict[str, Any]:
    """The mask's words, little-endian, deflated, in base64: a bit a token of the vocabulary is long, and repeats."""
    mask = np.ascontiguousarray(grammar.grammar_bitmask, "<i4")
    return {
        "req_ids": list(grammar.structured_output_request_ids),
        "shape": list(mask.shape),
        "mask": base64.b64encode(zlib.compress(mask.tobytes(), 1)).decode("ascii"),
    }


def _grammar_from_json(written: Mapping[str, Any]) -> GrammarOutput:
    mask = np.frombuffer(zlib.decompress(base64.b64decode(written["mask"])), "<i4").astype(np.int32)
    return GrammarOutput(list(written["req_ids"]), mask.reshape(written["shape"]))


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults. One without a form in JSON is named under "unwritten"."""
    written: dict[str, Any] = {}
    unwritten = []
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value == field.default:
            continue
        try:
            written[field.name] = _plain(value)
        except TypeError:
            unwritten.append(field.name)
    if unwritten:
        written["unwritten"] = unwritten
    return written


def params_from_json(written: Mapping[str, Any]) -> SamplingParams:
    """What ``params_to_json`` was given; ValueError if it had a field that a trace does not keep."""
    _refuse(written, "SamplingParams")
    values = dict(written)
    if values.get("logit_bias") is not None:
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    if "output_kind" in values:
        values["output_kind"] = RequestOutputKind[values["output_kind"]]
    return SamplingParams(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, RequestOutputKind):
        return value.name
    if isinstance(value, StructuredOutputsParams | RepetitionDetectionParams):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, Sequence):
        return [_plain(v) for v in value]
    raise TypeError(f"{value!r} has no form in JSON")


def _refuse(written: Mapping[str, Any], what: str) -> None:
    if names := written.get("unwritten"):
        raise ValueError(f"{what} used {names}, which a trace does not keep: it can be shown and checked, not replayed")


def _ints(values: Sequence[int] | np.ndarray) -> list[int]:
    return values.tolist() if isinstance(values, np.ndarray) else [int(v) for v in values]


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | tuple) and not value


def _groups(block_ids: BlockIds) -> list[list[int]]:
    return [_ints(ids) for ids in block_ids]


def _copy(values: Sequence[int] | np.ndarray) -> Sequence[int] | np.ndarray:
    return values.copy() if isinstance(values, np.ndarray) else list(values)
