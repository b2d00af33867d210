"""The reference attention, in float32 too, and the public function. test_every_implementation.py has what all share."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import (
    AttentionLayer,
    CommonAttentionMetadata,
    GroupSpec,
    HeadNorms,
    KVCache,
    StepAttention,
    paged_attention,
)
from pallas_kernels.paged_attention import singles, tiled
from pallas_kernels.paged_attention.reference import ReferenceAttention
from tests.pallas_kernels.ragged import Shape, make_batch, requests_of

TOLERANCE = {"float32": 4e-6, "bfloat16": 2e-2, "float16": 2e-3}


@cache
def compiled(**options):
    return jax.jit(partial(paged_attention, implementation="reference", **options))


def check(batch, *, sinks=None, causal=True, **options):
    run = compiled(**options)
    out = run(batch.queries, batch.cache, batch.metadata(causal), sinks=None if sinks is None else jnp.asarray(sinks))
    assert out.dtype == batch.shape.dtype
    out = np.asarray(out, np.float64)
    tolerance = TOLERANCE[batch.shape.dtype]
    expected = batch.expected(sinks=sinks, causal=causal, **options)
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    assert (out[batch.num_tokens :] == 0).all()


# Shapes that go query by query as a whole (8 tokens), and shapes where longer queries go in tiles; keys in one chunk or
# several; blocks smaller than a chunk, not dividing it, larger than it; MHA, GQA, MQA; head sizes of all kinds.
CASES = {
    "few tokens": (Shape(tokens=8, rows=8, width=80, block_size=4), {"scale": 0.35}),
    "few tokens, window": (Shape(tokens=8, rows=4, width=30, block_size=4), {"scale": 0.7, "window": 6}),
    "tiles, window over chunks": (
        Shape(tokens=24, rows=4, width=60, block_size=5, heads=3, kv_heads=3, head_dim=5),
        {"scale": 0.2, "window": 140, "soft_cap": 0.5},
    ),
    "large blocks": (
        Shape(tokens=20, rows=4, width=3, block_size=150, heads=6, kv_heads=1, head_dim=80),
        {"scale": 0.1},
    ),
    "blocks of one": (
        Shape(tokens=18, rows=18, width=9, block_size=1, heads=4, kv_heads=2, head_dim=130),
        {"scale": 0.1, "window": 6},
    ),
}


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=12)
@given(data=st.data())
def test_any_ragged_batch(case, data):
    shape, options = CASES[case]
    batch = make_batch(
        shape,
        data.draw(requests_of(shape)),
        seed=data.draw(st.integers(0, 2**32 - 1)),
        poison=data.draw(st.sampled_from([np.nan, np.inf])),
        window=options.get("window"),
    )
    check(batch, **options)


@pytest.mark.parametrize(("dtype", "tokens"), [("bfloat16", 24), ("float16", 8)])
def test_narrow_dtypes_accumulate_in_float32(dtype, tokens):
    shape = Shape(tokens=tokens, rows=4, width=80, dtype=dtype)
    check(make_batch(shape, [(1, 300), (tokens - 6, 0), (2, 40)]), scale=0.35)


def test_tiles_of_long_prefills():
    """Several tiles for a row, tiles that end at no boundary, the last one at the end of the token array. One
    executable serves them all: nothing depends on values."""
    shape = Shape(tokens=200, rows=4, width=100)
    for requests in ([(130, 3), (1, 390), (69, 0)], [(200, 150)], [(5, 0), (64, 64), (65, 1), (63, 200)], []):
        check(make_batch(shape, requests), scale=0.3)
    assert compiled(scale=0.3)._cache_size() == 1


MIXED = [(6, 10), (1, 40)]  # a tile and a single query


def test_sinks():
    sinks = np.array([-1.0, 0.5, 4.0, -30.0], np.float32)
    check(make_batch(Shape(tokens=24, rows=3), MIXED), sinks=sinks, scale=0.35)


def test_without_causality_every_query_sees_all_keys():
    check(make_batch(Shape(tokens=24, rows=3), MIXED), causal=False, scale=0.35)


@pytest.mark.parametrize(("tokens", "window"), [(8, 1), (24, 4)])
def test_a_window_of_w_sees_w_keys(tokens, window):
    """Values that are one-hot in their position show exactly which keys were seen."""
    shape = Shape(tokens=tokens, rows=2, width=4, heads=1, kv_heads=1, head_dim=16)
    batch = make_batch(shape, [(7, 8)])
    batch.k[:] = 0
    for j in range(15):
        batch.v[batch.tables[0][j // 4], j % 4] = np.eye(16)[j]
    out = compiled(scale=1.0, window=window)(batch.queries, batch.cache, batch.metadata())
    for i in range(7):
        seen = np.flatnonzero(np.asarray(out)[i, 0])
        assert seen.tolist() == list(range(8 + i - window + 1, 8 + i + 1))


def test_work_follows_from_what_is_seen(monkeypatch):
    """How many chunks of keys a step really reads: none for padding, or for blocks outside a window."""
    reads = []

    def counted(read, name):
        def reading(*args):
            jax.debug.callback(lambda: reads.append(name))
            return read(*args)

        return reading

    monkeypatch.setattr(singles, "read_pages", counted(singles.read_pages, "singles"))
    monkeypatch.setattr(tiled, "read_pages_by_head", counted(tiled.read_pages_by_head, "tiles"))
    # A scale of its own: what other tests have traced is not counted.
    compiled = cache(lambda **options: jax.jit(partial(paged_attention, scale=0.123, **options)))

    def chunks(tokens, requests, **window):
        reads.clear()
        batch = make_batch(Shape(tokens=tokens, rows=8, width=130), requests, **window)
        jax.block_until_ready(compiled(**window)(batch.queries, batch.cache, batch.metadata()))
        jax.effects_barrier()
        return {name: reads.count(name) // 2 for name in set(reads)}  # keys and values

    # 512 keys are 4 chunks of 128; of short queries 8 chunks, of whichever rows, are read at a time.
    assert chunks(64, [(1, 511)] * 2) == {"singles": 1}
    assert chunks(64, [(1, 511)] * 2 + [(1, 100)]) == {"singles": 2}
    assert chunks(64, [(1, 511), (1, 100), (1, 300)]) == {"singles": 1}
    assert chunks(64, [(40, 472)]) == {"tiles": 4}
    assert chunks(64, [(40, 0), (1, 511)]) == {"singles": 1, "tiles": 1}
    assert chunks(64, [(1, 511)] * 8, window=100) == {"singles": 1}
    assert chunks(64, [(40, 472)], window=50) == {"tiles": 1}
    assert chunks(64, []) == {}


def test_memory_is_linear_in_tokens():
    """512 tokens of 8 requests with up to 2**16 keys each: a mask would take 32 MiB, the scores of one head or one
    request's gathered keys 128. Backwards too."""
    tokens, rows, keys = 512, 8, 2**16
    q = jax.ShapeDtypeStruct((tokens, 4, 128), jnp.float32)
    pages = jax.ShapeDtypeStruct((64, 16, 4, 128), jnp.float32)
    metadata = jax.eval_shape(
        partial(CommonAttentionMetadata.make, block_size=16),
        *(
            jax.ShapeDtypeStruct(shape, jnp.int32)
            for shape in [(rows + 1,), (rows,), (tokens,), (rows, keys // 16), (tokens,)]
        ),
    )

    def attend(q, cache, metadata):
        return jnp.sum(paged_attention(q, cache, metadata, scale=1.0))

    memory = (
        jax.jit(jax.grad(attend, argnums=(0, 1))).lower(q, KVCache(pages, pages), metadata).compile().memory_analysis()
    )
    assert memory.temp_size_in_bytes < 16 * 2**20


def test_step_attention_writes_in_place_and_attends():
    """The way a model calls it, with the cache donated: right, and without a copy of the cache."""
    shape = Shape(tokens=8, rows=3)
    batch = make_batch(shape, [(1, 40), (5, 2)])
    layer = AttentionLayer("layer", shape.heads, shape.kv_heads, shape.head_dim, scale=0.35)
    chosen = ReferenceAttention()
    # What this step writes is not in the cache yet.
    metadata = batch.metadata()
    slots = np.asarray(metadata.slot_mapping)[: batch.num_tokens]
    k, v = (np.full((shape.tokens, shape.kv_heads, shape.head_dim), np.nan, np.float32) for _ in "kv")
    expected = batch.expected(scale=0.35)
    for new, cached in ((k, batch.k), (v, batch.v)):
        flat = cached.reshape(-1, shape.kv_heads, shape.head_dim)
        new[: batch.num_tokens] = flat[slots]
        flat[slots] = np.nan

    def step(q, k, v, cache, metadata):
        built = chosen.build(metadata, GroupSpec(shape.block_size, (layer,)))
        return StepAttention(chosen, built, metadata.slot_mapping)(q, k, v, cache, layer)

    cache = batch.cache
    run = jax.jit(step, donate_argnums=3).lower(batch.queries, k, v, cache, metadata).compile()
    assert run.memory_analysis().alias_size_in_bytes == 2 * cache.k.nbytes
    dims = ",".join(map(str, cache.k.shape))
    assert not [line for line in run.as_text().splitlines() if f"[{dims}]" in line and " copy(" in line]
    out, _ = run(batch.queries, jnp.asarray(k), jnp.asarray(v), cache, metadata)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=4e-6, atol=4e-6)


def test_step_attention_names_the_layer_that_is_refused():
    batch = make_batch(Shape(tokens=4, rows=2), [(1, 3)])
    metadata, implementation = batch.metadata(causal=False), ReferenceAttention()
    layer = AttentionLayer("model.layers.7", 4, 2, 8, 0.35, window=3)
    attention = StepAttention(implementation, implementation.build(metadata, GroupSpec(4)), metadata.slot_mapping)
    k = jnp.zeros((4, 2, 8))
    with pytest.raises(ValueError, match=r"^layer 'model.layers.7': a window \(3\) needs causal attention"):
        attention(batch.queries, k, k, batch.cache, layer)
    norms = HeadNorms(jnp.ones(8), jnp.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"^layer 'model.layers.7': norms .* before a rotation: give its table"):
        attention(batch.queries, k, k, batch.cache, layer, norms=norms)


def test_runs_inside_shard_map():
    """Kernels run inside shard_map, over kv heads; loops there are particular about what varies over the mesh."""
    batch = make_batch(Shape(tokens=24, rows=3), MIXED)
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    run = jax.shard_map(
        partial(paged_attention, scale=0.35),
        mesh=mesh,
        in_specs=(spec(None, "tensor"), spec(None, None, "tensor"), spec()),
        out_specs=spec(None, "tensor"),
    )
    out = jax.jit(run)(batch.queries, batch.cache, batch.metadata())
    np.testing.assert_allclose(np.asarray(out), batch.expected(scale=0.35), rtol=4e-6, atol=4e-6)


def test_wrong_arguments_are_named():
    batch = make_batch(Shape(tokens=8, rows=2), [(1, 3)])
    q, cache, metadata = batch.queries, batch.cache, batch.metadata()
    attend = partial(paged_attention, scale=1.0, implementation="reference")
    with pytest.raises(ValueError, match="q has 7 tokens, the metadata 8"):
        attend(q[:7], cache, metadata)
    with pytest.raises(ValueError, match=r"not int32 \(8, 4, 8\)"):
        attend(jnp.zeros(q.shape, jnp.int32), cache, metadata)
    with pytest.raises(ValueError, match="kv heads, 8"):
        attend(q, KVCache(cache.k[..., :4], cache.v[..., :4]), metadata)
    with pytest.raises(ValueError, match="blocks of 2, the metadata of 4"):
        attend(q, KVCache(cache.k[:, :2], cache.v[:, :2]), metadata)
    with pytest.raises(ValueError, match=r"sinks must have shape \(4,\)"):
        attend(q, cache, metadata, sinks=jnp.zeros(3))
    with pytest.raises(ValueError, match="window must be at least 1"):
        attend(q, cache, metadata, window=0)
    with pytest.raises(ValueError, match="soft_cap must be above 0"):
        attend(q, cache, metadata, soft_cap=0.0)
    with pytest.raises(ValueError, match=r"num_heads \(3\) must be a multiple"):
        attend(q[:, :3], cache, metadata)
    with pytest.raises(ValueError, match="needs causal attention"):
        attend(q, cache, batch.metadata(causal=False), window=3)
    with pytest.raises(ValueError, match="'other'; there is: auto, .*reference"):
        attend(q, cache, metadata, implementation="other")
    with pytest.raises(ValueError, match="reference: .*floating-point dtype, not int8"):
        attend(q, KVCache(*(jnp.zeros(x.shape, jnp.int8) for x in cache)), metadata)
