"""Attention by loops in float64 NumPy, written from the definition: nothing of the package is used here."""

import numpy as np


def attention(
    q, k_cache, v_cache, query_lens, seq_lens, tables, *, scale, window=None, soft_cap=None, sinks=None, causal=True
):
    """q [T, H, D]; caches [N, B, Hkv, D]; one query length, sequence length and list of blocks per request.

    The requests' tokens stand one after another in q; what follows them is padding, whose result is 0.
    """
    q, k_cache, v_cache = (np.asarray(x, np.float64) for x in (q, k_cache, v_cache))
    num_heads, block_size, num_kv_heads = q.shape[1], k_cache.shape[1], k_cache.shape[2]
    out = np.zeros(q.shape)
    token = 0
    for query_len, seq_len, table in zip(query_lens, seq_lens, tables, strict=True):
        for i in range(query_len):
            position = seq_len - query_len + i
            keys = [
                j for j in range(seq_len) if (not causal or j <= position) and (window is None or j > position - window)
            ]
            blocks, offsets = [table[j // block_size] for j in keys], [j % block_size for j in keys]
            for h in range(num_heads):
                kv_head = h // (num_heads // num_kv_heads)
                s = scale * (k_cache[blocks, offsets, kv_head] @ q[token, h])
                if soft_cap is not None:
                    s = soft_cap * np.tanh(s / soft_cap)
                sink = -np.inf if sinks is None else float(sinks[h])
                top = max(s.max(), sink)
                weights = np.exp(s - top)
                total = weights.sum() + np.exp(sink - top)
                out[token, h] = weights @ v_cache[blocks, offsets, kv_head] / total
            token += 1
    return out
