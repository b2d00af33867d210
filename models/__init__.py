"""Model definitions and checkpoints."""

from models.build import ModelDefinition, merge, split
from models.config import ModelConfig
from models.decoder import Decoder

__all__ = ["Decoder", "ModelConfig", "ModelDefinition", "merge", "split"]
