"""Model definitions and checkpoints.

Names are imported when they're first asked for: fetching a model or reading a tokenizer needs no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.build import ModelDefinition, merge, split
    from models.checkpoint import Checkpoint, open_checkpoint
    from models.config import ModelConfig
    from models.decoder import Decoder
    from models.resolve import resolve_model
    from models.tokenizer import Tokenizer
    from models.weights import load_params

__all__ = [
    "Checkpoint",
    "Decoder",
    "ModelConfig",
    "ModelDefinition",
    "Tokenizer",
    "load_params",
    "merge",
    "open_checkpoint",
    "resolve_model",
    "split",
]
_HOMES = {
    "Checkpoint": "checkpoint",
    "Decoder": "decoder",
    "ModelConfig": "config",
    "ModelDefinition": "build",
    "Tokenizer": "tokenizer",
    "load_params": "weights",
    "merge": "build",
    "open_checkpoint": "checkpoint",
    "resolve_model": "resolve",
    "split": "build",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    return getattr(import_module(f"models.{_HOMES[name]}"), name)
