"""A GGUF file's tensors as the Hugging Face checkpoint has them, so that one assignment of weights serves both."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from models.errors import CheckpointError
from models.gguf_file import GGUFFile
from models.gguf_model import ROPE_FACTORS, architecture

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_PLAIN = _BLOCK | {"ffn_norm": "post_attention_layernorm"}
_BLOCK_GEMMA3 = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GGUFTensors:
    """The tensors of a GGUF file by their Hugging Face names."""

    def __init__(self, file: GGUFFile, config: Mapping[str, Any]):
        """
        Raises:
            CheckpointError: a tensor that the architecture doesn't have.
        """
        self._file, self._arch = file, architecture(file)
        self._heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        self._names = {self._hf_name(name): name for name in file.tensors if name != ROPE_FACTORS}
        shapes = {ours: file.tensors[theirs].shape for ours, theirs in self._names.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def _hf_name(self, name: str) -> str:
        if name in _TOP:
            return _TOP[name]
        block, index, rest = (name.split(".", 2) + ["", ""])[:3]
        stem, _, kind = rest.rpartition(".")
        table = _BLOCK_GEMMA3 if self._arch == "gemma3" else _BLOCK_PLAIN
        layer = int(index) if index.isdecimal() and len(index) < 6 else None
        known = stem in table and kind in ("weight", "bias")
        if block != "blk" or str(layer) != index or not known:  # "blk.00" would be a second name for layer 0
            raise CheckpointError(f"{self._file.path}: tensor {name!r} isn't part of a {self._arch} that is supported")
        return f"model.layers.{layer}.{table[stem]}.{kind}"

    def stored_alike(self, name: str, other: str) -> bool:
        """False, unlooked: only a head is compared, with the embedding that it's tied to, and no file has both."""
        return False

    def read_into(self, name: str, out: Shaped[np.ndarray, "..."]) -> None:
        """Dequantises one tensor into `out`, a contiguous array of its shape, as the Hugging Face checkpoint has it.

        llama: the file's q and k rows are ordered for interleaved rope, pairs (0, 1), (2, 3); they go back to halves.
        gemma3: the file holds norm weights with 1 added.
        """
        theirs = self._names[name]
        if self._arch == "gemma3" and name.endswith("norm.weight"):
            out[...] = self._file.read_tensor(theirs) - np.float32(1)
            return
        self._file.read_into(theirs, out)
        projection = name.split(".")[-2]
        if self._arch == "llama" and projection in self._heads:
            heads, rows = self._heads[projection], out.shape[0]
            if rows % (2 * heads):
                raise CheckpointError(
                    f"{self._file.path}: {theirs!r} has {rows} rows, which {heads} heads can't share evenly"
                )
            pairs = out.reshape(heads, rows // heads // 2, 2, *out.shape[1:])
            out[...] = pairs.swapaxes(1, 2).reshape(out.shape)
