"""The Ampere attention: what its plans hold, when it is chosen, and what the interpreter of its kernel can't see."""

import subprocess
import sys
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import AttentionLayer, choose_attention
from pallas_kernels.paged_attention.mosaic import toolchain
from pallas_kernels.paged_attention.mosaic.pieces import Piece
from pallas_kernels.paged_attention.mosaic_sm80 import MosaicSm80Attention, ring
from pallas_kernels.paged_attention.mosaic_sm80.plan import PROCESSORS, make_plan
from pallas_kernels.paged_attention.mosaic_sm80.rows import powers_of_two

LAYER = AttentionLayer("layer", 32, 8, 128, 0.1)


@pytest.fixture
def new_enough(monkeypatch):
    """As if CUDA were new enough, whichever is here."""
    monkeypatch.setattr(toolchain, "cuda_version", lambda: (13, 0, 0))


def on(kind):
    device = AbstractDevice(device_kind=kind, num_cores=108, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.mark.parametrize(("head_dim", "tokens", "capability"), [*product((64, 128, 256), (16, 64), PROCESSORS)])
def test_the_blocks_of_a_plan_fit_a_processor(head_dim, tokens, capability):
    processor = PROCESSORS[capability]
    plan = make_plan(AttentionLayer("", 8, 1, head_dim, 1.0), tokens, 16, 16, True, processor)
    assert plan.rows == (128 if tokens == 64 and head_dim == 64 else 64)
    blocks = plan.workers // processor.num_sms
    assert blocks in (1, 2) and plan.workers == blocks * processor.num_sms
    ring_bytes = plan.stages * 2 * plan.block_keys * head_dim * 2
    queries = 64 * head_dim * 2 if head_dim == 256 else 0
    assert blocks * (ring_bytes + queries + plan.rows * 256 + 1024) <= processor.shared_bytes
    assert plan.stages >= 2 and plan.block_keys >= 16 and blocks * ring_bytes >= 32 << 10


def test_taken_on_ampere_and_ada_by_name_alone(new_enough):
    for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA A10G"):
        with on(kind):
            assert choose_attention([LAYER], 16, "bfloat16", "gpu")[0].name == "triton"
            assert choose_attention([LAYER], 16, "bfloat16", "gpu", "mosaic_sm80")[0].name == "mosaic_sm80"
    for kind in ("NVIDIA H200", "NVIDIA B200"):
        with on(kind), pytest.raises(ValueError, match=rf"capability 8.x \(Ampere, Ada\), not {kind}"):
            choose_attention([LAYER], 16, "bfloat16", "gpu", "mosaic_sm80")
    with pytest.raises(ValueError, match="needs an NVIDIA GPU, this is cpu"):
        choose_attention([LAYER], 16, "bfloat16", "cpu", "mosaic_sm80")


def test_refusals(new_enough):
    refuses = MosaicSm80Attention().refuses
    with on("NVIDIA A100-SXM4-80GB"):
        assert refuses(LAYER, 16, "bfloat16", "gpu") is None
        assert "block size must be one of" in refuses(LAYER, 8, "bfloat16", "gpu")
        assert "head size must be one of" in refuses(AttentionLayer("", 32, 8, 96, 0.1), 16, "bfloat16", "gpu")


def test_runs_of_tokens_are_powers_of_two():
    for n in range(1, 65):
        runs = powers_of_two(n)
        assert [first for first, _ in runs] == list(np.cumsum([0, *(size for _, size in runs)])[:-1])
        assert sum(size for _, size in runs) == n and all(size & (size - 1) == 0 for _, size in runs)
    assert powers_of_two(21) == [(0, 16), (16, 4), (20, 1)]


class Copies:
    """A `Device` that only keeps account: copies end in the order in which they were started."""

    interpreted = False

    def __init__(self):
        self.under_way = []
        self.slots = {}  # what lies in each (reference, slot, first key of the slot)

    def copy(self, source, to, here):
        self.under_way.append((source, to))
        self.slots[to] = None

    def wait(self, under_way, here):
        done = len(self.under_way) - under_way
        for source, to in self.under_way[: max(done, 0)]:
            self.slots[to] = source
        del self.under_way[: max(done, 0)]


class Ref:
    """A reference whose `at` gives its name and the places, and that can be read as a table."""

    def __init__(self, name, table=None):
        self.name, self.table = name, table

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        if self.table is not None:
            return self.table[index]
        return self.name, *(int(i.start if hasattr(i, "start") else i) for i in index)


@pytest.mark.parametrize(
    ("stages", "block_size", "begin", "end"),
    [(2, 16, 0, 1), (2, 16, 3, 9), (3, 16, 0, 2), (3, 128, 2, 9), (4, 16, 0, 1), (4, 32, 1, 3), (4, 16, 0, 11)],
)
def test_a_tile_is_taken_when_its_copies_are_done_and_theirs_alone(monkeypatch, stages, block_size, begin, end):
    """The interpreter has no such counts: there each slot has a barrier."""
    monkeypatch.setattr(ring.pl, "when", lambda condition: lambda f: f() if condition else None)
    plan = make_plan(LAYER, 64, 64, block_size, True, PROCESSORS[8, 0], stages=stages)
    device, table = Copies(), np.arange(100, 200)[None]
    loaded = ring.Ring(Ref("k"), Ref("v"), Ref("", table), 0, Ref("keys"), Ref("values"), None, device, plan)
    num_keys = end * plan.block_keys - 5
    facts = {"row": 0, "first_key": 0, "num_keys": num_keys, "begin": begin, "end": end}
    piece = Piece(**{field: jnp.int32(facts.get(field, 0)) for field in Piece._fields})
    pages = loaded.begin(piece)
    for j in range(begin, end):
        before = dict(device.slots)
        slot, pages = loaded.take(piece, jnp.int32(j), pages)
        for name, cache in (("keys", "k"), ("values", "v")):
            for i in range(plan.copies):
                key = j * plan.block_keys + i * plan.copied_keys
                page = table[0, min(key, num_keys - 1) // block_size]
                place = name, int(slot), i * plan.copied_keys
                assert device.slots[place] == (cache, page, key % block_size, 0)
        # What was started now goes where the tile before this one was.
        changed = {place[1] for place, content in device.slots.items() if content is None and before.get(place)}
        assert changed <= {(j - 1 - begin) % stages}
        # Now the next tiles are under way, as many as the ring has place for beside this one.
        assert len(device.under_way) == min(stages - 1, end - 1 - j) * 2 * plan.copies


def test_a_result_is_renamed_as_a_left_operand_without_moving():
    """Each thread has the same elements of [rows, K] in both layouts, register by register."""

    def places(layout, shape=(128, 64)):
        strides = layout.tiling.tile_strides((shape[1], 1))
        offsets = [
            sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(layout.registers_shape(shape))
        ]
        threads = [
            tuple(strides[d] for d in dims if isinstance(d, int)) for dims in (layout.warp_dims, layout.lane_dims)
        ]
        return offsets, threads, strides[layout.vector_dim], layout.vector_length

    for dtype in ("bfloat16", "float16"):
        matrix, left = plgpu.Layout.MMA_ACC(jnp.dtype(dtype)), plgpu.Layout.MMA_LHS(jnp.dtype(dtype))
        assert places(matrix.to_mgpu()) == places(left.to_mgpu())


@pytest.mark.parametrize("fault", ["meet", "wait"])
def test_the_interpreter_sees_planted_faults(fault):
    command = [sys.executable, "-m", "tests.pallas_kernels.planted", f"sm80-{fault}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "RACE DETECTED" in done.stdout + done.stderr and done.returncode != 0
