"""A checkpoint's weights into a decoder."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.assign import ParameterLoader
from models.checkpoint import Checkpoint
from models.decoder import Decoder
from models.errors import CheckpointError
from models.hf_names import EMBEDDING, HEAD, canonical_name

DTYPES = ("float32", "bfloat16")


def load_params(
    checkpoint: Checkpoint, dtype: DTypeLike = jnp.float32, sharding: jax.sharding.Sharding | None = None
) -> Decoder:
    """The checkpoint's model in memory, all parameters in `dtype`.

    Names and shapes are compared with the configuration before any memory is taken. Then tensors are read one at a
    time, straight to where they stay and converted on the way: the peak is the weights and a few MB.

    Args:
        checkpoint: from `open_checkpoint`.
        dtype: float32 or bfloat16 (rounded to nearest even, once, from the stored or dequantised values).
        sharding: where parameters go; the default device if None.

    Raises:
        CheckpointError: tensors are missing, unexpected or misshapen (they are named), or a file changed meanwhile.
        ValueError: another dtype.
    """
    target = np.dtype(dtype)
    if target.name not in DTYPES:
        raise ValueError(f"dtype is {target.name!r}, expected one of {', '.join(DTYPES)}")
    loader = ParameterLoader(Decoder(checkpoint.config, dtype=target), sharding)
    try:
        loader.check(checkpoint.shapes)
        copied = _copied_head(checkpoint)
        for name in checkpoint.names:
            if name == copied:
                continue
            loader.fill(name, checkpoint.shapes[name], partial(checkpoint.read_into, name))
        return loader.finish()
    except CheckpointError as error:
        if checkpoint.source in str(error):
            raise
        raise CheckpointError(f"{checkpoint.source}: {error}") from None


def _copied_head(checkpoint: Checkpoint) -> str | None:
    """The name of a head that is the embedding once more, in a model that ties them: it isn't worth its memory."""
    if not checkpoint.config.tie_word_embeddings:
        return None
    names = {canonical_name(name, checkpoint.config): name for name in checkpoint.names}
    if HEAD in names and EMBEDDING in names and checkpoint.stored_alike(names[HEAD], names[EMBEDDING]):
        return names[HEAD]
    return None
