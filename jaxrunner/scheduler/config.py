"""The limits that a scheduler keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["fcfs", "priority"]
POLICIES = ("fcfs", "priority")


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
        policy: the order of service: "fcfs" (first come, first served), or "priority" (lowest ``Request.priority``
            first, and among equals first come, first served). Who is served last is preempted first.
        max_num_partial_prefills: requests that may be in the middle of their prompt between two steps; a prompt that
            would be one more waits. 0: no such limit.
        max_long_partial_prefills: the same of prompts longer than ``long_prefill_token_threshold``. Shorter ones
            overtake those that wait for it. 0: no such limit.

    Raises:
        ValueError: a value out of range, or two that contradict each other; names them.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    policy: Policy = "fcfs"
    max_num_partial_prefills: int = 0
    max_long_partial_prefills: int = 0

    def __post_init__(self) -> None:
        lows = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "max_model_len": 2,  # a prompt of one token and its successor
            "long_prefill_token_threshold": 0,
            "max_num_partial_prefills": 0,
            "max_long_partial_prefills": 0,
        }
        for name, low in lows.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {list(POLICIES)}, got {self.policy!r}")
        check_partial_prefills(
            self.max_num_partial_prefills, self.max_long_partial_prefills, self.long_prefill_token_threshold
        )

    @property
    def max_chunk(self) -> int:
        """Tokens per step of one request at most."""
        return min(self.long_prefill_token_threshold or self.max_num_batched_tokens, self.max_num_batched_tokens)


def check_partial_prefills(most: int, most_long: int, threshold: int) -> None:
    """Whether the three limits of prefills that are under way make sense together.

    Raises:
        ValueError: naming two that don't.
    """
    if most_long and not threshold:
        raise ValueError(
            f"max_long_partial_prefills ({most_long}) counts prompts longer than long_prefill_token_threshold, which is"
            " 0: set both or neither"
        )
    if most_long and most and most_long > most:
        raise ValueError(
            f"max_long_partial_prefills ({most_long}) must be at most max_num_partial_prefills ({most}): long ones are"
            " some of all"
        )
