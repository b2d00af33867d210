"""Random ragged batches, poisoned wherever a kernel must not look, and what float64 NumPy makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels import CommonAttentionMetadata, KVCache


@dataclass(frozen=True)
class Heads:
    """Query heads, kv heads, head size, dtype of queries and cache."""

    query: int = 32
    kv: int = 8
    dim: int = 128
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Batch:
    """Requests in one token stream over a paged cache. Lengths are of the real requests; arrays are padded.

    Attributes:
        query_lens, seq_lens: tokens of this step, and with what came before.
        tables: blocks of each request, in a shuffled pool.
    """

    heads: Heads
    block_size: int
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    tables: tuple[np.ndarray, ...]
    num_blocks: int
    padded_tokens: int
    padded_rows: int

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def width(self) -> int:
        return max(len(table) for table in self.tables)

    def positions_and_slots(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each padded token: its position, 0 for padding; its slot, -1 for padding."""
        positions = np.zeros(self.padded_tokens, np.int32)
        slots = np.full(self.padded_tokens, -1, np.int32)
        at = 0
        for query_len, seq_len, table in zip(self.query_lens, self.seq_lens, self.tables, strict=True):
            span = np.arange(seq_len - query_len, seq_len)
            positions[at : at + query_len] = span
            slots[at : at + query_len] = table[span // self.block_size] * self.block_size + span % self.block_size
            at += query_len
        return positions, slots

    def metadata(self) -> CommonAttentionMetadata:
        starts = np.full(self.padded_rows + 1, self.num_tokens, np.int32)
        starts[: len(self.query_lens) + 1] = np.cumsum([0, *self.query_lens])
        seq_lens = np.zeros(self.padded_rows, np.int32)
        seq_lens[: len(self.seq_lens)] = self.seq_lens
        table = np.zeros((self.padded_rows, self.width), np.int32)
        for row, blocks in enumerate(self.tables):
            table[row, : len(blocks)] = blocks
        positions, slots = self.positions_and_slots()
        arrays = [jnp.asarray(x) for x in (starts, seq_lens, positions, table, slots)]
        return CommonAttentionMetadata.make(*arrays, block_size=self.block_size)


def make_batch(
    requests: Sequence[tuple[int, int]],
    heads: Heads,
    block_size: int,
    *,
    padded_tokens: int | None = None,
    padded_rows: int | None = None,
    seed: int = 0,
) -> Batch:
    """A batch of requests (tokens of this step, tokens before), their blocks drawn from a shuffled pool."""
    query_lens = tuple(new for new, _ in requests)
    seq_lens = tuple(new + before for new, before in requests)
    needs = [-(-length // block_size) for length in seq_lens]
    num_blocks = 1 + sum(needs) + 2
    pool = np.random.default_rng(seed).permutation(np.arange(1, num_blocks))
    tables = tuple(np.split(pool[: sum(needs)], np.cumsum(needs)[:-1]))
    tokens, rows = padded_tokens or sum(query_lens), padded_rows or len(requests)
    return Batch(heads, block_size, query_lens, seq_lens, tables, num_blocks, tokens, rows)


def random_requests(rng: np.random.Generator, tokens: int, rows: int, longest: int) -> list[tuple[int, int]]:
    """Any mix of decodes, chunks over a cached prefix and prefills that fits."""
    requests: list[tuple[int, int]] = []
    room = tokens
    while room and len(requests) < rows:
        new = 1 if rng.random() < 0.5 else int(rng.integers(1, min(room, longest) + 1))
        before = 0 if rng.random() < 0.3 else int(rng.integers(0, longest - new + 1))
        requests.append((new, before))
        room -= new
        if rng.random() < 0.1:
            break
    return requests


def values(batch: Batch, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q, k cache, v cache) in float32; NaN in padding tokens' queries, unowned blocks and unwritten slots."""
    rng = np.random.default_rng(seed)
    heads = batch.heads
    q = np.full((batch.padded_tokens, heads.query, heads.dim), np.nan, np.float32)
    q[: batch.num_tokens] = rng.standard_normal((batch.num_tokens, heads.query, heads.dim), np.float32)
    caches = np.full((2, batch.num_blocks * batch.block_size, heads.kv, heads.dim), np.nan, np.float32)
    for seq_len, table in zip(batch.seq_lens, batch.tables, strict=True):
        slots = (table[:, None] * batch.block_size + np.arange(batch.block_size)).reshape(-1)[:seq_len]
        caches[:, slots] = rng.standard_normal((2, seq_len, heads.kv, heads.dim), np.float32)
    shape = (batch.num_blocks, batch.block_size, heads.kv, heads.dim)
    return q, caches[0].reshape(shape), caches[1].reshape(shape)


def as_stored(array: np.ndarray, dtype: str) -> jnp.ndarray:
    """The array on the device, in the dtype that a model keeps it in."""
    return jnp.asarray(array).astype(dtype)


def expected_attention(
    batch: Batch,
    q: np.ndarray,
    cache: KVCache,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(attention, the same with every value replaced by its magnitude) of the real tokens, in float64.

    Written from the definition, request by request, with its keys gathered and masked. G query heads share a kv head.
    """
    heads, group = batch.heads, batch.heads.query // batch.heads.kv
    flat = [np.asarray(x.astype(jnp.float32)).reshape(-1, heads.kv, heads.dim) for x in cache]
    sink = None if sinks is None else np.asarray(sinks, np.float64).reshape(heads.kv, group, 1, 1)
    out = np.zeros((2, batch.num_tokens, heads.query, heads.dim))
    at = 0
    for query_len, seq_len, table in zip(batch.query_lens, batch.seq_lens, batch.tables, strict=True):
        slots = (table[:, None] * batch.block_size + np.arange(batch.block_size)).reshape(-1)[:seq_len]
        k, v = (x[slots].astype(np.float64).transpose(1, 0, 2)[:, None] for x in flat)  # [Hkv, 1, K, D]
        rows = np.asarray(q[at : at + query_len], np.float64).reshape(query_len, heads.kv, group, heads.dim)
        s = scale * (rows.transpose(1, 2, 0, 3) @ k.swapaxes(2, 3))  # [Hkv, G, Q, K]
        if soft_cap is not None:
            s = soft_cap * np.tanh(s / soft_cap)
        query_at, key_at = np.arange(seq_len - query_len, seq_len)[:, None], np.arange(seq_len)[None]
        seen = key_at <= query_at
        if window is not None:
            seen &= key_at > query_at - window
        s = np.where(seen, s, -np.inf)
        top = s.max(axis=-1, keepdims=True)
        top = top if sink is None else np.maximum(top, sink)
        weights = np.exp(s - top)
        weights /= weights.sum(axis=-1, keepdims=True) + (0.0 if sink is None else np.exp(sink - top))
        for n, each in enumerate((v, np.abs(v))):
            result = (weights @ each).transpose(2, 0, 1, 3)
            out[n, at : at + query_len] = result.reshape(query_len, heads.query, heads.dim)
        at += query_len
    return out[0], out[1]
