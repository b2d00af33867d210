"""From a model's name to a model in memory, with its tokenizer and what its author recommends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.refusals import refuse_sampling_params
from jaxrunner.sampling_params import SamplingParams
from models import Decoder, ModelConfig
from models.checkpoint import open_checkpoint
from models.hf_tokenizer import folder_tokenizer
from models.resolve import resolve_model
from models.tokenizer import Tokenizer
from models.weights import DTYPES, load_params

# A generation_config.json's name for each sampling parameter that is taken from it.
_RECOMMENDED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. ``LLM`` takes one in place of a name, for a model that was made in Python.

    Attributes:
        decoder: definition and parameters.
        tokenizer: None: prompts are token ids, and sampling parameters need ``detokenize=False``.
        eos_token_ids: every id that ends a text: the configurations' and the tokenizer's together.
        generation_config: the checkpoint's generation_config.json, {} without one.
        source: where it came from.
        seconds: what loading took.
    """

    decoder: Decoder
    tokenizer: Tokenizer | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    source: str = "memory"
    seconds: float = 0.0


def load_model(
    name: str | Path,
    tokenizer: str | Path | Tokenizer | None = None,
    dtype: str = "auto",
    check: Callable[[ModelConfig, jnp.dtype], object] | None = None,
) -> LoadedModel:
    """Finds, checks and loads a model.

    Args:
        name: a folder, a .gguf file, the name of a fetched model, or a hub id.
        tokenizer: another tokenizer than the model's own: one that was built, or a folder or file that has one.
        dtype: of the parameters: "float32", "bfloat16", or "auto": float32 on CPU, bfloat16 elsewhere.
        check: called with the configuration and the parameters' type before any weight is read, to refuse the model.

    Raises:
        ValueError: not found, broken, not supported, or an unknown dtype; and what ``check`` raises.
    """
    start = time.perf_counter()
    chosen = choose_dtype(dtype)
    checkpoint = open_checkpoint(resolve_model(name))
    if check is not None:
        check(checkpoint.config, chosen)
    own = _load_tokenizer(tokenizer) if tokenizer is not None else checkpoint.tokenizer
    decoder = load_params(checkpoint, chosen)
    jax.block_until_ready(decoder)
    return LoadedModel(
        decoder,
        own,
        checkpoint.eos_token_ids(own),
        checkpoint.generation_config,
        checkpoint.source,
        time.perf_counter() - start,
    )


def choose_dtype(dtype: str) -> jnp.dtype:
    """The parameters' type by its name; "auto" is float32 on CPU, where it is as fast, and bfloat16 elsewhere."""
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be 'auto', 'float32' or 'bfloat16', got {dtype!r}")
    return jnp.dtype(dtype)


def recommended_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters that a checkpoint recommends; SamplingParams' own defaults for all others.

    A recommendation that is out of range, or of a feature that is not served yet, is left out, and logged.
    """
    values = {
        ours: generation_config[theirs]
        for theirs, ours in _RECOMMENDED.items()
        if generation_config.get(theirs) is not None
    }
    for name in list(values):
        try:
            refuse_sampling_params(SamplingParams(**{name: values[name]}))
        except ValueError as error:
            logging.getLogger("jaxrunner").warning("generation_config's %s is left out: %s", name, error)
            del values[name]
    return SamplingParams(**values)


def _load_tokenizer(tokenizer: str | Path | Tokenizer) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    path = resolve_model(tokenizer)
    found = folder_tokenizer(path) if path.is_dir() else open_checkpoint(path).tokenizer
    if found is None:
        raise ValueError(f"{path} holds no tokenizer: expected a folder with tokenizer.json, or a .gguf file")
    return found
