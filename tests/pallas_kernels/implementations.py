"""The attention implementations under test, each in a form that runs without a GPU: kernels by an interpreter.

A new one joins the shared tests by one entry in TESTED. What it doesn't take it refuses, and so leaves out.
"""

import faulthandler
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import AttentionImplementation, AttentionLayer, GroupSpec
from pallas_kernels.paged_attention.mosaic_sm80 import MosaicSm80Attention
from pallas_kernels.paged_attention.mosaic_sm90 import MosaicSm90Attention
from pallas_kernels.paged_attention.reference import ReferenceAttention
from pallas_kernels.paged_attention.triton import TritonAttention
from tests.pallas_kernels.ragged import Batch, Shape


@dataclass(frozen=True)
class Tested:
    """Attributes:
    implementation: as it runs here.
    platform: where it is asked whether it takes a case; a GPU kernel is asked as on a GPU.
    examples: batches drawn for each case; interpreters are slow.
    seconds: how long one test may take: a wrong barrier hangs the interpreter of Mosaic kernels. None: no limit.
    """

    implementation: AttentionImplementation
    platform: str = "gpu"
    examples: int = 4
    seconds: float | None = None

    @property
    def name(self) -> str:
        return self.implementation.name


MOSAIC = (
    # As few workers as make them divide the keys of some requests, and a ring that every request goes around.
    Tested(
        MosaicSm90Attention(interpret=plgpu.InterpretGPUParams(detect_races=True), stages=2, workers=3),
        examples=1,
        seconds=300,
    ),
    Tested(
        MosaicSm80Attention(interpret=plgpu.InterpretGPUParams(detect_races=True), stages=3, workers=3),
        examples=1,
        seconds=300,
    ),
)
TESTED = (
    *MOSAIC,
    # As few programs as make it split the keys of some requests, and not of others.
    Tested(TritonAttention(interpret=True, most_programs=16)),
    Tested(ReferenceAttention(), platform="cpu", examples=10),
)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Ends the process, with a traceback, when the time is over: a hung interpreter can't be interrupted. Races that
    the interpreter finds are errors."""
    if seconds is not None:
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        with races_are_errors():
            yield
    finally:
        if seconds is not None:
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def races_are_errors() -> Iterator[None]:
    """JAX 0.12's interpreter raises on a race; that of 0.11 prints it and goes on.

    Raises:
        RuntimeError: it was printed.
    """
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
            jax.effects_barrier()
    finally:
        print(printed.getvalue(), end="")
    if "RACE DETECTED" in printed.getvalue():
        raise RuntimeError(printed.getvalue())


@dataclass(frozen=True)
class Case:
    """What is compiled: shapes, and the options of a layer."""

    shape: Shape
    scale: float = 0.125
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def layer(self) -> AttentionLayer:
        shape = self.shape
        heads = shape.heads, shape.kv_heads, shape.head_dim
        return AttentionLayer("layer", *heads, self.scale, self.window, self.soft_cap)

    @property
    def options(self) -> dict[str, float | int | None]:
        return {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}


def _shape(tokens, rows, width, block_size, group, kv_heads, head_dim, dtype="bfloat16"):
    return Shape(tokens, rows, width, block_size, group * kv_heads, kv_heads, head_dim, dtype)


# Every group size, head size and block size that a model here has, beside each option; few tokens (decoding) and many,
# with keys in one piece and in several.
CASES = {
    "decode": Case(_shape(6, 6, 12, 16, 4, 2, 64)),
    "mixed": Case(_shape(40, 5, 10, 16, 4, 2, 64)),
    "window": Case(_shape(40, 4, 20, 16, 2, 2, 64), window=37),
    "decode in a window": Case(_shape(4, 4, 20, 16, 8, 1, 64), window=70),
    "window of one block": Case(_shape(20, 4, 6, 32, 3, 1, 128, "float16"), window=32),
    "cap": Case(_shape(24, 3, 5, 32, 3, 1, 64, "float16"), soft_cap=1.5),
    "sinks": Case(_shape(24, 3, 10, 16, 4, 2, 64), sinks=True),
    "decode with sinks, cap and window": Case(
        _shape(8, 8, 3, 64, 6, 1, 128, "float16"), window=80, soft_cap=5.0, sinks=True
    ),
    "large blocks": Case(_shape(20, 2, 2, 256, 7, 1, 128), scale=0.3),
    "blocks of 128": Case(_shape(5, 5, 3, 128, 8, 1, 128), scale=0.05),
    "one head of 256": Case(_shape(24, 4, 6, 16, 1, 2, 256, "float16"), scale=0.06),
    "many heads to one": Case(_shape(12, 4, 6, 32, 16, 1, 64)),
    "32 heads to one": Case(_shape(6, 2, 4, 32, 32, 1, 64)),
    "head of 80, blocks of 8": Case(_shape(20, 4, 14, 8, 5, 1, 80)),
    "head of 96, blocks of 1": Case(_shape(20, 4, 90, 1, 2, 1, 96, "float16")),
    "no multiple of anything": Case(_shape(19, 3, 9, 5, 3, 2, 40), window=11, sinks=True),
}


def refusal(tested: Tested, case: Case) -> str | None:
    """Why the implementation leaves out the case."""
    shape = case.shape
    return tested.implementation.refuses(case.layer, shape.block_size, jnp.dtype(shape.dtype), tested.platform)


def pairs() -> list:
    """(tested, name of a case) as pytest parameters, for every case that an implementation takes."""
    return [
        pytest.param(tested, name, id=f"{tested.name}-{name}")
        for tested in TESTED
        for name, case in CASES.items()
        if refusal(tested, case) is None
    ]


def attend(tested: Tested, case: Case, batch: Batch, sinks: jax.Array | None = None, causal: bool = True) -> jax.Array:
    """The implementation's answer, by way of the interface that the step uses."""
    return _attend(tested.implementation, case.layer, batch.queries, batch.cache, batch.metadata(causal), sinks)


def _step(implementation, layer, q, cache, metadata, sinks):
    built = implementation.build(metadata, GroupSpec(metadata.block_size, (layer,)))
    return implementation.attend(q, cache, built, layer, sinks)


# Compiling is most of the time, and code of the lowest quality takes half as much of it.
QUICK = {"xla_backend_optimization_level": 0}
_attend = jax.jit(_step, static_argnums=(0, 1), compiler_options=QUICK)
