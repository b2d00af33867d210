"""The forward cut at attention: dense pieces that know only the number of tokens, and attention on its own shapes.

Between two attentions lies one piece: what is left of a layer and the beginning of the next. Layers of a kind share
their pieces, so a model of any depth has five programs a token bucket, and few are compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Float, Int32

from jaxrunner.step.functions import HeadInputs, StepFunctions
from jaxrunner.step.inputs import StepArrays
from jaxrunner.step.state import ForwardState
from jaxrunner.step.stream import token_stream
from models import merge
from models.rope import RopeTable
from pallas_kernels import AttentionLayer, KVCache, StepAttention

QKV = tuple[Float[Array, "T H D"], Float[Array, "T Hkv D"], Float[Array, "T Hkv D"]]
Leaves = tuple[Array, ...]


@dataclass(frozen=True)
class StepPieces:
    """The pieces of one model's forward. ``leaves`` are always the parameters that ``parameters`` names."""

    functions: StepFunctions
    layers: tuple[AttentionLayer, ...]

    @staticmethod
    def of(functions: StepFunctions) -> StepPieces:
        """The pieces of this model; its definition alone knows the layers."""
        definition = functions.graphdef
        model = merge(definition, (None,) * len(definition.names))  # type: ignore[arg-type]
        return StepPieces(functions, tuple(layer.attention.layer for layer in model.layers))

    def parameters(self, *parts: str) -> tuple[int, ...]:
        """Places, in the flat tuple of parameters, of those below ``parts``, such as "layers.3"."""
        names = self.functions.graphdef.names
        return tuple(i for part in parts for i, name in enumerate(names) if name.startswith(f"{part}."))

    def kind(self, index: int) -> AttentionLayer:
        """Layers of equal kind share their pieces, given parameters of equal shapes."""
        return replace(self.layers[index], name="")

    def begin(
        self, leaves: Leaves, state: ForwardState, inputs: StepArrays
    ) -> tuple[Float[Array, "T E"], QKV, tuple[RopeTable, ...], Int32[Array, "S_max"], HeadInputs, ForwardState]:
        """Embeddings and the first layer up to its attention. Parameters: embed_tokens, layers.0."""
        state = self.functions.with_table_updates(state, inputs)
        stream = token_stream(state, inputs)
        model = self._model(self.parameters("embed_tokens", "layers.0"), leaves)
        x, tables = model.embed(stream.token_ids), model.rope_tables(stream.positions)
        qkv = model.layers[0].before_attention(x, model.table_of(model.layers[0], tables))
        at, head_inputs = self.functions.head_inputs(inputs, stream)
        return x, qkv, tables, at, head_inputs, state

    def metadata(
        self, state: ForwardState, inputs: StepArrays, num_rows: int
    ) -> tuple[tuple[Any, Int32[Array, "T"]], ...]:
        """For each cache group attention's metadata over the first ``num_rows`` rows, and the slots."""
        rows = {
            name: getattr(inputs, name)[:num_rows]
            for name in ("idx_mapping", "num_computed", "num_known", "num_prompt", "num_draft", "use_device")
        }
        inputs = replace(inputs, query_start_loc=inputs.query_start_loc[: num_rows + 1], **rows)
        stream = token_stream(state, inputs)
        groups = range(len(self.functions.groups))
        attention = [self.functions.attention(g, state, inputs, stream) for g in groups]
        return tuple((each.metadata, each.slot_mapping) for each in attention)

    def attend(
        self, layer: AttentionLayer, cache: KVCache, qkv: QKV, metadata: Any, slots: Int32[Array, "T"]
    ) -> tuple[Float[Array, "T H D"], KVCache]:
        """Writes keys and values, and attends."""
        return StepAttention(self.functions.groups[layer.group].implementation, metadata, slots)(*qkv, cache, layer)

    def between(
        self,
        index: int,
        leaves: Leaves,
        x: Float[Array, "T E"],
        attended: Float[Array, "T H D"],
        tables: tuple[RopeTable, ...],
    ) -> tuple[Float[Array, "T E"], QKV]:
        """The rest of layer ``index`` and the beginning of the next. Parameters: those of both."""
        model = self._model(self.parameters(f"layers.{index}", f"layers.{index + 1}"), leaves)
        x = model.layers[index].after_attention(x, attended)
        following = model.layers[index + 1]
        return x, following.before_attention(x, model.table_of(following, tables))

    def end(
        self, leaves: Leaves, x: Float[Array, "T E"], attended: Float[Array, "T H D"], at: Int32[Array, "S_max"]
    ) -> tuple[Float[Array, "S_max E"], Float[Array, "T E"]]:
        """The rest of the last layer and the last norm, of the tokens ``at`` and of all. Parameters: layers.<last>,
        norm.
        """
        last = len(self.layers) - 1
        model = self._model(self.parameters(f"layers.{last}", "norm"), leaves)
        hidden = model.norm(model.layers[last].after_attention(x, attended))
        return hidden[at], hidden

    def _model(self, places: Sequence[int], leaves: Leaves) -> Any:
        """The model with these parameters only; no piece touches another."""
        graphdef = self.functions.graphdef
        params: list[Any] = [None] * len(graphdef.names)
        for place, leaf in zip(places, leaves, strict=True):
            params[place] = leaf
        return merge(graphdef, tuple(params))
