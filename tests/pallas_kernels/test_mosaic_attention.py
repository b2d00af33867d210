"""The Hopper attention: how the work is divided, what is refused, and that the interpreter would see a fault."""

import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import AttentionLayer, GroupSpec, choose_attention
from pallas_kernels.paged_attention.mosaic import toolchain, work
from pallas_kernels.paged_attention.mosaic_sm90 import MosaicSm90Attention
from pallas_kernels.paged_attention.mosaic_sm90.plan import SHARED_BYTES, make_plan
from tests.pallas_kernels.implementations import QUICK
from tests.pallas_kernels.ragged import Shape, make_batch, requests_of

divided = jax.jit(work.divide, static_argnums=1, compiler_options=QUICK)

SHAPES = {
    "decode": (Shape(tokens=5, rows=5, width=60, block_size=16, heads=8, kv_heads=2, head_dim=128), None, 7),
    "decode in a window": (Shape(tokens=5, rows=5, width=60, block_size=16, heads=8, kv_heads=2, head_dim=128), 300, 4),
    "mixed": (Shape(tokens=90, rows=4, width=60, block_size=16, heads=6, kv_heads=2, head_dim=128), None, 5),
    "mixed in a window": (Shape(tokens=90, rows=4, width=40, block_size=32, heads=8, kv_heads=1, head_dim=64), 50, 3),
    "large blocks": (Shape(tokens=90, rows=4, width=3, block_size=256, heads=16, kv_heads=1, head_dim=128), None, 16),
}


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=30)
@given(data=st.data())
def test_workers_have_every_key_of_every_query_once_and_equally_much(name, data):
    shape, window, workers = SHAPES[name]
    requests = data.draw(requests_of(shape))
    layer = AttentionLayer("", shape.heads, shape.kv_heads, shape.head_dim, 1.0, window)
    plan = make_plan(layer, shape.tokens, shape.rows, shape.block_size, True, 132, workers=workers)
    # Blocks are not asked for: only lengths matter here.
    result = divided(make_batch(shape, requests).metadata(), plan)
    tiles, cuts = np.asarray(result.tiles), np.asarray(result.cuts)
    starts = np.cumsum([0, *(new for new, _ in requests)])

    covered = np.zeros(shape.tokens, int)
    exists = tiles[:, work.LENGTH] > 0
    assert (np.flatnonzero(exists) == np.arange(exists.sum())).all()
    for tile in tiles[exists]:
        token, length = tile[work.TOKEN], tile[work.LENGTH]
        assert length <= plan.tokens_per_tile
        covered[token : token + length] += 1
        if token >= starts[-1]:
            assert tile[work.KV_TILES] == 0
            continue
        row = tile[work.ROW]
        new, computed = requests[row]
        assert starts[row] <= token and token + length <= starts[row + 1]
        position = computed + token - starts[row]
        assert (tile[work.POSITION], tile[work.NUM_KEYS]) == (position, new + computed)
        # From the copy that holds the first key that its first query sees, to the last key that its last one sees.
        first = 0 if window is None else max(0, position - window + 1)
        assert 0 <= first - tile[work.FIRST_KEY] < plan.copied_keys and tile[work.FIRST_KEY] % plan.copied_keys == 0
        keys = position + length - tile[work.FIRST_KEY]
        assert (tile[work.KV_TILES] - 1) * plan.block_keys < keys <= tile[work.KV_TILES] * plan.block_keys
    assert (covered == 1).all()

    # Cuts divide the line of tiles.
    assert (cuts[0, :2] == 0).all() and (cuts[-1, :2] == (exists.sum(), 0)).all()
    lengths, total = np.append(tiles[:, work.KV_TILES], 0), 0
    loads, places = [], []
    for (tile, offset, _, _), (stop, last, _, _) in zip(cuts[:-1], cuts[1:], strict=True):
        assert (tile, offset) <= (stop, last)
        assert offset == 0 or 0 < offset < lengths[tile]
        places.append((tile, offset))
        spans = [
            (offset if t == tile else 0, last if t == stop else lengths[t]) for t in range(tile, stop + (last > 0))
        ]
        loads.append(sum(end - begin for begin, end in spans) + work.TILE_COST * len(spans))
        total += sum(end - begin for begin, end in spans)
        assert all(begin < end or lengths[tile + i] == 0 for i, (begin, end) in enumerate(spans))
    assert total == tiles[:, work.KV_TILES].sum()
    fair = -(-sum(loads) // workers)
    assert max(loads) <= max(fair, work.TILE_COST + work.MIN_PIECE) + 2 * (work.MIN_PIECE + work.TILE_COST)

    inside = [(cut, tile) for cut, (tile, offset) in enumerate(places) if offset > 0]
    merges = {cut: count for cut, count in enumerate(cuts[:-1, work.CUT_MERGES]) if count}
    expected = {}
    for cut, tile in inside:
        expected.setdefault(tile, []).append(cut)
    assert merges == {several[0]: len(several) for several in expected.values()}


def test_one_long_request_is_divided_among_all_workers():
    shape = Shape(tokens=1, rows=1, width=1000, block_size=16, heads=8, kv_heads=2, head_dim=128)
    layer = AttentionLayer("", 8, 2, 128, 1.0)
    plan = make_plan(layer, 1, 1, 16, True, 132)
    cuts = np.asarray(divided(make_batch(shape, [(1, 15999)]).metadata(), plan).cuts)
    places = cuts[:, work.CUT_OFFSET] + 250 * cuts[:, work.CUT_TILE]  # in K/V tiles of 64 keys
    pieces = np.diff(places)
    assert plan.workers == 66 and places[-1] == 250 and pieces.max() <= 4 and (pieces > 0).sum() == 63


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_plans_fit_shared_memory(head_dim, warpgroups):
    layer = AttentionLayer("", 8, 1, head_dim, 1.0)
    plan = make_plan(layer, 2048, 64, 16, True, 132, warpgroups=warpgroups)
    ring = plan.stages * 2 * plan.block_keys * head_dim * 2
    assert plan.stages >= 2 and ring >= 128 << 10
    assert ring + warpgroups * 64 * (head_dim + plan.staged) * 2 <= SHARED_BYTES


def on(kind):
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


LAYER = AttentionLayer("layer", 32, 8, 128, 0.1)


def test_chosen_on_hopper_alone(monkeypatch):
    monkeypatch.setattr(toolchain, "refuses", lambda: None)
    for kind, name in (("NVIDIA H200", "mosaic_sm90"), ("NVIDIA A100-SXM4-80GB", "triton"), ("NVIDIA B200", "triton")):
        with on(kind):
            chosen, _ = choose_attention([LAYER], 16, "bfloat16", "gpu")
            assert chosen.name == name
    with (
        on("NVIDIA B200"),
        pytest.raises(ValueError, match=r"compute capability 9.0 \(Hopper\), not NVIDIA B200 \(10.0\)"),
    ):
        choose_attention([LAYER], 16, "bfloat16", "gpu", "mosaic_sm90")
    with pytest.raises(ValueError, match="needs an NVIDIA GPU, this is cpu"):
        choose_attention([LAYER], 16, "bfloat16", "cpu", "mosaic_sm90")


@pytest.mark.parametrize(
    ("change", "block_size", "dtype", "words"),
    [
        ({"num_heads": 40}, 16, "bfloat16", "query heads a kv head must be one of 1, 2, 3, 4, 6, 7, 8, 16, not 5"),
        ({"head_dim": 96}, 16, "bfloat16", "head size must be one of 64, 128, 256, not 96"),
        ({}, 8, "bfloat16", "block size must be one of 16, 32, 64, 128, 256, not 8"),
        ({}, 16, "float32", "dtype must be one of bfloat16, float16, not float32"),
        ({"scale": 0.0}, 16, "bfloat16", "scale must be above 0, not 0.0"),
    ],
)
def test_refusals(monkeypatch, change, block_size, dtype, words):
    monkeypatch.setattr(toolchain, "refuses", lambda: None)
    facts = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "scale": 0.1} | change
    with on("NVIDIA H200"):
        assert words in MosaicSm90Attention().refuses(AttentionLayer("layer", **facts), block_size, dtype, "gpu")


def test_versions():
    refuses = toolchain.refuses_versions
    new = (0, 12, 0)
    assert [as_version for as_version in map(toolchain.as_version, (12090, 12091, 13000))] == [
        (12, 9, 0),
        (12, 9, 1),
        (13, 0, 0),
    ]
    assert (
        refuses(new, (12, 7, 9)) is refuses(new, (12, 9, 1)) is refuses(new, (13, 0, 0)) is refuses(new, None) is None
    )
    for cuda in ((12, 8, 0), (12, 8, 1), (12, 9, 0)):
        assert f"CUDA {'.'.join(map(str, cuda))} miscompiles causal attention" in refuses(new, cuda)
    assert refuses((0, 11, 2), None) is None
    assert refuses((0, 11, 1), None) == "it needs JAX 0.11.2 or newer, this is 0.11.1"


def test_wrong_use_is_named():
    shape = Shape(2, 2, 4, 16, 4, 1, 64, "bfloat16")
    batch, layer = make_batch(shape, [(1, 3)]), AttentionLayer("layer", 4, 1, 64, 0.1)
    attention = MosaicSm90Attention(workers=2)
    with pytest.raises(ValueError, match="GroupSpec.layers must name them"):
        attention.build(batch.metadata(), GroupSpec(16))
    built = attention.build(batch.metadata(), GroupSpec(16, (layer,)))
    with pytest.raises(ValueError, match="not told of a layer like"):
        attention.attend(batch.queries, batch.cache, built, AttentionLayer("layer", 4, 1, 64, 0.1, window=3))
    with pytest.raises(ValueError, match="queries of the cache's dtype, bfloat16, not float32"):
        attention.attend(batch.queries.astype("float32"), batch.cache, built, layer)
    windowed = AttentionLayer("layer", 4, 1, 64, 0.1, window=3)
    built = attention.build(batch.metadata(causal=False), GroupSpec(16, (windowed,)))
    with pytest.raises(ValueError, match=r"window \(3\) needs causal attention"):
        attention.attend(batch.queries, batch.cache, built, windowed)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("nothing", "right"), ("fence", "RACE DETECTED"), ("barrier", "no threads observed phase")],
)
def test_the_interpreter_sees_planted_faults(fault, words):
    run = partial(subprocess.run, capture_output=True, text=True, timeout=300)
    done = run([sys.executable, "-m", "tests.pallas_kernels.planted", fault])
    assert words in done.stdout + done.stderr
    assert (done.returncode == 0) == (fault == "nothing")
