"""A buffer is written again only when the step that read it has an output ready."""

import jax
import numpy as np
import pytest

from jaxrunner.batch import BufferRing
from jaxrunner.batch.buffers import aligned_zeros
from jaxrunner.shapes import StepLayout

LAYOUT = StepLayout(num_tokens=1, num_reqs=1, num_logits=1, num_updates=1)


class Step:
    """An output that is ready when somebody waits for it, and says so."""

    def __init__(self) -> None:
        self.waited = False

    def block_until_ready(self) -> None:
        self.waited = True


def test_waits_for_the_reader_of_the_buffer_it_hands_out() -> None:
    ring, first, second = BufferRing(LAYOUT.size, depth=2), Step(), Step()
    a = ring.acquire(LAYOUT)["buffer"]
    ring.read_by(first)
    b = ring.acquire(LAYOUT)["buffer"]
    ring.read_by(second)
    assert a is not b and not first.waited
    assert ring.acquire(LAYOUT)["buffer"] is a
    assert first.waited and not second.waited
    ring.acquire(LAYOUT)["buffer"]
    assert second.waited


def test_a_step_without_output_frees_its_buffer() -> None:
    ring = BufferRing(LAYOUT.size, depth=1)
    assert ring.acquire(LAYOUT)["buffer"] is ring.acquire(LAYOUT)["buffer"]


def test_ring_needs_a_buffer() -> None:
    with pytest.raises(ValueError, match="at least one buffer, got 0"):
        BufferRing(LAYOUT.size, depth=0)


def test_aligned_memory_really_is_aliased_on_cpu() -> None:
    """The reason for the ring: an aligned array handed to the CPU backend is not copied."""
    for _ in range(8):
        buffer = aligned_zeros(100)
        assert buffer.ctypes.data % 64 == 0
    if jax.default_backend() == "cpu":
        on_device = jax.device_put(buffer)
        on_device.block_until_ready()
        buffer[:] = 7
        assert np.asarray(on_device)[0] == 7
