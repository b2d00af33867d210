"""Execution modes, which vLLM has as CUDA graph modes, and what is left of a policy if attention can't take it."""

from __future__ import annotations

from enum import Enum, IntEnum


class ExecutionMode(Enum):
    """How the forward of one step runs. Head and sampler are an executable of their own in every mode."""

    NONE = "NONE"  # at its true shape, compiled when first met: for debugging
    PIECEWISE = "PIECEWISE"  # dense pieces per token bucket, attention between them on shapes of its own
    FULL = "FULL"  # one executable


class Policy(Enum):
    """Which mode a step takes, by what it is: vLLM's cudagraph_mode. Values are (mixed steps, uniform decodes)."""

    NONE = (ExecutionMode.NONE, ExecutionMode.NONE)
    PIECEWISE = (ExecutionMode.PIECEWISE, ExecutionMode.PIECEWISE)
    FULL = (ExecutionMode.FULL, ExecutionMode.FULL)
    FULL_DECODE_ONLY = (ExecutionMode.NONE, ExecutionMode.FULL)
    FULL_AND_PIECEWISE = (ExecutionMode.PIECEWISE, ExecutionMode.FULL)

    @property
    def mixed(self) -> ExecutionMode:
        return self.value[0]

    @property
    def decode(self) -> ExecutionMode:
        return self.value[1]

    @property
    def separates(self) -> bool:
        """Uniform decodes have executables of their own."""
        return self.mixed is not self.decode

    @staticmethod
    def of(name: str) -> Policy:
        """A policy by its name.

        Raises:
            ValueError: there is none; the message lists them.
        """
        try:
            return Policy[name]
        except KeyError:
            raise ValueError(f"execution_mode must be one of {', '.join(Policy.__members__)}, got {name!r}") from None


class Support(IntEnum):
    """Which batches attention can take in an executable of fixed shape; more is better.

    Names are those of ``pallas_kernels.AttentionSupport``, which this module can't import: it would import JAX.
    """

    NEVER = 0
    SINGLE_TOKEN = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


def supported_policy(policy: Policy, support: Support, query_len: int = 1) -> Policy:
    """``policy``, or what vLLM falls back to where attention can't take it.

    Args:
        support: the least of all cache groups.
        query_len: tokens of a uniform decode, 1 + draft tokens.

    Raises:
        ValueError: FULL was asked for and attention can't run inside an executable at all.
    """
    if policy.mixed is ExecutionMode.FULL and support is not Support.ALWAYS:
        if support is Support.NEVER:
            raise ValueError(
                f"execution_mode {policy.name} needs attention that runs inside an executable, and this one supports"
                " NEVER: choose PIECEWISE or NONE, or another attention"
            )
        policy = Policy.FULL_AND_PIECEWISE
    if policy.decode is ExecutionMode.FULL:
        enough = Support.UNIFORM_BATCH if query_len > 1 else Support.SINGLE_TOKEN
        if support < enough:
            return Policy.PIECEWISE
    return policy
