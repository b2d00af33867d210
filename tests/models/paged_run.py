"""A model over the real paged caches: requests packed into steps of one shape, padded, their blocks scattered."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models import Decoder, merge, split
from pallas_kernels import CommonAttentionMetadata, GroupSpec, KVCache, StepAttention, choose_attention, slot_mapping

TOKENS, ROWS, BLOCK_SIZE = 16, 4, 4


def paged_logits(decoder: Decoder, requests: Sequence[np.ndarray], steps: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Logits of every position of every request. ``steps[s][r]``: how many tokens of request r step s computes.

    Caches start as NaN, so that a slot which is read before it is written shows.
    """
    layers = decoder.config.attention_layers()
    width = max(-(-len(ids) // BLOCK_SIZE) for ids in requests)
    blocks = np.random.default_rng(0).permutation(np.arange(1, width * len(requests) + 1, dtype=np.int32))
    tables = np.zeros((ROWS, width), np.int32)
    tables[: len(requests)] = blocks.reshape(len(requests), width)
    definition, params = split(decoder)
    implementation, _ = choose_attention(layers, BLOCK_SIZE, decoder.dtype, jax.default_backend())

    @jax.jit
    def step(params, caches, tokens, positions, starts, seq_lens, table):
        slots = slot_mapping(starts, positions, table, block_size=BLOCK_SIZE)
        common = CommonAttentionMetadata.make(starts, seq_lens, positions, table, slots, block_size=BLOCK_SIZE)
        attention = StepAttention(implementation, implementation.build(common, GroupSpec(BLOCK_SIZE, layers)), slots)
        model = merge(definition, params)
        hidden, caches = model(tokens, positions, caches, [attention])
        return model.compute_logits(hidden), caches

    shape = (len(blocks) + 1, BLOCK_SIZE, layers[0].num_kv_heads, layers[0].head_dim)
    caches = tuple(KVCache(*jnp.full((2, *shape), jnp.nan, decoder.dtype)) for _ in layers)
    done = [0] * len(requests)
    logits: list[list[np.ndarray]] = [[] for _ in requests]
    for counts in steps:
        rows = [row for row, count in enumerate(counts) if count]
        starts, seq_lens, table = np.zeros(ROWS + 1, np.int32), np.zeros(ROWS, np.int32), np.zeros_like(tables)
        starts[1:] = np.cumsum([counts[row] for row in rows] + [0] * (ROWS - len(rows)))
        tokens, positions = np.zeros(TOKENS, np.int32), np.zeros(TOKENS, np.int32)
        for at, row in enumerate(rows):
            here, there = slice(starts[at], starts[at + 1]), slice(done[row], done[row] + counts[row])
            tokens[here], positions[here] = requests[row][there], np.arange(there.start, there.stop)
            seq_lens[at], table[at] = there.stop, tables[row]
        out, caches = step(params, caches, tokens, positions, starts, seq_lens, table)
        for at, row in enumerate(rows):
            logits[row].append(np.asarray(out[starts[at] : starts[at + 1]]))
            done[row] += counts[row]
    return [np.concatenate(parts) for parts in logits]
