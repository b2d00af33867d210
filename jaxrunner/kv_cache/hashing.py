"""When two full blocks hold the same keys and values: a chain of hashes over tokens.

Keys and values at a position depend on every token before it. So the hash of a block covers its parent's hash
and its own tokens, and equal hashes mean equal histories. Whatever else changes them (a salt, an adapter)
goes into the root of the chain. The hash is cryptographic: a prompt must not be able to collide with another
user's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 32


def chain_root(epoch: int, extra_keys: Sequence[tuple[str, str]] = ()) -> bytes:
    """The parent of a first block.

    Arguments:
        epoch: counts the resets of the cache; chains of different epochs never meet.
        extra_keys: (kind, value) pairs, as ("cache_salt", "a"). Kind and value are both length-prefixed, so
            that equal values of different kinds stay apart.
    """
    digest = blake2b(epoch.to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
    for pair in extra_keys:
        for text in pair:
            # surrogatepass: a lone surrogate is odd but legal in a str, and must not stop the engine
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.digest()


def extend_chain(hashes: list[bytes], token_ids: Sequence[int], block_size: int, parent: bytes) -> None:
    """Append the hashes of the full blocks of ``token_ids`` that ``hashes`` doesn't have yet.

    Arguments:
        hashes: one per full block so far; grown in place.
        token_ids: all tokens of the sequence, from position 0.
        block_size: tokens per hash.
        parent: the last of ``hashes``, or the chain's root.
    """
    start, end = len(hashes), len(token_ids) // block_size
    if start >= end:
        return
    data = memoryview(array("q", token_ids[start * block_size : end * block_size])).cast("B")
    stride = 8 * block_size
    for offset in range(0, len(data), stride):
        parent = blake2b(data[offset : offset + stride], digest_size=_DIGEST_BYTES, key=parent).digest()
        hashes.append(parent)
