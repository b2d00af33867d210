"""The named arrays of a step, and how they come out of the packed buffer."""

from __future__ import annotations

from dataclasses import dataclass, fields

import jax
from jaxtyping import Array, Int32

from jaxrunner.shapes import StepLayout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepArrays:
    """What the host tells the device about a step. All int32; see ``StepLayout`` for the meaning of each."""

    num_reqs: Int32[Array, ""]
    num_tokens: Int32[Array, ""]
    num_logits: Int32[Array, ""]
    flags: Int32[Array, ""]
    query_start_loc: Int32[Array, "R+1"]
    idx_mapping: Int32[Array, "R"]
    num_computed: Int32[Array, "R"]
    num_known: Int32[Array, "R"]
    num_prompt: Int32[Array, "R"]
    num_draft: Int32[Array, "R"]
    use_device: Int32[Array, "R"]
    logits_indices: Int32[Array, "S"]
    update_group: Int32[Array, "U"]
    update_cell: Int32[Array, "U"]
    update_value: Int32[Array, "U"]
    token_ids: Int32[Array, "T"]


_SCALARS = {"num_reqs", "num_tokens", "num_logits", "flags"}


def unpack(buffer: Int32[Array, "size"], layout: StepLayout) -> StepArrays:
    """The arrays that ``layout`` finds in ``buffer``.

    Raises:
        ValueError: the buffer is not of the layout's size.
    """
    if buffer.shape != (layout.size,):
        raise ValueError(f"a buffer of layout {layout} has {layout.size} words, got shape {buffer.shape}")
    arrays = {}
    for field in fields(StepArrays):
        at, length = layout.fields[field.name]
        arrays[field.name] = buffer[at] if field.name in _SCALARS else buffer[at : at + length]
    return StepArrays(**arrays)
