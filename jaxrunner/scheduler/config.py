"""The limits that a scheduler keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a request.

    Attributes:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens per step, the token budget. If it is less than ``max_num_seqs``, it limits the
            running requests too. (A runner asks for at least ``max_num_seqs``; a scheduler alone does not.)
        max_model_len: tokens of one request, prompt and output.
        long_prefill_token_threshold: tokens per step of one request at most, so that a long prompt leaves
            room for others. 0: no such limit.
        policy: the order of service; "fcfs" (first come, first served) is the only one.

    Raises:
        ValueError: a value out of range; names it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        lows = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "max_model_len": 2,  # a prompt of one token and its successor
            "long_prefill_token_threshold": 0,
        }
        for name, low in lows.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.policy != "fcfs":
            raise ValueError(f"policy must be 'fcfs', got {self.policy!r}")

    @property
    def max_chunk(self) -> int:
        """Tokens per step of one request at most."""
        return min(self.long_prefill_token_threshold or self.max_num_batched_tokens, self.max_num_batched_tokens)
