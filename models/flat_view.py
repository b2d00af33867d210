"""An array's memory as one row, for readers that fill it piece by piece."""

import numpy as np
from jaxtyping import Shaped


def flat_view(out: Shaped[np.ndarray, "..."], shape: tuple[int, ...]) -> Shaped[np.ndarray, "values"]:
    """`out` as one dimension, without a copy.

    Raises:
        ValueError: its shape isn't `shape`, or its memory has gaps, so that a row would be a copy.
    """
    if out.shape != shape or not out.flags.c_contiguous:
        raise ValueError(f"expected a contiguous array of shape {shape} to read into, got one of shape {out.shape}")
    return out.reshape(-1)
