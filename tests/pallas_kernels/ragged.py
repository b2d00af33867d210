"""Ragged batches for tests of attention: shuffled tables, and poison wherever a result must not look."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels import CommonAttentionMetadata, KVCache
from tests.pallas_kernels import oracle


@dataclass(frozen=True)
class Shape:
    """What is compiled: tokens, rows, table width, block size, heads, kv heads, head size, dtype of q and cache."""

    tokens: int
    rows: int
    width: int = 12
    block_size: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    dtype: str = "float32"

    @property
    def blocks(self) -> int:
        return 1 + self.rows * self.width


@dataclass(frozen=True)
class Batch:
    shape: Shape
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    tables: Sequence[list[int]]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def queries(self) -> jnp.ndarray:
        return jnp.asarray(self.q, self.shape.dtype)

    @property
    def cache(self) -> KVCache:
        return KVCache(jnp.asarray(self.k, self.shape.dtype), jnp.asarray(self.v, self.shape.dtype))

    def metadata(self, causal: bool = True) -> CommonAttentionMetadata:
        shape, size = self.shape, self.shape.block_size
        starts = np.full(shape.rows + 1, self.num_tokens, np.int32)
        starts[: len(self.query_lens) + 1] = np.cumsum([0, *self.query_lens])
        seq_lens = np.zeros(shape.rows, np.int32)
        seq_lens[: len(self.seq_lens)] = self.seq_lens
        table = np.zeros((shape.rows, shape.width), np.int32)
        positions, slots = np.zeros(shape.tokens, np.int32), np.full(shape.tokens, -1, np.int32)
        for row, (blocks, query_len, seq_len) in enumerate(
            zip(self.tables, self.query_lens, self.seq_lens, strict=True)
        ):
            table[row, : len(blocks)] = blocks
            span, tokens = np.arange(seq_len - query_len, seq_len), slice(starts[row], starts[row + 1])
            positions[tokens] = span
            slots[tokens] = np.array(blocks)[span // size] * size + span % size
        arrays = [jnp.asarray(x) for x in (starts, seq_lens, positions, table, slots)]
        return CommonAttentionMetadata.make(*arrays, block_size=size, causal=causal)

    def expected(self, **options: object) -> np.ndarray:
        """The oracle's result, of q and cache as the shape's dtype holds them."""
        return self.expected_with_magnitude(**options)[0]

    def expected_with_magnitude(self, **options: object) -> tuple[np.ndarray, np.ndarray]:
        """(result, the same weighted mean of the values' magnitudes): rounding errors scale with the latter."""
        inputs = [np.asarray(x.astype(jnp.float32)) for x in (self.queries, *self.cache)]
        return oracle.attention(*inputs, self.query_lens, self.seq_lens, self.tables, **options)


def make_batch(
    shape: Shape,
    requests: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    poison: float = np.nan,
    window: int | None = None,
) -> Batch:
    """Requests (tokens of this step, tokens computed before).

    Poisoned: the queries of padding tokens, every block that no request owns (the null block among them), and the
    unwritten slots of every owned block. With a window, blocks that have left it are given back: the null block
    stands for them in the table.
    """
    rng = np.random.default_rng(seed)
    size = shape.block_size
    free = [int(block) for block in rng.permutation(np.arange(1, shape.blocks))]
    query_lens = [new for new, _ in requests]
    seq_lens = [new + computed for new, computed in requests]
    q = np.full((shape.tokens, shape.heads, shape.head_dim), poison, np.float32)
    q[: sum(query_lens)] = rng.standard_normal((sum(query_lens), *q.shape[1:]))
    k, v = np.full((2, shape.blocks, size, shape.kv_heads, shape.head_dim), poison, np.float32)
    tables = []
    for new, computed in requests:
        first_key = 0 if window is None else max(0, computed + 1 - window)
        table = [0] * (first_key // size)
        # Where there is room, one block more than needed: reserved ahead, and holding nothing yet.
        while len(table) < min(-(-(new + computed) // size) + 1, shape.width):
            table.append(free.pop())
        for j in range(first_key, new + computed):
            place = table[j // size], j % size
            k[place], v[place] = rng.standard_normal((2, shape.kv_heads, shape.head_dim))
        tables.append(table)
    return Batch(shape, query_lens, seq_lens, tables, q, k, v)


@st.composite
def requests_of(draw: st.DrawFn, shape: Shape) -> list[tuple[int, int]]:
    """Any requests that fit the shape: decodes, chunks over a cached prefix, prefills, in any order."""
    requests: list[tuple[int, int]] = []
    room = shape.tokens
    for _ in range(draw(st.integers(1, shape.rows))):
        if room == 0:
            break
        longest = shape.width * shape.block_size
        new = draw(st.one_of(st.just(1), st.integers(1, min(room, longest))))
        most = longest - new
        computed = draw(st.one_of(st.just(0), st.integers(0, most), st.integers(max(0, most - 8), most)))
        requests.append((new, computed))
        room -= new
    return requests
