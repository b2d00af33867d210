"""The division of a step's attention into units: everything is covered once, nothing needless, within capacity."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import AttentionLayer, GroupSpec, choose_attention
from pallas_kernels.paged_attention import triton_work as work
from pallas_kernels.paged_attention.triton import TritonAttention, plan_for
from pallas_kernels.paged_attention.triton_work import FEW_QUERIES, Tiling, divide
from tests.pallas_kernels.implementations import CASES, QUICK
from tests.pallas_kernels.ragged import Shape, make_batch, requests_of

SMALL, LARGE = Tiling(16, 8), Tiling(64, 4)


@partial(jax.jit, static_argnums=(1, 2, 3, 4), compiler_options=QUICK)
def divided(common, group, kv_heads, window, most):
    return divide(common, group, kv_heads, window, SMALL, LARGE, most)


def divide_requests(shape, requests, window=None, most=16):
    batch = make_batch(shape, requests, window=window)
    return divided(batch.metadata(), shape.heads // shape.kv_heads, shape.kv_heads, window, most)


SHAPES = {
    "decode": (Shape(tokens=5, rows=5, width=12, heads=8, kv_heads=2), None, 16),
    "decode in a window": (Shape(tokens=5, rows=5, width=12, heads=8, kv_heads=2), 21, 16),
    "mixed": (Shape(tokens=60, rows=5, width=20, heads=6, kv_heads=2), None, 8),
    "mixed in a window": (Shape(tokens=60, rows=5, width=20, heads=6, kv_heads=2), 9, 8),
    "one block of keys": (Shape(tokens=6, rows=6, width=2, heads=2, kv_heads=2), None, 16),
}


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=40)
@given(data=st.data())
def test_units_cover_every_query_and_key_once(name, data):
    """Each token of the step, padding included, is in exactly one tile; a tile's units are its blocks of keys, from
    the first that the window leaves to the last that causality leaves, in order and without a gap."""
    shape, window, most = SHAPES[name]
    requests = data.draw(requests_of(shape))
    result = divide_requests(shape, requests, window, most)
    units = [np.asarray(unit) for unit in result.units]
    tiles, covered = {}, np.zeros(shape.tokens, int)
    for index, unit in enumerate(units):
        if unit[work.LENGTH] == 0:
            continue
        keys_per_block = (LARGE if index < result.num_large else SMALL).keys
        tiles.setdefault((unit[work.TOKEN], keys_per_block), []).append(unit)
    starts = np.cumsum([0, *(new for new, _ in requests)])
    for (token, keys_per_block), parts in tiles.items():
        length = parts[0][work.LENGTH]
        covered[token : token + length] += 1
        if token >= starts[-1]:  # padding: nothing is read
            assert [part[work.END] - part[work.START] for part in parts] == [0]
            assert parts[0][work.SLOT] == -1
            continue
        row = np.searchsorted(starts, token, side="right") - 1
        new, computed = requests[row]
        position = computed + token - starts[row]
        assert all(part[work.ROW] == row and part[work.POSITION] == position for part in parts)
        assert token + length <= starts[row + 1]
        # A request of few tokens is a small tile; of many, a large one where there are any.
        assert (keys_per_block == LARGE.keys) == (shape.tokens > shape.rows and new > FEW_QUERIES)
        first = 0 if window is None else max(0, position - window + 1) // keys_per_block
        edges = [first, *(part[work.END] for part in parts)]
        assert [part[work.START] for part in parts] == edges[:-1]
        assert edges[-1] == -(-(position + length) // keys_per_block)
        assert all(part[work.START] < part[work.END] for part in parts)
        assert parts[0][work.KEYS] == position + length
    assert (covered == 1).all()

    split = {token: parts for (token, _), parts in tiles.items() if len(parts) > 1}
    assert all(part[work.SLOT] == -1 for parts in tiles.values() if len(parts) == 1 for part in parts)
    slots = [part[work.SLOT] for parts in split.values() for part in parts]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < result.num_slots for slot in slots)
    merges = [tuple(map(int, merge)) for merge in result.merges if merge[work.MERGE_LENGTH]]
    assert sorted(merges) == sorted(
        (token, parts[0][work.LENGTH], parts[0][work.SLOT], len(parts)) for token, parts in split.items()
    )
    for parts in split.values():
        assert [part[work.SLOT] for part in parts] == list(range(parts[0][work.SLOT], parts[0][work.SLOT] + len(parts)))
        sizes = [part[work.END] - part[work.START] for part in parts]
        assert max(sizes) - min(sizes) <= 1


def lengths(result):
    units = np.asarray(result.units)
    units = units[units[:, work.LENGTH] > 0]
    return (units[:, work.END] - units[:, work.START]).tolist()


def test_long_requests_are_split_and_short_ones_are_not():
    shape = Shape(tokens=4, rows=4, width=200, heads=2, kv_heads=2)  # blocks of 8 keys, 8 parts
    assert lengths(divide_requests(shape, [(1, 799)])) == [12, 13] * 4 + [0]
    assert lengths(divide_requests(shape, [(1, 399), (1, 15), (1, 399)])) == [12, 13] * 2 + [2] + [12, 13] * 2 + [0]
    # With programs enough for every processor a part is never under four blocks.
    assert lengths(divide_requests(shape, [(1, 31)] * 4, most=2048)) == [1] * 16
    assert divide_requests(Shape(tokens=4, rows=4, width=2), [(1, 6)]).num_slots == 0


def test_blocks_outside_a_window_are_in_no_unit():
    shape = Shape(tokens=4, rows=4, width=200, heads=2, kv_heads=2)
    assert lengths(divide_requests(shape, [(1, 799)], window=8)) == [1, 0]
    units = np.asarray(divide_requests(shape, [(1, 799)], window=8).units)
    assert units[0, [work.START, work.END]].tolist() == [99, 100]


def test_the_prompts_last_tokens_begin_first():
    result = divide_requests(Shape(tokens=60, rows=3, width=20, heads=2, kv_heads=2), [(50, 0)])
    tokens = [int(unit[work.TOKEN]) for unit in result.units[: result.num_large] if unit[work.LENGTH]]
    assert tokens == sorted(tokens, reverse=True)
    assert len(tokens) > 1


def test_shared_cases_reach_every_path():
    """The cases that all implementations pass make this one split, merge, leave out blocks, and use both tiles."""
    seen = set()
    for name, requests in {"decode": [(1, 150), (1, 3)], "mixed": [(30, 20), (1, 150)], "window": [(20, 200)]}.items():
        case = CASES[name]
        metadata = make_batch(case.shape, requests, window=case.window).metadata()
        group = GroupSpec(case.shape.block_size, (case.layer,))
        [result] = TritonAttention(interpret=True, most_programs=16).build(metadata, group).work
        units = np.asarray(result.units)
        real = units[:, work.LENGTH] > 0
        large = np.arange(len(units)) < result.num_large
        first = np.where(real, units[:, work.START], 0)
        seen |= {"large"} if (real & large).any() else set()
        seen |= {"small"} if (real & ~large).any() else set()
        seen |= {"merged"} if np.asarray(result.merges)[:, work.MERGE_LENGTH].any() else set()
        seen |= {"one part"} if (real & (units[:, work.SLOT] < 0)).any() else set()
        seen |= {"window skips"} if first[large & (units[:, work.SLOT] < 0)].any() else set()
    assert seen == {"large", "small", "merged", "one part", "window skips"}


def layer(**facts):
    heads, kv_heads, head_dim = (facts.pop(name, value) for name, value in [("h", 8), ("kv", 2), ("d", 64)])
    return AttentionLayer("layer", heads, kv_heads, head_dim, facts.pop("scale", 0.125), **facts)


@pytest.mark.parametrize(
    ("case", "dtype", "platform", "reason"),
    [
        (layer(), "float32", "gpu", "it takes bfloat16 and float16, not float32"),
        (layer(), "bfloat16", "cpu", "it needs an NVIDIA GPU, this is cpu"),
        (layer(d=68), "bfloat16", "gpu", "multiple of 8 and at most 256, not 68"),
        (layer(d=512), "bfloat16", "gpu", "multiple of 8 and at most 256, not 512"),
        (layer(h=128, kv=1), "bfloat16", "gpu", "at most 64 query heads may share a kv head, not 128"),
        (layer(scale=-1.0), "bfloat16", "gpu", "scale must be above 0, not -1.0"),
    ],
)
def test_refusals_carry_a_reason(case, dtype, platform, reason):
    with pytest.raises(ValueError, match=reason):
        choose_attention([case], 16, dtype, platform, "triton")


def test_on_a_gpu_it_is_chosen_for_what_it_takes():
    assert choose_attention([layer()], 16, "bfloat16", "gpu", "triton")[0].name == "triton"
    assert choose_attention([layer()], 16, "float32", "gpu")[0].name == "reference"


def test_a_layer_that_build_was_not_told_of_is_refused():
    batch = make_batch(CASES["decode"].shape, [(1, 3)])
    implementation = TritonAttention(interpret=True)
    with pytest.raises(ValueError, match="GroupSpec.layers must name them"):
        implementation.build(batch.metadata(), GroupSpec(16))
    built = implementation.build(batch.metadata(), GroupSpec(16, (CASES["decode"].layer,)))
    with pytest.raises(ValueError, match="build was not told of a layer like"):
        implementation.attend(batch.queries, batch.cache, built, layer(window=7))


def test_layers_of_one_kind_share_their_division():
    one, other, local = layer(), layer(soft_cap=3.0), layer(window=9)
    metadata = jax.eval_shape(lambda: make_batch(Shape(4, 4, head_dim=64), [(1, 3)]).metadata())
    build = partial(TritonAttention().build, group=GroupSpec(4, (one, other, local)))
    assert len(jax.eval_shape(build, metadata).work) == 2


@pytest.mark.parametrize("group", [1, 3, 7, 8, 16, 33, 64])
def test_tiles_hold_at_least_one_token(group):
    for capability in (None, (8, 0), (9, 0)):
        for head_dim in (64, 80, 128, 256):
            plan = plan_for(group, head_dim, capability)
            assert min(plan.small.rows, plan.large.rows) >= max(group, 16)
