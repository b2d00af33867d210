"""How many tokens a request may have: what the model allows, and what the KV cache can hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request.

    Attributes:
        max_model_len: tokens, prompt and outputs.
        cache_tokens: tokens that the KV cache can hold for one request that has it to itself.
    """

    max_model_len: int
    cache_tokens: int

    @property
    def max_tokens(self) -> int:
        """Tokens that a request can reach. The last one is never fed in, so it needs no room in the cache."""
        return min(self.max_model_len, self.cache_tokens + 1)

    @property
    def max_prompt(self) -> int:
        """Tokens of the longest prompt: one output token must fit as well."""
        return self.max_tokens - 1

    def refusal(self, num_tokens: int) -> str | None:
        """Why a prompt of so many tokens can never run, and what would help; None if it can."""
        if num_tokens <= self.max_prompt:
            return None
        if num_tokens >= self.max_model_len:
            return (
                f"the prompt has {num_tokens} tokens, but max_model_len is {self.max_model_len} and at least one output"
                f" token must fit too: shorten it to {self.max_prompt} tokens or raise max_model_len"
            )
        return (
            f"the prompt has {num_tokens} tokens, but the KV cache holds {self.cache_tokens} of one request: shorten"
            " it or give the cache more blocks (num_gpu_blocks_override, gpu_memory_utilization)"
        )
