"""The choices a user of ``LLM`` can make, under vLLM's names, and the runner's configuration that follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.typing import DTypeLike

from jaxrunner import field_checks as checks
from jaxrunner.bucket_file import read_listed_buckets
from jaxrunner.config import SHARED_RULES, RunnerConfig, Warmup
from jaxrunner.scheduler import POLICIES, Policy, check_partial_prefills
from jaxrunner.shapes import Buckets, StepShapes
from models import ModelConfig
from pallas_kernels import choose_attention
from pallas_kernels.paged_attention import IMPLEMENTATIONS

LONGEST_DEFAULT = 8192  # tokens of a request, where neither the user nor the model asks for less

_RULES = SHARED_RULES | {
    "max_model_len": checks.or_none(checks.integer(2)),  # a prompt of one token, and its successor
    "max_num_seqs": checks.or_none(checks.integer(1)),
    "max_num_batched_tokens": checks.or_none(checks.integer(1)),
    "num_gpu_blocks_override": checks.NUM_BLOCKS,
    "enable_prefix_caching": checks.BOOLEAN,
    "long_prefill_token_threshold": checks.integer(0),
    "max_num_partial_prefills": checks.integer(0),
    "max_long_partial_prefills": checks.integer(0),
    "scheduling_policy": checks.one_of(*POLICIES),
    "warmup": checks.buckets_or("auto", "all", "lazy"),
}

# Options of vLLM's that there are not, and what takes their place.
_OTHERWISE = {
    "enforce_eager": "here execution_mode='NONE'",
    "compilation_config": "here execution_mode and token_buckets",
    "cudagraph_capture_sizes": "here token_buckets",
    "tensor_parallel_size": "here one device does all",
    "kv_cache_dtype": "here the KV cache has the dtype of the model",
    "quantization": "here GGUF files are read, and dequantised",
    "trust_remote_code": "here no code of a checkpoint is ever run",
    "download_dir": "here HF_HOME, as huggingface_hub reads it",
}


@dataclass(frozen=True, kw_only=True)
class LLMConfig:
    """Options of ``LLM``. Where vLLM has such an option, name and meaning are vLLM's.

    Attributes:
        max_model_len: tokens a request may have, prompt and outputs. None: what the model was made for, at most 8192.
        max_num_seqs: sequences that run at once. None: 64 on CPU, 256 elsewhere, and no more than a step has tokens.
        max_num_batched_tokens: tokens of one step. None: 2048 on CPU, 8192 elsewhere.
        block_size: tokens that a KV-cache block holds.
        num_gpu_blocks_override: KV-cache blocks, one of them the null block. None: as many as there is room for.
        gpu_memory_utilization: of the device's memory, the fraction that weights, cache and temporaries may fill.
        cpu_cache_bytes: the KV cache's size at most on a device that states no limit.
        enable_prefix_caching: prompts share the blocks of a common beginning.
        long_prefill_token_threshold: tokens of one prompt a step at most; 0: no such limit.
        max_num_partial_prefills: prompts that may be computed in part at the same time; 0: no such limit.
        max_long_partial_prefills: the same of prompts longer than ``long_prefill_token_threshold``; shorter ones
            overtake those that wait for it. 0: no such limit.
        scheduling_policy: "fcfs" (first come, first served) or "priority" (lowest ``priority`` first).
        seed: of the engine; a request without a seed derives one from it and from its request id.
        max_logprobs: log probabilities that a request may want of each token, -1: of the whole vocabulary.
        token_buckets, logits_buckets: padded sizes of a step: a tuple; "powers_of_two", "spread" (1, 8, 32, 128, 512),
            "vllm", "bounded:P" (at most P % padding); or a .json file of sizes. None: "spread" on CPU, where compiling
            takes seconds a size; powers of two elsewhere.
        request_buckets: the same of attention's rows in mode PIECEWISE. None: powers of two.
        execution_mode: FULL, PIECEWISE, NONE, FULL_DECODE_ONLY or FULL_AND_PIECEWISE (vLLM's cudagraph_mode).
        warmup: what is compiled before the first request: "all" sizes, none ("lazy"), the token buckets listed, or
            "auto": lazy on CPU, all elsewhere.
        background_compilation: sizes that ``warmup`` leaves out compile beside the work.
        compile_workers: threads that compile before the first request.
        record_shapes: file to which every step's shape is written, for scripts/sweep_buckets.py.
        attention: name of an attention implementation, or "auto".
        check_invariants: check the eight invariants before every step.
        compilation_cache: folder for compiled programs; None: one in the user's cache folder; False: none.
        executables: folder that ``llm.runner.executables.save`` wrote: programs are taken from there, the rest are
            compiled; refused if they don't fit. Its files are unpickled: name only folders you trust.
        trace: file to which a record of every step is written; None: no record.

    Raises:
        ValueError: a value of a wrong type or out of range, before any model is loaded.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_cache_bytes: int = 1 << 30
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0
    max_long_partial_prefills: int = 0
    scheduling_policy: Policy = "fcfs"
    seed: int = 0
    max_logprobs: int = 20
    token_buckets: Buckets = None
    logits_buckets: Buckets = None
    request_buckets: Buckets = None
    execution_mode: str = "FULL"
    warmup: Warmup | Literal["auto"] = "auto"
    background_compilation: bool = False
    compile_workers: int = 1
    record_shapes: Path | str | None = None
    attention: str = "auto"
    check_invariants: bool = False
    compilation_cache: Path | str | Literal[False] | None = None
    executables: Path | str | None = None
    trace: Path | str | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self, _RULES)
        check_partial_prefills(
            self.max_num_partial_prefills, self.max_long_partial_prefills, self.long_prefill_token_threshold
        )
        read_listed_buckets(self)
        seqs, budget = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and budget is not None and budget < seqs:
            raise ValueError(
                f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({seqs}): every running sequence"
                " decodes a token a step"
            )

        if budget is not None and isinstance(self.token_buckets, tuple):
            StepShapes(budget, 1, token_buckets=self.token_buckets).check()
        if seqs is not None:
            both = (self.logits_buckets, self.request_buckets)
            logits, requests = (sizes if isinstance(sizes, tuple) else None for sizes in both)
            StepShapes(seqs, seqs, logits_buckets=logits, request_buckets=requests).check()
        names = ["auto", *(implementation.name for implementation in IMPLEMENTATIONS)]
        if self.attention not in names:
            raise ValueError(f"attention must be one of {names}, got {self.attention!r}")

    def check_model(self, model: ModelConfig, dtype: DTypeLike) -> RunnerConfig:
        """The runner's configuration for a model; refuses what can be seen before its weights are read.

        Raises:
            ValueError: a size that the model has no room for, two options that contradict each other, a token bucket
                to warm up that there is not, or an attention implementation that doesn't take the model.
        """
        platform = jax.default_backend()
        config = self.runner_config(model.max_position_embeddings, platform)
        choose_attention(model.attention_layers(), config.block_size, dtype, platform, requested=config.attention)
        return config

    def runner_config(self, model_len: int, platform: str) -> RunnerConfig:
        """Fills in what was left open.

        Args:
            model_len: tokens that the model's positions reach (max_position_embeddings).
            platform: JAX's name of the backend.

        Raises:
            ValueError: a value that this model has no room for, or two that contradict each other.
        """
        cpu = platform == "cpu"
        length = min(model_len, LONGEST_DEFAULT) if self.max_model_len is None else self.max_model_len
        if length > model_len:
            raise ValueError(f"max_model_len {length} is beyond the {model_len} positions that the model was made for")
        if length < 2:
            raise ValueError("max_model_len must be at least 2: a prompt of one token, and its successor")
        seqs, budget = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is None:
            seqs = min(64 if cpu else 256, budget or length * 256)
        if budget is None:
            budget = max(min(2048 if cpu else 8192, seqs * length), seqs)
        tokens, logits = self.token_buckets, self.logits_buckets
        if cpu:
            tokens = tokens if tokens is not None else "spread"
            logits = logits if logits is not None else "spread"
        warmup: Warmup = ("lazy" if cpu else "all") if self.warmup == "auto" else self.warmup
        shared = {name: getattr(self, name) for name in SHARED_RULES}
        return RunnerConfig(
            **shared | {"token_buckets": tokens, "logits_buckets": logits},
            max_model_len=length,
            max_num_reqs=seqs,
            max_num_batched_tokens=budget,
            num_blocks=self.num_gpu_blocks_override,
            warmup=warmup,
        )


def unknown_options(names: Iterable[str], known: Iterable[str]) -> TypeError:
    """The error for keywords that ``LLM`` does not have: names them, the likeliest ones meant, and all there are."""
    known, named = sorted(known), list(names)
    parts = [f"{name!r} (vLLM's: {_OTHERWISE[name]})" for name in named if name in _OTHERWISE]
    parts += [checks.likely([name], known) for name in named if name not in _OTHERWISE]
    return TypeError(f"LLM has no option {', '.join(parts)}; its options are {', '.join(known)}")


def tuples(value: Any) -> Any:
    """Lists as tuples: bucket sizes are hashed with the configuration."""
    return tuple(value) if isinstance(value, list) else value
