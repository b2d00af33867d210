"""Fields that are carried and not yet served. Using one is an error that names it, before anything changes."""

from __future__ import annotations

from collections.abc import Collection

from jaxrunner.protocol import SchedulerOutput
from jaxrunner.sampling_params import SamplingParams

_REASONS = {
    "logits_processors": "a Python function a token can't run inside a compiled step, give LLM(logits_processors=...)",
    "spaces_between_special_tokens": "the tokenizer has no such mode",
    "extra_args": "no logits processor reads them",
    "prompt_logprob_token_ids": "prompt_logprobs=-1 gives all",
    "prompt_logprob_start": "prompt_logprobs gives every token of the prompt",
    "stream_interval": "outputs come after every step that has something for the request",
    "routed_experts_prompt_start": "no expert routing is returned",
    "trace_decode_token_ids": "tokens are sampled; prompt_logprobs judges given ones",
    "thinking_token_budget": "a model's thinking markers are not known",
}
# Is the field used? (n, stop strings, truncation and text options are the front door's to serve.)
_USED = {
    "logits_processors": lambda p: bool(p.logits_processors),
    "spaces_between_special_tokens": lambda p: not p.spaces_between_special_tokens,
    "extra_args": lambda p: bool(p.extra_args),
    "prompt_logprob_token_ids": lambda p: p.prompt_logprob_token_ids is not None,
    "prompt_logprob_start": lambda p: p.prompt_logprob_start is not None,
    "stream_interval": lambda p: p.stream_interval is not None,
    "routed_experts_prompt_start": lambda p: p.routed_experts_prompt_start != 0,
    "trace_decode_token_ids": lambda p: p.trace_decode_token_ids is not None,
    "thinking_token_budget": lambda p: p.thinking_token_budget is not None,
}


def refuse_sampling_params(params: SamplingParams, extra_args: Collection[str] = ()) -> None:
    """Raises ValueError for a parameter that is not served, with the reason.

    Args:
        extra_args: the keys that logits processors read.
    """
    used = [name for name, test in _USED.items() if test(params)]
    if set(params.extra_args or ()) <= set(extra_args):
        used = [name for name in used if name != "extra_args"]
    if used:
        reasons = "; ".join(f"{name}: {_REASONS[name]}" for name in used)
        raise ValueError(f"SamplingParams {used} are not served, leave them at their defaults ({reasons})")


def refuse_unserved(so: SchedulerOutput, extra_args: Collection[str] = ()) -> None:
    """Raises ValueError for a field of the scheduler's plan that the runner does not serve yet."""
    used = {
        "scheduled_spec_decode_tokens": any(map(len, so.scheduled_spec_decode_tokens.values())),
        "scheduled_encoder_inputs": bool(so.scheduled_encoder_inputs),
        "free_encoder_mm_hashes": bool(so.free_encoder_mm_hashes),
    }
    if names := [name for name, is_used in used.items() if is_used]:
        raise ValueError(f"SchedulerOutput fields {names} are not served yet: leave them empty")
    for data in so.scheduled_new_reqs:
        carried = {
            "prompt_embeds": data.prompt_embeds is not None,
            "mm_features": len(data.mm_features) > 0,
            "lora_request": data.lora_request is not None,
        }
        if names := [name for name, is_used in carried.items() if is_used]:
            raise ValueError(f"request {data.req_id!r} uses {names}, which are not served yet")
        if data.sampling_params is not None:
            try:
                refuse_sampling_params(data.sampling_params, extra_args)
            except ValueError as e:
                raise ValueError(f"request {data.req_id!r}: {e}") from None
