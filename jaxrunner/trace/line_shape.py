"""Is a line of a trace whole? What it says may be wrong, that is for ``check``; here it is only complete."""

from __future__ import annotations

from typing import Any

from jaxrunner.trace.format import ROW_ARRAYS, TOKEN_ARRAYS

_ALWAYS = ("step", "req_ids", "sampled", "buffer_intact", "times_us", "plan")
_PLAN = ("new", "cached", "num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens",
         "finished_req_ids", "preempted_req_ids", "block_copies", "new_block_ids_to_zero")  # fmt: skip
_CACHED = ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens", "new_token_ids",
           "all_token_ids")  # fmt: skip
_COUNTS = ("num_tokens", "num_logits", "flags")
_BUCKET = ("tokens", "requests", "logits_rows", "uniform")
_GROUPS = ("block_rows", "block_row_lengths", "slot_mapping")


def flaw(line: dict[str, Any], num_groups: int) -> str | None:
    """What a step's line lacks, in words; None if nothing (or if it is an event without a step)."""
    if (event := line.get("event")) is not None:
        if event != "failed" or (found := _missing(line, (*_ALWAYS, "error"))) is not None:
            return found if event == "failed" else None
        if not line["req_ids"]:
            return None  # it was refused, perhaps for what its plan lacks
    try:
        return _missing(line, _ALWAYS) or _plan_flaw(line["plan"]) or _array_flaw(line, num_groups)
    except (TypeError, AttributeError) as error:
        return f"something in it is of another kind ({error})"


def _plan_flaw(plan: dict[str, Any]) -> str | None:
    found = _missing(plan, _PLAN, "plan: ") or _missing(plan["cached"], _CACHED, "plan: cached: ")
    if found:
        return found
    cached = plan["cached"]
    for name in ("new_block_ids", "num_computed_tokens"):
        if len(cached[name]) != len(cached["req_ids"]):
            return f"plan: cached: {name} has {len(cached[name])} entries for {len(cached['req_ids'])} requests"
    fields = ("req_id", "prompt_token_ids", "prefill_token_ids", "block_ids", "num_computed_tokens", "sampling_params")
    return next((found for data in plan["new"] if (found := _missing(data, fields, "plan: new: "))), None)


def _array_flaw(line: dict[str, Any], num_groups: int) -> str | None:
    rows = len(line["req_ids"])
    if not rows:
        return None
    arrays = ("request_indices", *ROW_ARRAYS, *TOKEN_ARRAYS, "query_start_loc", "logits_indices")
    if found := _missing(line, (*_COUNTS, "bucket", "mode", *arrays, *_GROUPS)):
        return found
    if found := _missing(line["bucket"], _BUCKET, "bucket: "):
        return found
    least = dict.fromkeys(("request_indices", *ROW_ARRAYS), rows) | {"query_start_loc": rows + 1}
    least |= dict.fromkeys(TOKEN_ARRAYS, line["num_tokens"]) | {"logits_indices": line["num_logits"]}
    for name, n in least.items():
        if len(line[name]) < n:
            return f"{name} has {len(line[name])} entries, {n} are in use"
    for name in _GROUPS:
        if len(line[name]) != num_groups:
            return f"{name} has {len(line[name])} lists for {num_groups} cache groups"
        n = line["bucket"]["tokens"] if name == "slot_mapping" else rows
        for group, values in enumerate(line[name]):
            if len(values) < n:
                return f"{name} of cache group {group} has {len(values)} entries, {n} are in use"
    return None


def _missing(found: dict[str, Any], names: tuple[str, ...], where: str = "") -> str | None:
    lacking = [name for name in names if name not in found]
    return f"{where}it lacks {lacking}" if lacking else None
