"""The committed checkpoints of transformers, and a decoder from one without any of the project's file readers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from models import Decoder, ModelConfig
from models.assign import ParameterLoader

FOLDER = Path(__file__).parents[1] / "fixtures" / "models"
NAMES = sorted(path.name for path in FOLDER.iterdir())


class Fixture(NamedTuple):
    """One of them. ``logits`` are transformers', one row for each of ``ids``."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    ids: np.ndarray
    logits: np.ndarray


def fixture(name: str) -> Fixture:
    """Read anew every time, so that a test may change what it gets."""
    folder = FOLDER / name
    expected = np.load(folder / "expected.npz")
    config = json.loads((folder / "config.json").read_text())
    return Fixture(config, load_file(folder / "model.safetensors"), expected["ids"], expected["logits"])


def decoder_from(config: dict[str, Any], tensors: dict[str, np.ndarray], dtype: Any = jnp.float32) -> Decoder:
    loader = ParameterLoader(Decoder(ModelConfig.from_hf(config), dtype=dtype))
    for name, tensor in tensors.items():
        loader.assign(name, tensor)
    return loader.finish()
