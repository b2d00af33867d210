"""Replays of a trace on the host path: timed phase by phase, or compared with the reference at every step."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns, thread_time_ns
from typing import Any
from unittest import mock

import jax
import numpy as np

from jaxrunner.batch import BufferRing, InputBatch, StepInputs, prepare_inputs, record_tokens, update_states
from jaxrunner.protocol import ModelRunnerOutput
from jaxrunner.shapes import StepShapes
from scripts.host_bench.floor import Yardstick
from scripts.host_bench.reference import Reference
from scripts.host_bench.workload import TraceConfig, TraceStep, trace

BLOCK = 10  # measured steps between two samples of the yardstick
PHASES = ("update_states", "prepare_inputs", "record_sampled")


@dataclass(frozen=True, slots=True)
class Replay:
    """Times of one replay.

    Attributes:
        phases: microseconds of each measured step, by phase; "before_forward" is the first two together.
        floor: microseconds of the yardstick, one sample for each ``BLOCK`` steps.
    """

    phases: dict[str, np.ndarray]
    floor: np.ndarray

    def median(self, phase: str) -> float:
        return float(np.median(self.phases[phase]))

    def in_floors(self, phase: str) -> float:
        """The phase as a multiple of the yardstick: median over blocks, each by its own sample."""
        steps = self.phases[phase]
        blocks = np.array([np.median(steps[i : i + BLOCK]) for i in range(0, len(steps), BLOCK)])
        return float(np.median(blocks / self.floor))


class HostPath:
    """A batch and its buffers, as a runner has them."""

    def __init__(self, config: TraceConfig) -> None:
        drafts = config.num_speculative_tokens
        self.batch = InputBatch(
            max_num_reqs=config.max_num_reqs,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=config.vocab_size,
            block_sizes=(config.block_size,),
            num_blocks=1 + config.max_num_reqs * -(-config.max_model_len // config.block_size),
            num_speculative_tokens=drafts,
        )
        self.shapes = StepShapes(
            config.max_num_batched_tokens, config.max_num_reqs, drafts, min_block_size=config.block_size
        )
        self.buffers = BufferRing(max(layout.size for layout in self.shapes.layouts.values()), depth=2)
        self.width = 1 + drafts

    def update(self, step: TraceStep, check: bool) -> None:
        update_states(self.batch, step.scheduler_output, check=check)

    def prepare(self, step: TraceStep) -> StepInputs:
        return prepare_inputs(self.batch, step.scheduler_output, self.shapes, buffers=self.buffers)

    def sampled(self, step: TraceStep) -> np.ndarray:
        """What the device would hand back: [R, w], -1 behind each row's tokens."""
        out = np.full((self.batch.num_reqs, self.width), -1, np.int32)
        for row, req_id in enumerate(self.batch.req_ids):
            tokens = step.sampled[req_id]
            out[row, : len(tokens)] = tokens
        return out

    def record(self, inputs: StepInputs, sampled: np.ndarray, lists: bool = True) -> ModelRunnerOutput:
        """Bookkeeping, and the whole of a step's output; ``lists``: the tokens as lists too."""
        tokens = record_tokens(self.batch, sampled)
        return ModelRunnerOutput(
            req_ids=inputs.req_ids.copy(),
            req_id_to_index=inputs.names.req_id_to_index.copy(),
            sampled_token_ids=tokens.lists() if lists else [],
            flat_token_ids=tokens.token_ids,
            token_offsets=tokens.offsets,
        )


def compare_with_reference(config: TraceConfig, on_step: Callable[[], object] = lambda: None) -> int:
    """Every array of every step, with validation on. Returns the number of steps.

    Raises:
        AssertionError: naming the first array that differs.
    """
    path, steps = HostPath(config), 0
    reference = Reference(config.block_size, config.max_num_reqs, path.batch.block_table[0].width)
    for step in trace(config):
        reference.begin(step.scheduler_output)
        path.update(step, check=True)
        inputs = path.prepare(step)
        reference.upload(inputs, path.batch.columns["sampling_record"])
        reference.compare(step.scheduler_output, inputs)
        reference.end(step, inputs, path.record(inputs, path.sampled(step)))
        steps += 1
        on_step()
    return steps


CLOCKS: dict[str, Callable[[], int]] = {"wall": perf_counter_ns, "cpu": thread_time_ns}


def time_phases(
    config: TraceConfig,
    yardstick: Yardstick,
    *,
    check: bool,
    clock: Callable[[], int] = perf_counter_ns,
    lists: bool = True,
    on_step: Callable[[], object] = lambda: None,
) -> Replay:
    """Time of ``update_states``, ``prepare_inputs``, and ``record_sampled`` with the output around it.

    Args:
        check: validate each plan, inside ``update_states``.
        lists: the output has its tokens as lists, and not only flat.
    """
    path = HostPath(config)
    times: list[tuple[int, int, int]] = []
    floor: list[float] = []
    for steps in in_blocks(trace(config)):
        if steps[0].measured:
            floor.append(yardstick.sample())
        for step in steps:
            start = clock()
            path.update(step, check)
            updated = clock()
            inputs = path.prepare(step)
            prepared = clock()
            sampled = path.sampled(step)
            begin = clock()
            path.record(inputs, sampled, lists)
            recorded = clock()
            if step.measured:
                times.append((updated - start, prepared - updated, recorded - begin))
            on_step()
    phases = dict(zip(PHASES, np.array(times).T / 1e3, strict=True))
    phases["before_forward"] = phases["update_states"] + phases["prepare_inputs"]
    return Replay(phases, np.array(floor))


def time_details(
    config: TraceConfig, steps: int, on_step: Callable[[], object] = lambda: None
) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of two details, a replay of their own: (settling the rows, uploading) a step.

    Settling the rows is the part of ``update_states`` that only runs when requests come, go or change their order.
    Uploading lasts until a compiled call that takes the buffer has run: the buffer alone, no model.
    """
    path, calls = HostPath(config), dict[int, Any]()
    module = importlib.import_module("jaxrunner.batch.update_states")
    settle, settling, settled, uploads = module._settle_rows, [0], list[int](), list[int]()

    def timed(*arguments: Any) -> None:
        start = perf_counter_ns()
        settle(*arguments)
        settling[0] = perf_counter_ns() - start

    with mock.patch.object(module, "_settle_rows", timed):
        for step in trace(config):
            settling[0] = 0
            path.update(step, check=False)
            inputs = path.prepare(step)
            call = calls.get(inputs.layout.size)
            if call is None:
                shape = jax.ShapeDtypeStruct((inputs.layout.size,), np.int32)
                call = calls[inputs.layout.size] = jax.jit(lambda buffer: buffer[0]).lower(shape).compile()
                call(inputs.buffer).block_until_ready()
            start = perf_counter_ns()
            call(inputs.buffer).block_until_ready()
            if step.measured:
                uploads.append(perf_counter_ns() - start)
                settled.append(settling[0])
            path.record(inputs, path.sampled(step))
            on_step()
            if len(uploads) == steps:
                break
    return np.array(settled) / 1e3, np.array(uploads) / 1e3


def in_blocks(steps: Iterator[TraceStep]) -> Iterator[list[TraceStep]]:
    """Blocks of steps, measured or not; each is made as a whole before it is replayed, outside of what is timed.

    The collector runs, but not over what was there before: a trace is more garbage than a server's requests.
    """
    frozen, block = False, list[TraceStep]()
    try:
        for step in steps:
            if block and (len(block) == BLOCK or block[0].measured != step.measured):
                yield block
                block = []
            if step.measured and not frozen:
                gc.collect()
                gc.freeze()
                frozen = True
            block.append(step)
        yield block
    finally:
        gc.unfreeze()
