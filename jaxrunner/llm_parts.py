"""What an ``LLM`` is put together from: runner, engine and input processor, made for a model and its options."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxrunner.config import RunnerConfig
from jaxrunner.engine import Engine
from jaxrunner.grammars import Grammars
from jaxrunner.input_processor import InputProcessor
from jaxrunner.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from jaxrunner.llm_config import LLMConfig
from jaxrunner.loading import LoadedModel
from jaxrunner.logits_processors import LogitsProcessor
from jaxrunner.progress import compile_status
from jaxrunner.runner import ModelRunner


def make_runner(
    model: LoadedModel, config: RunnerConfig, quiet: bool, logits_processors: Sequence[LogitsProcessor]
) -> ModelRunner:
    """The runner, warmed up; unless ``quiet`` that is shown on stderr, and the size of the KV cache it chose."""
    with compile_status(quiet) as tell:
        runner = ModelRunner(
            model.decoder,
            config,
            eos_token_ids=model.eos_token_ids,
            on_compiled=tell,
            logits_processors=logits_processors,
        )
    if not quiet and config.num_blocks is None:
        print(f"KV cache: {runner.cache_plan.why}", file=sys.stderr)
    return runner


def make_engine(runner: ModelRunner, model: LoadedModel, config: LLMConfig, grammars: Grammars | None) -> Engine:
    """The engine over a runner."""
    return Engine(
        runner,
        kv_cache_config(runner),
        model.tokenizer,
        eos_token_ids=model.eos_token_ids,
        grammars=grammars,
        enable_prefix_caching=config.enable_prefix_caching,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        scheduling_policy=config.scheduling_policy,
    )


def make_input_processor(
    engine: Engine, model: LoadedModel, grammars: Grammars | None, logits_processors: Sequence[LogitsProcessor]
) -> InputProcessor:
    """What checks prompts for an engine."""
    return InputProcessor(
        model.tokenizer,
        model.decoder.config.vocab_size,
        engine.scheduler.limits,
        model.eos_token_ids,
        engine.runner.config.max_logprobs,
        grammars,
        tuple(logits_processors),
    )


def kv_cache_config(runner: ModelRunner) -> KVCacheConfig:
    """The blocks that a runner has, as an ``Engine`` over it wants to know them."""
    layers = runner.model_config.attention_layers()
    spec = FullAttentionSpec(
        block_size=runner.config.block_size,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        dtype=runner.kv_caches[0].k.dtype.name,
    )
    return KVCacheConfig(runner.num_blocks, [KVCacheGroup(range(len(layers)), spec)])
