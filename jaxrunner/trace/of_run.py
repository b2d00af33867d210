"""The recorder that a runner's configuration asks for, and what the head of its trace says of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrunner.batch import InputBatch
from jaxrunner.config import RunnerConfig
from jaxrunner.trace.encode import Geometry
from jaxrunner.trace.recorder import Recorder, StepRecorder
from models import ModelConfig


def recorder_of_run(
    config: RunnerConfig, batch: InputBatch, model: ModelConfig, dtype: jnp.dtype, attention: Sequence[str]
) -> Recorder | None:
    """None unless ``config.trace`` names a file.

    Args:
        dtype: of the KV cache.
        attention: why which attention was taken.
    """
    if config.trace is None:
        return None
    about = {
        "config": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(config).items()},
        "model": {"architecture": model.architecture, "num_layers": model.num_layers, "dtype": str(dtype)},
        "device": jax.devices()[0].device_kind,
        "attention": list(attention),
    }
    return StepRecorder(config.trace, Geometry.of(batch), about)
