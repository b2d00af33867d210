"""Every kernel against float64 NumPy, on random ragged batches with poison around them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import AttentionLayer, GroupSpec, KVCache, slot_mapping, write_kv_cache
from pallas_kernels.configurations import kernel_tables
from scripts.gpu_bench.batches import (
    Batch,
    Heads,
    as_stored,
    expected_attention,
    make_batch,
    random_requests,
    values,
)

WRONG = 1e9  # instead of infinity, which JSON hasn't


@dataclass(frozen=True)
class Case:
    """One way to compile attention: shapes and a layer's options."""

    name: str
    heads: Heads
    block_size: int
    tokens: int
    rows: int
    longest: int
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def layer(self) -> AttentionLayer:
        heads, scale = self.heads, self.heads.dim**-0.5
        return AttentionLayer("layer", heads.query, heads.kv, heads.dim, scale, self.window, self.soft_cap)


def cases(tiny: bool) -> list[Case]:
    if tiny:
        small = Heads(4, 2, 16, "float32")
        return [
            Case("decode", small, 4, 6, 6, 24),
            Case("mixed, window", small, 4, 12, 3, 24, window=7, sinks=True),
        ]
    return [
        Case("decode 8B", Heads(32, 8, 128), 16, 64, 64, 3000),
        Case("mixed 8B", Heads(32, 8, 128), 16, 512, 16, 1500),
        Case("mixed float16, blocks of 64", Heads(32, 8, 128, "float16"), 64, 384, 8, 1500),
        Case("head of 64, 4 to 1", Heads(32, 8, 64), 16, 384, 8, 1000),
        Case("head of 256, window", Heads(8, 4, 256), 32, 256, 8, 1500, window=512),
        Case("7 to 1, blocks of 128", Heads(28, 4, 128), 128, 256, 8, 1500),
        Case("one head each, cap", Heads(16, 16, 128), 32, 256, 8, 800, soft_cap=30.0),
        Case("8 to 1, sinks, window", Heads(64, 8, 64), 16, 256, 8, 1000, window=128, sinks=True),
    ]


def attention(tiny: bool, rounds: int = 2) -> Iterator[dict[str, Any]]:
    """A row per implementation and case: the largest error, as a multiple of what rounding explains.

    With unit roundoff u of the dtype: weights are rounded before they multiply values, the result is rounded; twice
    that is allowed, and a little for sums in float32. A NaN that reached a result is an infinite error.
    """
    platform = jax.default_backend()
    for implementation in kernel_tables()["paged_attention"]:
        for case in cases(tiny):
            row: dict[str, Any] = {"kernel": "paged_attention", "implementation": implementation.name}
            row["case"] = case.name
            reason = implementation.refuses(case.layer, case.block_size, jnp.dtype(case.heads.dtype), platform)
            if reason is not None:
                yield row | {"refused": reason}
                continue
            try:
                errors = [_attention_error(implementation, case, seed) for seed in range(rounds)]
                yield row | {"error_over_allowed": max(errors), "ok": max(errors) <= 1}
            except Exception as error:  # one broken kernel must not hide what the others do
                yield row | {"ok": False, "failed": f"{type(error).__name__}: {error}"[:500]}


def _attention_error(implementation: Any, case: Case, seed: int) -> float:
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, case.tokens, case.rows, case.longest)
    batch = make_batch(
        requests, case.heads, case.block_size, padded_tokens=case.tokens, padded_rows=case.rows, seed=seed
    )
    width = -(-case.longest // case.block_size)
    raw_q, raw_k, raw_v = values(batch, seed)
    q = as_stored(raw_q, case.heads.dtype)
    cache = KVCache(as_stored(raw_k, case.heads.dtype), as_stored(raw_v, case.heads.dtype))
    sinks = rng.normal(0, 2, case.heads.query).astype(np.float32) if case.sinks else None
    out = _attend(
        implementation, case.layer, q, cache, _wide(batch, width), None if sinks is None else jnp.asarray(sinks)
    )
    got = np.asarray(out.astype(jnp.float32), np.float64)
    if (got[batch.num_tokens :] != 0).any():
        return WRONG
    layer = case.layer
    options: dict[str, Any] = {"scale": layer.scale, "window": layer.window, "soft_cap": layer.soft_cap}
    rounded = np.asarray(q.astype(jnp.float32))
    expected, magnitude = expected_attention(batch, rounded, cache, sinks=sinks, **options)
    roundoff = float(jnp.finfo(case.heads.dtype).eps) / 2
    error = np.abs(got[: batch.num_tokens] - expected) / (2 * roundoff * (magnitude + np.abs(expected)) + 1e-5)
    return float(np.max(np.nan_to_num(error, nan=WRONG, posinf=WRONG)))


def _wide(batch: Batch, width: int) -> Any:
    """The batch's metadata with a table of a fixed width, so that draws share a compiled program."""
    metadata = batch.metadata()
    table = jnp.pad(metadata.block_table, ((0, 0), (0, width - metadata.block_table.shape[1])))
    return replace(metadata, block_table=table)


def _attend_once(implementation: Any, layer: AttentionLayer, q: Any, cache: KVCache, metadata: Any, sinks: Any) -> Any:
    built = implementation.build(metadata, GroupSpec(metadata.block_size, (layer,)))
    return implementation.attend(q, cache, built, layer, sinks)


_attend = jax.jit(_attend_once, static_argnums=(0, 1))


def slots_and_writes(tiny: bool) -> Iterator[dict[str, Any]]:
    """A row per implementation of slot mapping and cache write: they must be exact."""
    heads = Heads(4, 2, 16, "float32") if tiny else Heads(32, 8, 128)
    tokens, rows, longest, size = (12, 4, 24, 4) if tiny else (512, 64, 2000, 16)
    requests = random_requests(np.random.default_rng(1), tokens - 2, rows, longest)
    batch = make_batch(requests, heads, size, padded_tokens=tokens, padded_rows=rows)
    metadata = batch.metadata()
    positions, slots = batch.positions_and_slots()
    k, v = np.random.default_rng(2).standard_normal((2, tokens, heads.kv, heads.dim), np.float32)
    k[batch.num_tokens :] = v[batch.num_tokens :] = np.nan
    stored_k, stored_v = as_stored(k, heads.dtype), as_stored(v, heads.dtype)
    for what in ("slot_mapping", "write_kv_cache"):
        for kernel in kernel_tables()[what]:
            row: dict[str, Any] = {"kernel": what, "implementation": kernel.name, "case": f"{tokens} tokens"}
            reason = kernel.refuses()
            if reason is not None:
                yield row | {"refused": reason}
                continue
            try:
                if what == "slot_mapping":
                    got = np.asarray(
                        slot_mapping(
                            metadata.query_start_loc,
                            metadata.positions,
                            metadata.block_table,
                            block_size=size,
                            implementation=kernel.name,
                        )
                    )
                    yield row | {"ok": bool((got == slots).all())}
                else:
                    empty = jnp.full((batch.num_blocks, size, heads.kv, heads.dim), 7, heads.dtype)
                    write = jax.jit(write_kv_cache, static_argnames="implementation")
                    written = write(
                        stored_k, stored_v, KVCache(empty, empty), metadata.slot_mapping, implementation=kernel.name
                    )
                    same = [_written(new, x, slots) for new, x in zip(written, (stored_k, stored_v), strict=True)]
                    yield row | {"ok": all(same)}
            except Exception as error:
                yield row | {"ok": False, "failed": f"{type(error).__name__}: {error}"[:500]}


def _written(cache: jax.Array, rows: jax.Array, slots: np.ndarray) -> bool:
    """The rows are at their slots, bit for bit, and the rest is what it was."""
    flat = np.asarray(cache.astype(jnp.float32)).reshape(-1, *cache.shape[2:])
    expected = np.full(flat.shape, 7, np.float32)
    real = slots >= 0
    expected[slots[real]] = np.asarray(rows.astype(jnp.float32))[real]
    return bool((flat == expected).all())
