"""How a runner is set up. One frozen record, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxrunner import field_checks as checks
from jaxrunner.bucket_file import read_listed_buckets
from jaxrunner.shapes import Buckets, Policy, StepShapes

Warmup = Literal["all", "lazy"] | tuple[int, ...]

# Fields that a user of ``LLM`` can set as well.
SHARED_RULES = {
    "block_size": checks.integer(1),
    "gpu_memory_utilization": checks.FRACTION,
    "cpu_cache_bytes": checks.integer(1),
    "seed": checks.ANY_INTEGER,
    "max_logprobs": checks.integer(-1),
    "token_buckets": checks.BUCKETS,
    "logits_buckets": checks.BUCKETS,
    "request_buckets": checks.BUCKETS,
    "execution_mode": checks.one_of(*Policy.__members__),
    "background_compilation": checks.BOOLEAN,
    "compile_workers": checks.integer(1),
    "record_shapes": checks.or_none(checks.PLAIN_FILE),
    "attention": checks.TEXT,
    "check_invariants": checks.BOOLEAN,
    "compilation_cache": checks.CACHE_FOLDER,
    "executables": checks.or_none(checks.FOLDER),
    "trace": checks.or_none(checks.FILE),
}
_RULES = SHARED_RULES | {
    "max_model_len": checks.integer(1),
    "max_num_reqs": checks.integer(1),
    "max_num_batched_tokens": checks.integer(1),
    "num_blocks": checks.NUM_BLOCKS,
    "warmup": checks.buckets_or("all", "lazy"),
    "validate": checks.BOOLEAN,
}


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Limits and choices of a ``ModelRunner``.

    Attributes:
        max_model_len: tokens a request may have, prompt and outputs.
        max_num_reqs: requests that may be running at once (vLLM's max_num_seqs).
        max_num_batched_tokens: tokens of one step; the last token bucket.
        block_size: tokens a KV-cache block holds.
        num_blocks: blocks of the KV cache, the null block among them. None: as many as ``gpu_memory_utilization``
            of the device's memory has room for after weights and the largest executable's temporaries; on a device
            that states no limit (CPU), enough for every request at full length, at most ``cpu_cache_bytes``.
        token_buckets, logits_buckets, request_buckets: padded sizes: a tuple; "powers_of_two" (None means these),
            "spread", "vllm", "bounded:P" (at most P % padding); or a .json file that holds the sizes, as
            scripts/sweep_buckets.py writes it. The limits themselves are always added. Request buckets are
            attention's rows in mode PIECEWISE; in the other modes the rows follow from the tokens.
        execution_mode: FULL, the best measured; PIECEWISE, NONE, FULL_DECODE_ONLY, FULL_AND_PIECEWISE: see
            ``jaxrunner.shapes.modes``. Falls back as vLLM's cudagraph_mode does where attention can't take it.
        warmup: what is compiled before the first step: "all" buckets, none ("lazy", each when first met), or the
            token buckets listed.
        background_compilation: token buckets that ``warmup`` leaves out compile beside the work, which rounds up to
            one that is ready.
        compile_workers: threads that compile during the warm-up.
        record_shapes: file to which every step's shape is written, a JSON object a line.
        attention: name of an attention implementation, or "auto" for the best that takes the model and the device.
        check_invariants: check the eight invariants before every step. Costs time; free when off.
        validate: check every SchedulerOutput before anything changes.
        seed: of the engine; requests without a seed derive theirs from it.
        max_logprobs: the most likely tokens of which a request may want the log probabilities; -1: all. Every step
            has room for as many, so all cost memory: 8 bytes x vocabulary x logits rows.
        compilation_cache: folder in which (on CPUs, in one of its folders for each number of processors) compiled
            programs are kept between runs; None: the user's cache folder; False: nowhere.
        executables: folder that ``runner.executables.save`` of an earlier run wrote: programs are taken from there,
            and only those it lacks are compiled. Refused (``SavedExecutablesError``) if it is of another device kind,
            number of processors, JAX version, model, limits or project version. Its files are unpickled: name only
            folders you trust.
        trace: file to which a record of every step is written (``jaxrunner.trace``); None: nowhere.

    Raises:
        ValueError: a value of a wrong type or out of range, or two that contradict each other.
    """

    max_model_len: int = 2048
    max_num_reqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    token_buckets: Buckets = None
    logits_buckets: Buckets = None
    request_buckets: Buckets = None
    execution_mode: str = "FULL"
    warmup: Warmup = "lazy"
    background_compilation: bool = False
    compile_workers: int = 1
    record_shapes: Path | str | None = None
    attention: str = "auto"
    check_invariants: bool = False
    validate: bool = True
    seed: int = 0
    max_logprobs: int = 20
    gpu_memory_utilization: float = 0.9
    cpu_cache_bytes: int = 1 << 30
    compilation_cache: Path | str | Literal[False] | None = None
    executables: Path | str | None = None
    trace: Path | str | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self, _RULES)
        read_listed_buckets(self)
        if self.max_num_batched_tokens < self.max_num_reqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_reqs"
                f" ({self.max_num_reqs}): every running request decodes one token a step"
            )
        shapes = self.shapes()
        if not isinstance(self.warmup, str) and not set(self.warmup) <= set(shapes.tokens):
            raise ValueError(f"warmup {self.warmup} must be among the token buckets {shapes.tokens}")
        shapes.check()

    def shapes(self) -> StepShapes:
        """Every padded shape a runner of this configuration executes."""
        return StepShapes(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_reqs=self.max_num_reqs,
            min_block_size=self.block_size,
            token_buckets=self.token_buckets,
            logits_buckets=self.logits_buckets,
            request_buckets=self.request_buckets,
            policy=Policy.of(self.execution_mode),
        )
