"""What a step padded to n tokens costs: its tokens, its time measured here, or a roofline of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int32, Int64

from jaxrunner.runner import ModelRunner
from jaxrunner.shapes import StepLayout, dummy_batch
from pallas_kernels.gpus import Gpu


def tokens(sizes: Int64[np.ndarray, "M"]) -> Float64[np.ndarray, "M"]:
    """The padded tokens themselves."""
    return sizes.astype(np.float64)


@dataclass(frozen=True)
class Sampled:
    """Costs between a few sizes that were looked at: straight lines, and never falling.

    Attributes:
        sizes: ascending.
        seconds: of one step at each.
        compile_s, temp_bytes, code_bytes: of its executable; empty where nothing was compiled.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    compile_s: tuple[float, ...] = ()
    temp_bytes: tuple[int, ...] = ()
    code_bytes: tuple[int, ...] = ()

    def __call__(self, sizes: Int64[np.ndarray, "M"]) -> Float64[np.ndarray, "M"]:
        return np.interp(sizes, self.sizes, np.maximum.accumulate(self.seconds))

    def needs(self, ladder: Sequence[int]) -> tuple[float | None, int | None]:
        """Compile seconds of a ladder's forwards; bytes of their code and of the largest's temporaries, which the
        others share.
        """
        if not self.compile_s:
            return None, None
        compile_s, code = (
            float(np.interp(ladder, self.sizes, each).sum()) for each in (self.compile_s, self.code_bytes)
        )
        return compile_s, int(code + np.interp(ladder, self.sizes, self.temp_bytes).max())


def sample_sizes(budget: int, factor: int = 4) -> tuple[int, ...]:
    """1, 4, 16, ... and the budget: between powers of a step's time lies nothing that a line would miss by much."""
    sizes = [1]
    while sizes[-1] * factor < budget:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes) if sizes[-1] == budget else (*sizes, budget)


def measure(
    runner: ModelRunner, repeats: int = 3, on_size: Callable[[int, float], None] = lambda size, seconds: None
) -> Sampled:
    """Times the forward at every token bucket of a runner, prompts only; the least of ``repeats`` after one to warm up.

    What the runner held is lost: ``reset`` it before other work.
    """
    rows = [_measure_size(runner, size, repeats, on_size) for size in runner.shapes.tokens]
    seconds, compile_s, temp, code = zip(*rows, strict=True)
    return Sampled(runner.shapes.tokens, seconds, compile_s, temp, code)


def _measure_size(
    runner: ModelRunner, size: int, repeats: int, on_size: Callable[[int, float], None]
) -> tuple[float, float, int, int]:
    buffer = prompts_upload(runner.shapes.layouts[size])
    forward = runner.executables.forward(runner.shapes.full(size))
    least = np.inf
    for attempt in range(repeats + 1):
        start = time.perf_counter()
        _, _, runner.kv_caches, runner.state, *_ = forward(runner.params, runner.kv_caches, runner.state, buffer)
        jax.block_until_ready(runner.kv_caches)
        if attempt:
            least = min(least, time.perf_counter() - start)
    on_size(size, least)
    made = runner.executables.compiled[f"forward[{size}]"]
    return least, made.seconds, made.temp_bytes, made.code_bytes


def prompts_upload(layout: StepLayout) -> Int32[np.ndarray, "size"]:
    """The upload of a step that fills its shape: prompts of as equal length as can be, none with a block of its own."""
    buffer = np.zeros(layout.size, np.int32)

    def field(name: str) -> np.ndarray:
        at, length = layout.fields[name]
        return buffer[at : at + length]

    counts = dummy_batch(layout.num_tokens, layout.num_reqs)
    field("num_reqs")[0], field("num_tokens")[0], field("num_logits")[0] = layout.num_reqs, layout.num_tokens, 1
    field("query_start_loc")[1:] = np.cumsum(counts)
    field("num_known")[:] = field("num_prompt")[:] = counts
    field("update_cell")[:] = np.iinfo(np.int32).max
    return buffer


@dataclass(frozen=True)
class Product:
    """One product of matrices of a program: its operations (a multiplication and an addition are two), and the bytes
    of its operands and its result.
    """

    operations: float
    bytes: float

    def seconds(self, gpu: Gpu) -> float:
        """At the GPU's peaks, whichever takes longer."""
        return max(self.operations / gpu.bf16_flops_per_s, self.bytes / gpu.memory_bytes_per_s)


def products(function: Callable[..., Any], *arguments: Any) -> list[Product]:
    """The matrix products of a program, from its trace: nothing is compiled. A loop's body counts once."""
    return list(_products(jax.make_jaxpr(function)(*arguments).jaxpr))


def roofline(
    forward_at: Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]], sizes: Sequence[int], gpu: Gpu
) -> Sampled:
    """Seconds of a step at a GPU's peaks: the sum over its products, each bound by memory or by arithmetic.

    What attention reads of the cache is left out: it follows the sequences' lengths, not the padding.
    """
    seconds = []
    for size in sizes:
        function, arguments = forward_at(size)
        seconds.append(sum(product.seconds(gpu) for product in products(function, *arguments)))
    return Sampled(tuple(sizes), tuple(seconds))


def _products(jaxpr: Any) -> Iterator[Product]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contract, _), _ = equation.params["dimension_numbers"]
            left, right = (variable.aval for variable in equation.invars)
            out = equation.outvars[0].aval
            depth = int(np.prod([left.shape[i] for i in contract], initial=1))
            size = sum(int(np.prod(x.shape, initial=1)) * jnp.dtype(x.dtype).itemsize for x in (left, right, out))
            yield Product(2.0 * depth * int(np.prod(out.shape, initial=1)), float(size))
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _products(inner)
