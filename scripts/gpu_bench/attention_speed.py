"""How fast attention is, beside this device's ceilings, at the shapes that decide serving."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import AttentionLayer, GroupSpec, KVCache, write_kv_cache
from pallas_kernels.configurations import kernel_tables
from scripts.gpu_bench.batches import Heads, make_batch
from scripts.gpu_bench.timing import seconds_of


@dataclass(frozen=True)
class Workload:
    """Requests of one step: (tokens of this step, tokens before) each."""

    name: str
    requests: tuple[tuple[int, int], ...]
    bound: str  # "memory" or "compute"

    def least_bytes(self, heads: Heads) -> int:
        """Each key and value of each request once, each query and result once; in two bytes."""
        keys = sum(new + before for new, before in self.requests)
        tokens = sum(new for new, _ in self.requests)
        return 2 * (2 * keys * heads.kv + 2 * tokens * heads.query) * heads.dim

    def flops(self, heads: Heads) -> int:
        """Two products a visible key: a causal square counts half."""
        pairs = sum(new * before + new * (new + 1) // 2 for new, before in self.requests)
        return 4 * pairs * heads.query * heads.dim


def workloads(tiny: bool) -> list[Workload]:
    if tiny:
        return [
            Workload("decode 4 x 16", ((1, 15),) * 4, "memory"),
            Workload("mixed", ((1, 15), (1, 7), (8, 4)), "memory"),
        ]
    mixed = ((1, 2047),) * 48 + ((1, 8191),) * 8 + ((512, 1536),) * 2 + ((1024, 0),)
    return [
        Workload("decode 64 x 2k", ((1, 2047),) * 64, "memory"),
        Workload("decode 64 x 8k", ((1, 8191),) * 64, "memory"),
        Workload("decode 1 x 1k", ((1, 1023),), "memory"),
        Workload("prefill 4k", ((4096, 0),), "compute"),
        Workload("prefill 16k", ((16384, 0),), "compute"),
        Workload("mixed", mixed, "memory"),
    ]


def attention(tiny: bool, ceilings: dict[str, float], most_bytes: float, name: str) -> Iterator[dict[str, Any]]:
    """A row per workload, of the implementation of this name. Several layers' caches in one program, as in a step, so
    that a call's cost and a warm L2 cache don't count; the division of work is made once for all, as in a step.
    """
    [implementation] = (each for each in kernel_tables()["paged_attention"] if each.name == name)
    heads = Heads(4, 2, 16) if tiny else Heads()
    size = 4 if tiny else 16
    layer = AttentionLayer("layer", heads.query, heads.kv, heads.dim, heads.dim**-0.5)
    platform = jax.default_backend()
    for work in workloads(tiny):
        row: dict[str, Any] = {"workload": work.name, "implementation": name}
        reason = implementation.refuses(layer, size, jnp.dtype(heads.dtype), platform)
        long = any(new > 1 for new, _ in work.requests)
        if reason is not None or (name == "reference" and platform == "gpu" and long):
            yield row | {"refused": reason or "left out: too slow to wait for"}
            continue
        batch = make_batch(work.requests, heads, size)
        metadata = batch.metadata()
        key = jax.random.key(0)
        q = jax.random.normal(key, (batch.num_tokens, heads.query, heads.dim), heads.dtype)
        shape = (batch.num_blocks, size, heads.kv, heads.dim)
        cache_bytes = 4 * batch.num_blocks * size * heads.kv * heads.dim
        layers = max(1, min(2 if tiny else 16, int(most_bytes // cache_bytes)))
        # One pair of random arrays would do for speed; distinct memory is what matters.
        caches = tuple(
            KVCache(*(jax.random.normal(jax.random.key(2 * n + side), shape, heads.dtype) for side in (0, 1)))
            for n in range(layers)
        )
        try:
            seconds = seconds_of(_attend_all(implementation, layer), q, caches, metadata) / layers
        except Exception as error:
            yield row | {"failed": f"{type(error).__name__}: {error}"[:500]}
            continue
        finally:
            del caches
        yield row | rates(work, heads, seconds, ceilings)


def _attend_all(implementation: Any, layer: AttentionLayer) -> Any:
    @jax.jit
    def attend(q: jax.Array, caches: tuple[KVCache, ...], metadata: Any) -> list[jax.Array]:
        built = implementation.build(metadata, GroupSpec(metadata.block_size, (layer,)))
        return [implementation.attend(q, cache, built, layer) for cache in caches]

    return attend


def rates(work: Workload, heads: Heads, seconds: float, ceilings: dict[str, float]) -> dict[str, Any]:
    """What a time means: bytes and operations that are needed at least, a second, and as shares of the ceilings."""
    moved, flops = work.least_bytes(heads) / seconds, work.flops(heads) / seconds
    found = {"seconds": seconds, "bytes_per_s": moved, "flops_per_s": flops, "bound": work.bound}
    if read := ceilings.get("memory read"):
        found["of_memory_read"] = moved / read
    if products := ceilings.get("bfloat16 products"):
        found["of_products"] = flops / products
    return found


class _Writer:
    """Writes into several layers' caches in one program. They are donated, so each call needs those of the last."""

    def __init__(self, implementation: str, caches: tuple[KVCache, ...]) -> None:
        self._caches = caches
        self._write = jax.jit(
            lambda caches, k, slots: tuple(
                write_kv_cache(k, k, cache, slots, implementation=implementation) for cache in caches
            ),
            donate_argnums=0,
        )

    def __call__(self, k: jax.Array, slots: jax.Array) -> tuple[KVCache, ...]:
        self._caches = self._write(self._caches, k, slots)
        return self._caches


def writes(tiny: bool, ceilings: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Cache writes: a row per implementation and number of tokens."""
    heads = Heads(4, 2, 16) if tiny else Heads()
    size, layers = (4, 2) if tiny else (16, 16)
    for tokens in (8,) if tiny else (64, 1024, 8192):
        batch = make_batch(((tokens, 0),), heads, size)
        slots = batch.metadata().slot_mapping
        shape = (batch.num_blocks, size, heads.kv, heads.dim)
        k = jnp.ones((tokens, heads.kv, heads.dim), heads.dtype)
        for kernel in kernel_tables()["write_kv_cache"]:
            row: dict[str, Any] = {"workload": f"write {tokens} tokens", "implementation": kernel.name}
            if (reason := kernel.refuses()) is not None:
                yield row | {"refused": reason}
                continue

            caches = tuple(KVCache(*(jnp.zeros(shape, heads.dtype) for _ in "kv")) for _ in range(layers))
            seconds = seconds_of(_Writer(kernel.name, caches), k, slots) / layers
            moved = 2 * 2 * 2 * tokens * heads.kv * heads.dim / seconds  # k and v, read and written, two bytes
            row |= {"seconds": seconds, "bytes_per_s": moved, "bound": "memory"}
            yield row | ({"of_memory_copied": moved / copied} if (copied := ceilings.get("memory copied")) else {})
