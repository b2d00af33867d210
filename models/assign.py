"""Fills a decoder with the tensors of a checkpoint, one at a time, whatever it fuses."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from jaxtyping import Shaped

from models.decoder import Decoder
from models.errors import CheckpointError
from models.hf_names import HEAD, Place, canonical_name, places
from models.linear import LinearWeights
from models.parameters import Initializer

_FLOATS = tuple(np.dtype(kind) for kind in ("float16", "float32", "float64", ml_dtypes.bfloat16))
_ALIGNMENT = 64  # bytes; an array that starts at a multiple is used by JAX's CPU backend as it is, without a copy
_NAMED = 5  # names in a message


@dataclass
class _Filling:
    """A parameter whose rows arrive in pieces."""

    buffer: Shaped[np.ndarray, "..."]
    awaited: set[str]


class ParameterLoader:
    """Takes a checkpoint's tensors by their Hugging Face names, in any order, into a decoder without memory.

    Each parameter is allocated once, in its final dtype, when its first tensor comes; tensors are written to their
    rows of it. With all of them there it goes to the device, and nothing of it stays behind: on a CPU, JAX uses the
    very buffer. So the peak is the finished parameters, plus what is still being filled, plus (for ``assign``) the
    tensor at hand.

    A checkpoint that holds a head although its configuration ties it to the embedding gets what current transformers
    give it: the head counts if its values differ, and the decoder's configuration then says so.

    Args:
        decoder: ``Decoder(config, dtype=...)``; it is filled, and returned by ``finish``.
        sharding: where parameters go; the default device if None.
    """

    def __init__(self, decoder: Decoder, sharding: jax.sharding.Sharding | None = None) -> None:
        self._decoder, self._sharding = decoder, sharding
        self._places = places(decoder)
        self._tied = decoder.config.tie_word_embeddings
        if self._tied:
            embedding = next(place for place in self._places.values() if place.param is decoder.embed_tokens.weight)
            head = LinearWeights(Initializer(decoder.dtype, None), embedding.shape[1], embedding.shape[0])
            self._places[HEAD] = Place(head.weight, embedding.shape)
            self._spare_head = head
        # By the parameter's identity: nnx compares parameters by their values.
        self._awaited: dict[int, set[str]] = {}
        for name, place in self._places.items():
            self._awaited.setdefault(id(place.param), set()).add(name)
        self._filling: dict[int, _Filling] = {}
        self._seen: set[str] = set()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Judges a checkpoint by its tensors' names and shapes alone, before anything is read or allocated.

        Raises:
            CheckpointError: tensors are missing, unexpected or misshapen; the message names them.
        """
        names = {canonical_name(name, self._decoder.config): name for name in shapes}
        for canonical, name in names.items():
            if canonical is not None:
                self._place(name, canonical, shapes[name])
        self._refuse_missing({name for name in names if name is not None})

    def assign(self, name: str, tensor: Shaped[np.ndarray, "..."]) -> None:
        """Takes one tensor; it may be reused or freed afterwards.

        Raises:
            CheckpointError: its name is unknown or came before, its shape isn't the configuration's, or it isn't of
                floating point.
        """

        def write(rows: Shaped[np.ndarray, "..."]) -> None:
            if tensor.dtype not in _FLOATS:
                kinds = ", ".join(kind.name for kind in _FLOATS)
                raise CheckpointError(f"tensor {name!r} is of type {tensor.dtype}, expected one of {kinds}")
            rows[...] = tensor

        self.fill(name, tensor.shape, write)

    def fill(self, name: str, shape: tuple[int, ...], write: Callable[[Shaped[np.ndarray, "..."]], None]) -> None:
        """Has one tensor written where it belongs, so that it's nowhere in memory a second time.

        Args:
            write: is given a contiguous array of that shape, in the parameters' dtype, and fills it. Not called for
                a tensor that is passed over.

        Raises:
            CheckpointError: its name is unknown or came before, or its shape isn't the configuration's.
        """
        canonical = canonical_name(name, self._decoder.config)
        if canonical is None:
            return
        place = self._place(name, canonical, shape)
        if canonical in self._seen:
            raise CheckpointError(f"tensor {name!r} comes twice")
        key = id(place.param)
        if key not in self._filling:
            whole = place.param.get_value().shape
            self._filling[key] = _Filling(_aligned(whole, self._decoder.dtype), set(self._awaited[key]))
        filling = self._filling[key]
        write(filling.buffer[place.first_row : place.first_row + place.shape[0]])
        self._seen.add(canonical)
        filling.awaited.remove(canonical)
        if not filling.awaited:
            del self._filling[key]
            place.param.set_value(jax.device_put(filling.buffer, self._sharding))

    def finish(self) -> Decoder:
        """The decoder, filled.

        Raises:
            CheckpointError: tensors are missing; the message names them.
        """
        self._refuse_missing(self._seen)
        decoder = self._decoder
        if self._tied and HEAD in self._seen:
            embedding, head = decoder.embed_tokens.weight.get_value(), self._spare_head.weight.get_value()
            if not np.array_equal(np.asarray(embedding), np.asarray(head)):
                logging.getLogger("models").warning(
                    "the configuration ties the head to the embedding, but the checkpoint has another %s: it is used",
                    HEAD,
                )
                decoder.lm_head = nnx.data(self._spare_head)
                decoder.config = dataclasses.replace(decoder.config, tie_word_embeddings=False)
        return decoder

    def _place(self, name: str, canonical: str, shape: tuple[int, ...]) -> Place:
        config = self._decoder.config
        place = self._places.get(canonical)
        if place is None:
            raise CheckpointError(
                f"tensor {name!r} isn't part of a {config.architecture} of {config.num_layers} layers as configured "
                f"(qkv_bias={config.qkv_bias}, o_bias={config.o_bias}, mlp_bias={config.mlp_bias}, "
                f"qk_norm={config.qk_norm})"
            )
        if tuple(shape) != place.shape:
            raise CheckpointError(f"tensor {name!r} has shape {tuple(shape)}, the configuration asks for {place.shape}")
        return place

    def _refuse_missing(self, there: set[str]) -> None:
        missing = sorted(self._places.keys() - there - ({HEAD} if self._tied else set()))
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            why = "; the head isn't tied (tie_word_embeddings is false), so it needs weights" if HEAD in missing else ""
            raise CheckpointError(f"the checkpoint lacks {', '.join(missing[:_NAMED])}{more}{why}")


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """Uninitialised memory that JAX's CPU backend can use in place."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
