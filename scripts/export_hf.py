#!/usr/bin/env python
"""Writes a model as a Hugging Face folder in float32: config.json, model.safetensors and tokenizer.json.

    export_hf.py smollm2-135m-instruct smollm2-135m gemma3-270m gemma3-270m     NAME FOLDER, any number of pairs

So transformers can be asked about the very weights that this project runs. A model that is such a folder already is
not written again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command import report_error, run_command  # noqa: E402


def export(model: str, folder: Path) -> Path:
    """Where the model is as a Hugging Face folder: itself if it is one, else ``folder``, to which it is written.

    Raises:
        ValueError: there is no such model, or it can't be read.
    """
    import safetensors.numpy

    from models.checkpoint import open_checkpoint
    from models.gguf_file import read_gguf
    from models.gguf_model import hf_config
    from models.resolve import resolve_model

    path = resolve_model(model)
    if path.is_dir():
        return path
    checkpoint = open_checkpoint(path)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(dict(checkpoint.tensors()), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(read_gguf(path))), encoding="utf-8")
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.backend.save(str(folder / "tokenizer.json"))
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", metavar="NAME FOLDER", help="a model, and where to write it")
    pairs = parser.parse_args(arguments).pairs
    if len(pairs) % 2:
        parser.error(f"each model needs a folder: {pairs[-1]!r} has none")
    try:
        for model, folder in zip(pairs[::2], pairs[1::2], strict=True):
            print(export(model, Path(folder)))
    except (ValueError, OSError) as error:
        return report_error("export_hf", error, code=1)
    return 0


if __name__ == "__main__":
    run_command(main)
