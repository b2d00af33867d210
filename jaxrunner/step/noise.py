"""Noise that is a function of (seed, position, vocabulary index), and of nothing else.

So chunking, preemption, batch mates and the row a request sits in cannot change what it samples, and there is no
generator to rewind when a sample is discarded.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

_C1, _C2 = 0xCC9E2D51, 0x1B873593


def _u32(x: Array | int) -> Array:
    return jnp.asarray(x).astype(jnp.uint32) if not isinstance(x, int) else jnp.uint32(x)


def _rotate(x: Array, bits: int) -> Array:
    return (x << _u32(bits)) | (x >> _u32(32 - bits))


def murmur3(words: tuple[Array, ...], domain: int = 0) -> UInt32[Array, "..."]:
    """MurmurHash3 (x86, 32 bits) of little-endian 32-bit ``words``, which broadcast against each other.

    Args:
        domain: the hash's own seed; another domain gives an independent stream.
    """
    h = _u32(domain)
    for word in words:
        k = _rotate(_u32(word) * _u32(_C1), 15) * _u32(_C2)
        h = _rotate(h ^ k, 13) * _u32(5) + _u32(0xE6546B64)
    h = h ^ _u32(4 * len(words))
    h = (h ^ (h >> _u32(16))) * _u32(0x85EBCA6B)
    h = (h ^ (h >> _u32(13))) * _u32(0xC2B2AE35)
    return h ^ (h >> _u32(16))


def gumbel_noise(
    seed: Int32[Array, "S 2"],
    position: Int32[Array, "S"],
    vocab: int | Int32[Array, "S K"],
    domain: int = 0,
) -> Float32[Array, "S V"]:
    """Gumbel noise: argmax(logits + noise) draws from softmax(logits).

    Args:
        seed: low and high word of each row's 64-bit seed.
        position: position in its request of the token that is drawn.
        vocab: size of the vocabulary; or of each row the words whose noise is wanted.
    """
    index = jnp.arange(vocab, dtype=jnp.uint32)[None, :] if isinstance(vocab, int) else vocab
    bits = murmur3((seed[:, :1], seed[:, 1:], position[:, None], index), domain)
    # Small v is where large noise comes from, and float32 is finest there: v has 32 random bits near 0. Near 1 it
    # would round to 1 and give -inf.
    v = jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32), jnp.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-v))
