"""Every kernel against float64 NumPy, on random ragged batches with poison around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    AttentionLayer,
    GroupSpec,
    HeadNorms,
    KVCache,
    RopeTable,
    rope_and_write_kv_cache,
    slot_mapping,
    write_kv_cache,
)
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


def attention(tiny: bool, name: str, rounds: int = 2) -> Iterator[dict[str, Any]]:
    """A row per case of the implementation of this name: the largest error, as a multiple of what rounding explains.

    With unit roundoff u of the dtype: weights are rounded before they multiply values, the result is rounded; twice
    that is allowed, and a little for sums in float32. A NaN that reached a result is an infinite error.
    """
    platform = jax.default_backend()
    [implementation] = (each for each in kernel_tables()["paged_attention"] if each.name == name)
    for case in cases(tiny):
        row: dict[str, Any] = {"kernel": "paged_attention", "implementation": name, "case": case.name}
        reason = implementation.refuses(case.layer, case.block_size, jnp.dtype(case.heads.dtype), platform)
        if reason is not None:
            yield row | {"refused": reason}
            continue
        try:
            errors = [_attention_error(implementation, case, seed) for seed in range(rounds)]
            yield row | {"error_over_allowed": max(errors), "ok": max(errors) <= 1}
        except Exception as error:  # the other cases are worth having all the same
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
    """A row per implementation of slot mapping, cache write, and rotation with it, of heads as they are and of heads
    that are normalised first. All but the rotation must be exact; that may be rounded to the dtype once, and twice
    with norms.
    """
    heads = Heads(4, 2, 16, "float32") if tiny else Heads(32, 8, 128)
    tokens, rows, longest, size = (12, 4, 24, 4) if tiny else (512, 64, 2000, 16)
    requests = random_requests(np.random.default_rng(1), tokens - 2, rows, longest)
    batch = make_batch(requests, heads, size, padded_tokens=tokens, padded_rows=rows)
    checks: tuple[tuple[str, str, Callable[[Batch, str], bool]], ...] = (
        ("slot_mapping", "", _slots),
        ("write_kv_cache", "", _write),
        ("rope_and_write_kv_cache", "", _rope_and_write),
        ("rope_and_write_kv_cache", ", norms", partial(_rope_and_write, normed=True)),
    )
    for what, more, check in checks:
        for kernel in kernel_tables()[what]:
            row: dict[str, Any] = {"kernel": what, "implementation": kernel.name, "case": f"{tokens} tokens{more}"}
            reason = kernel.refuses()
            if reason is not None:
                yield row | {"refused": reason}
                continue
            try:
                yield row | {"ok": check(batch, kernel.name)}
            except Exception as error:
                yield row | {"ok": False, "failed": f"{type(error).__name__}: {error}"[:500]}


def _slots(batch: Batch, name: str) -> bool:
    metadata = batch.metadata()
    arrays = metadata.query_start_loc, metadata.positions, metadata.block_table
    found = slot_mapping(*arrays, block_size=batch.block_size, implementation=name)
    return bool((np.asarray(found) == batch.positions_and_slots()[1]).all())


def _write(batch: Batch, name: str) -> bool:
    _, k, v, cache, slots = _inputs_of_write(batch)
    write = jax.jit(partial(write_kv_cache, implementation=name))
    written = write(k, v, cache, slots)
    return all(_written(new, _exact(x), np.asarray(slots), 0.0) for new, x in zip(written, (k, v), strict=True))


def _rope_and_write(batch: Batch, name: str, normed: bool = False) -> bool:
    """Whether queries and keys are turned, written and, if `normed`, normalised before."""
    q, k, v, cache, slots = _inputs_of_write(batch)
    rng = np.random.default_rng(3)
    angles = rng.uniform(-3, 3, (batch.padded_tokens, batch.heads.dim // 2))
    table = RopeTable(*(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)))
    weights = [jnp.asarray(rng.normal(1, 0.2, batch.heads.dim), batch.heads.dtype) for _ in "qk"]
    norms = HeadNorms(weights[0], weights[1], 1e-6) if normed else None
    write = jax.jit(partial(rope_and_write_kv_cache, implementation=name))
    turned, written = write(q, k, v, table, cache, slots, norms=norms)
    turns = (np.asarray(table.cos, np.float64) + 1j * np.asarray(table.sin, np.float64))[:, None]

    def rotated(x: jax.Array, weight: jax.Array) -> np.ndarray:
        exact = _exact(x)
        if normed:
            exact = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-6) * _exact(weight)
        first, second = np.split(exact, 2, axis=-1)
        pairs = (first + 1j * second) * turns
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    # A sum of two products: rounded to the dtype, after float32's roundings of each. A norm's rounding is turned into
    # numbers that may be smaller than the pair that they come from, which is no longer than 8.
    roundoff = (float(jnp.finfo(batch.heads.dtype).eps) + 1e-6) * (4 if normed else 1)
    real = slice(batch.num_tokens)
    expected = rotated(q, weights[0])[real]
    close = np.abs(_exact(turned)[real] - expected) <= roundoff * (1 + np.abs(expected))
    return bool(
        close.all()
        and _written(written.k, rotated(k, weights[1]), np.asarray(slots), roundoff)
        and _written(written.v, _exact(v), np.asarray(slots), 0.0)
    )


def _inputs_of_write(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array, KVCache, jax.Array]:
    """(q, k, v, a cache full of sevens, slots), NaN for padding tokens."""
    heads, rng = batch.heads, np.random.default_rng(2)
    arrays = []
    for count in (heads.query, heads.kv, heads.kv):
        x = rng.standard_normal((batch.padded_tokens, count, heads.dim), np.float32)
        x[batch.num_tokens :] = np.nan
        arrays.append(as_stored(x, heads.dtype))
    full = jnp.full((batch.num_blocks, batch.block_size, heads.kv, heads.dim), 7, heads.dtype)
    q, k, v = arrays
    return q, k, v, KVCache(full, full), batch.metadata().slot_mapping


def _exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def _written(cache: jax.Array, rows: np.ndarray, slots: np.ndarray, roundoff: float) -> bool:
    """The rows are at their slots, within a roundoff, and the rest is what it was."""
    flat = _exact(cache).reshape(-1, *cache.shape[2:])
    expected = np.full(flat.shape, 7.0)
    real = slots >= 0
    expected[slots[real]] = rows[real]
    return bool((np.abs(flat - expected) <= roundoff * (1 + np.abs(expected))).all())
