"""Who may write a host buffer, and when: shown with the violation, and that the ring cannot commit it."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrunner.batch import BufferRing, InputBatch, prepare_inputs, update_states
from jaxrunner.batch.buffers import aligned_zeros
from jaxrunner.protocol import CachedRequestData, NewRequestData, SchedulerOutput
from jaxrunner.shapes import StepLayout, StepShapes

LAYOUT = StepLayout(num_tokens=4, num_reqs=2, num_logits=2, num_updates=4)
PATIENCE = 20.0  # seconds, of a test that has gone wrong

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="only the CPU backend reads host memory in place")


class SlowStep:
    """A compiled step that reads its buffer only when it is let go. It runs in a thread, and is its own output."""

    def __init__(self) -> None:
        self.started, self.go = threading.Event(), threading.Event()

        def wait() -> np.ndarray:
            self.started.set()
            assert self.go.wait(PATIENCE)
            return np.zeros((), np.int32)

        def step(buffer: jax.Array) -> jax.Array:
            return buffer + jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.int32))

        self._compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((LAYOUT.size,), jnp.int32)).compile()

    def start(self, buffer: np.ndarray) -> None:
        """Comes back when the step has its argument, and has not read it."""
        self._thread = threading.Thread(target=lambda: setattr(self, "_out", self._compiled(buffer)))
        self._thread.start()
        assert self.started.wait(PATIENCE)

    def block_until_ready(self) -> None:
        self._thread.join(PATIENCE)

    def result(self) -> list[int]:
        self.block_until_ready()
        return np.asarray(self._out).tolist()


@on_cpu
def test_writing_what_a_step_still_reads_corrupts_it() -> None:
    """The rule broken on purpose, with aligned memory: the step that was handed ones computes with twos."""
    step, buffer = SlowStep(), aligned_zeros(LAYOUT.size)
    buffer[:] = 1
    step.start(buffer)
    buffer[:] = 2
    step.go.set()
    assert step.result() == [2] * LAYOUT.size


@on_cpu
def test_the_ring_waits_for_the_step_that_reads() -> None:
    """The same step over a ring's buffer: who asks for that buffer again gets it when the step is done."""
    step, ring = SlowStep(), BufferRing(LAYOUT.size, depth=2)
    first = ring.acquire(LAYOUT)["buffer"]
    first[:] = 1
    step.start(first)
    ring.read_by(step)
    second = ring.acquire(LAYOUT)["buffer"]
    second[:] = 2
    again: list[np.ndarray] = []

    def write_again() -> None:
        again.append(ring.acquire(LAYOUT)["buffer"])
        again[0][:] = 3

    writer = threading.Thread(target=write_again)
    writer.start()
    writer.join(0.2)
    assert writer.is_alive() and not again, "handed out while a step reads it"
    assert first.tolist() == [1] * LAYOUT.size
    step.go.set()
    writer.join(PATIENCE)
    assert again[0].ctypes.data == first.ctypes.data
    assert step.result() == [1] * LAYOUT.size


class Reader:
    """A step's output that becomes ready when it is waited for, or when it likes."""

    def __init__(self) -> None:
        self.ready = False

    def block_until_ready(self) -> None:
        self.ready = True


@given(st.integers(1, 4), st.lists(st.sampled_from(["step", "step without output", "oldest is ready"]), max_size=30))
def test_no_buffer_is_handed_out_before_its_reader_is_ready(depth: int, events: list[str]) -> None:
    ring, readers, unfinished = BufferRing(LAYOUT.size, depth), dict[int, Reader](), list[Reader]()
    for event in events:
        if event == "oldest is ready":
            if unfinished:
                unfinished.pop(0).ready = True
            continue
        waiting = [r for r in readers.values() if not r.ready]
        views = ring.acquire(LAYOUT)
        address = views["buffer"].ctypes.data
        assert address % 64 == 0
        assert all(np.shares_memory(view, views["buffer"]) for view in views.values())
        assert address not in readers or readers[address].ready
        # Not more is waited for than that.
        assert sum(r.ready for r in waiting) == (address in readers and readers[address] in waiting)
        readers.pop(address, None)
        if event == "step":
            readers[address] = Reader()
            unfinished.append(readers[address])
            ring.read_by(readers[address])


def test_a_buffer_whose_step_failed_is_not_handed_out() -> None:
    class Failed:
        def block_until_ready(self) -> None:
            raise RuntimeError("the step failed")

    ring = BufferRing(LAYOUT.size, depth=2)
    ring.acquire(LAYOUT)
    ring.read_by(Failed())
    ring.acquire(LAYOUT)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the step failed"):
            ring.acquire(LAYOUT)
        ring.acquire(LAYOUT)


def test_ring_needs_a_buffer() -> None:
    with pytest.raises(ValueError, match="at least one buffer, got 0"):
        BufferRing(LAYOUT.size, depth=0)


def test_buffers_are_always_aligned() -> None:
    """So that aliasing happens every time, not by luck."""
    assert all(aligned_zeros(size).ctypes.data % 64 == 0 for size in (1, 7, 16, 100, 1000))


def test_nothing_of_another_layout_is_left_in_a_buffer() -> None:
    """Steps of every size in one buffer: each leaves what a fresh buffer would hold, to the last word."""
    b = InputBatch(max_num_reqs=4, max_model_len=64, max_num_batched_tokens=32, vocab_size=100, block_sizes=(4,))
    shapes = StepShapes(32, 4, min_block_size=4)
    ring = BufferRing(max(layout.size for layout in shapes.layouts.values()), depth=1)
    ring._buffers[0].memory[:] = 77
    tokens = dict.fromkeys("ABCD", 0)
    for step, counts in enumerate([(7, 7, 7, 7), (1, 0, 0, 0), (1, 1, 0, 4), (9, 9, 9, 1), (0, 2, 0, 0), (1, 1, 1, 1)]):
        ids = [r for r, n in zip("ABCD", counts, strict=True) if n]
        so = SchedulerOutput(num_scheduled_tokens={r: n for r, n in zip("ABCD", counts, strict=True) if n})
        so.total_num_scheduled_tokens = sum(counts)
        if not step:
            so.scheduled_new_reqs = [
                NewRequestData(r, [9] * 40, ([*range(10 * i, 10 * i + 10)],)) for i, r in enumerate(ids, 1)
            ]
        else:
            n = len(ids)
            so.scheduled_cached_reqs = CachedRequestData(ids, set(), [None] * n, [tokens[r] for r in ids], [0] * n)
            so.scheduled_cached_reqs.new_block_ids[0] = ([90 + step],)
        update_states(b, so)
        b.block_table[0]._cells, cells = [], b.block_table[0]._cells
        values, b.block_table[0]._values = b.block_table[0]._values, []
        fresh = []
        for buffers in (ring, None):
            b.block_table[0]._cells, b.block_table[0]._values = list(cells), list(values)
            fresh.append(prepare_inputs(b, so, shapes, buffers=buffers).buffer.tolist())
        assert fresh[0] == fresh[1]
        for r, n in zip("ABCD", counts, strict=True):
            tokens[r] += n
