"""PyTorch's scaled_dot_product_attention at the shapes of bench_gpu.py; prints one JSON object per line.

Keys and values lie in contiguous memory here, not in pages. Run in an environment with PyTorch:
  python torch_attention.py '[["decode 64 x 2k", 64, 1, 2048], ["prefill 4k", 1, 4096, 4096]]'
The list: name, requests, query tokens each, keys each. 32 query heads, 8 kv heads of 128, bfloat16.
"""

import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

HEADS, KV_HEADS, DIM = 32, 8, 128


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16
    for name, requests, queries, keys in json.loads(sys.argv[1]):
        cache_bytes = 4 * requests * keys * KV_HEADS * DIM
        layers = max(1, min(8, int(8e9 // cache_bytes))) if device == "cuda" else 1
        q = torch.randn(requests, HEADS, queries, DIM, device=device, dtype=dtype)
        shape = (requests, KV_HEADS, keys, DIM)
        caches = [tuple(torch.randn(shape, device=device, dtype=dtype) for _ in "kv") for _ in range(layers)]

        row = {"workload": name, "implementation": f"torch {torch.__version__}"}
        try:
            row["seconds"] = seconds_of(device, q, caches, queries > 1) / layers
        except (RuntimeError, TypeError) as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(row), flush=True)


def attend(q: torch.Tensor, caches: list, causal: bool) -> None:
    for k, v in caches:
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def seconds_of(device: str, q: torch.Tensor, caches: list, causal: bool) -> float:
    """Median of ten calls over all the caches, by the device's clock where it has one."""
    attend(q, caches, causal)
    times = []
    for _ in range(10):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            attend(q, caches, causal)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            attend(q, caches, causal)
            times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
