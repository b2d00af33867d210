"""Attention by loops in float64 NumPy, written from the definition: nothing of the package is used here."""

import numpy as np


def attention(
    q, k_cache, v_cache, query_lens, seq_lens, tables, *, scale, window=None, soft_cap=None, sinks=None, causal=True
):
    """(result, the same with every value replaced by its magnitude).

    q [T, H, D]; caches [N, B, Hkv, D]; one query length, sequence length and list of blocks per request. The requests'
    tokens stand one after another in q; what follows them is padding, whose result is 0.
    """
    num_heads, block_size, num_kv_heads = q.shape[1], k_cache.shape[1], k_cache.shape[2]
    out = np.zeros((2, *q.shape))
    token = 0
    for query_len, seq_len, table in zip(query_lens, seq_lens, tables, strict=True):
        blocks, offsets = [table[j // block_size] for j in range(seq_len)], [j % block_size for j in range(seq_len)]
        request_k, request_v = (np.asarray(x[blocks, offsets], np.float64) for x in (k_cache, v_cache))
        for i in range(query_len):
            position = seq_len - query_len + i
            keys = [
                j for j in range(seq_len) if (not causal or j <= position) and (window is None or j > position - window)
            ]
            for h in range(num_heads):
                kv_head = h // (num_heads // num_kv_heads)
                k, v = request_k[keys, kv_head], request_v[keys, kv_head]
                s = scale * (k @ np.asarray(q[token, h], np.float64))
                if soft_cap is not None:
                    s = soft_cap * np.tanh(s / soft_cap)
                sink = -np.inf if sinks is None else float(sinks[h])
                top = max(s.max(), sink)
                weights = np.exp(s - top)
                total = weights.sum() + np.exp(sink - top)
                out[0, token, h], out[1, token, h] = weights @ v / total, weights @ np.abs(v) / total
            token += 1
    return out[0], out[1]
