#!/usr/bin/env python3
"""Writes tests/fixtures/models/: tiny random checkpoints by Hugging Face transformers, with the logits it computes.

They say whether this project's models compute what transformers' do. They are committed, so the tests need neither
transformers nor PyTorch; run this only to add or change one, in an environment of its own:

    python3 -m venv /tmp/fixtures && /tmp/fixtures/bin/pip install torch==2.13.0 transformers==5.24.0 numpy
    OMP_NUM_THREADS=1 /tmp/fixtures/bin/python scripts/make_model_fixtures.py [NAME ...]

(the CPU build of PyTorch is enough). The same versions write the same bytes.

Each folder has config.json, generation_config.json and model.safetensors as ``save_pretrained`` writes them, and
expected.npz: ``ids`` [40] and ``logits`` [40, V], float32, by eager attention. Sizes are chosen so that mixing two up
breaks a shape or a number (head_dim isn't hidden_size / heads, 4 query heads share 2 key heads), and sequences are
longer than windows. transformers' own initialisation is so flat that a wrong model gives nearly the right logits, so
weights are drawn with standard deviation fan_in^-0.5, and norms and biases away from 1 and 0.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

FOLDER = Path(__file__).parents[1] / "tests" / "fixtures" / "models"
LIMIT = 300 * 1024  # bytes a folder
LENGTH = 40

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
GEMMA: dict[str, Any] = BASE | {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "query_pre_attn_scalar": 64,
    "sliding_window": 8,
}
FIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # Grouped queries, untied head, head_dim of its own.
    "llama": ("LlamaConfig", BASE | {"tie_word_embeddings": False}),
    # Scaling that sets in within the fixture's 40 tokens; biases wherever Llama can have them; tied.
    "llama3_rope": (
        "LlamaConfig",
        BASE
        | {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    # Biases of q, k and v large enough to decide. A window is named, and switched off.
    "qwen2": (
        "Qwen2Config",
        {key: value for key, value in BASE.items() if key != "head_dim"}
        | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    ),
    # The first layer sees everything, the others a window.
    "qwen2_window": (
        "Qwen2Config",
        {key: value for key, value in BASE.items() if key != "head_dim"}
        | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    # Norms of queries and keys.
    "qwen3": ("Qwen3Config", BASE | {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}),
    # A window in every layer.
    "mistral": ("MistralConfig", BASE | {"sliding_window": 8}),
    # Five local layers to one global, two rope bases, scores scaled by something else than head_dim.
    "gemma3": ("Gemma3TextConfig", GEMMA),
    # As the larger ones: global rope scaled. Another pattern of layers, another local base, logits capped.
    "gemma3_scaled": (
        "Gemma3TextConfig",
        GEMMA
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            "final_logit_softcapping": 3.0,
        },
    ),
}


def randomise(model: torch.nn.Module, bias_limit: float) -> None:
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bias_limit)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)


def make(name: str) -> None:
    import torch
    import transformers

    config_class, settings = FIXTURES[name]
    config = getattr(transformers, config_class)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    randomise(model, bias_limit=3.0 if name == "qwen2" else 0.5)
    folder = FOLDER / name
    model.save_pretrained(folder)
    ids = torch.randint(3, config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        logits = model(ids).logits[0]
    np.savez_compressed(folder / "expected.npz", ids=ids[0].numpy().astype(np.int32), logits=logits.numpy())
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: {size} bytes, logits' standard deviation {logits.std():.2f}")
    if size > LIMIT:
        sys.exit(f"{folder} has {size} bytes, more than {LIMIT}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FIXTURES)} (default: all)")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in FIXTURES]:
        parser.error(f"there are no fixtures {unknown}; there are {', '.join(FIXTURES)}")
    import torch  # not in this project's environment

    torch.set_num_threads(1)
    for name in names or FIXTURES:
        make(name)


if __name__ == "__main__":
    main()
