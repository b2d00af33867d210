"""Runs one small step through the interpreter of Mosaic kernels with a fault planted; a process of its own, since a
fault can hang the interpreter, or leave it unusable.

    python -m tests.pallas_kernels.planted nothing|fence|barrier|sm80-meet|sm80-wait

The first three are of the Hopper kernel, the others of Ampere's.

Prints "right" if the result is. A fault ends it with the interpreter's error.
"""

import sys
from types import SimpleNamespace

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import AttentionLayer, GroupSpec
from pallas_kernels.paged_attention.mosaic_sm80 import MosaicSm80Attention
from pallas_kernels.paged_attention.mosaic_sm80.products import Device
from pallas_kernels.paged_attention.mosaic_sm90 import MosaicSm90Attention, compute, products
from tests.pallas_kernels.implementations import races_are_errors
from tests.pallas_kernels.ragged import Shape, make_batch


def plant(fault: str) -> None:
    real = vars(plgpu)
    if fault == "sm80-meet":  # between the writes of one piece and the reads of another
        Device.meet = lambda device: None
    if fault == "sm80-wait":  # for copies to have ended
        Device.wait = lambda device, under_way, here: plgpu.commit_smem()
    if fault == "fence":  # between reading values and the copy that overwrites them
        products.plgpu = SimpleNamespace(**real | {"commit_smem": lambda: None})
    if fault == "barrier":  # values are read without waiting for them
        waits = iter(range(10**6))

        def all_waits_but_some(barrier):
            # Code is traced once: first it waits for queries, then in each tile for keys and for values.
            turn = next(waits)
            if turn == 0 or turn % 2:
                real["barrier_wait"](barrier)

        compute.plgpu = SimpleNamespace(**real | {"barrier_wait": all_waits_but_some})


def main(fault: str) -> None:
    plant(fault)
    shape = Shape(2, 2, 48, 16, 4, 1, 64, "bfloat16")
    layer = AttentionLayer("layer", 4, 1, 64, 0.125)
    batch = make_batch(shape, [(1, 700), (1, 5)])
    kernel = MosaicSm80Attention if fault.startswith("sm80") else MosaicSm90Attention
    attention = kernel(plgpu.InterpretGPUParams(detect_races=True), stages=2, workers=2)

    @jax.jit
    def step(q, cache, metadata):
        return attention.attend(q, cache, attention.build(metadata, GroupSpec(16, (layer,))), layer)

    with races_are_errors():
        out = np.asarray(step(batch.queries, batch.cache, batch.metadata()), np.float64)
    print("right" if np.abs(out - batch.expected(scale=0.125)).max() < 0.02 else "wrong")


if __name__ == "__main__":
    main(sys.argv[1])
