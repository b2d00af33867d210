"""The minimal experiment: a short decode beside a long prompt that comes in chunks, with no model.

Budget 4, blocks of 4. A (8 prompt tokens) is computed first; then B (10 tokens) arrives, and each step has one token
of A and three of B until B's prompt is covered. The token after t is t + 1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Int32

from jaxrunner.batch import BufferRing, StepInputs, prepare_inputs, record_sampled, update_states
from jaxrunner.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheManager
from jaxrunner.protocol import ModelRunnerOutput, SchedulerOutput
from jaxrunner.request import Request
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.scheduler import Scheduler, SchedulerConfig
from jaxrunner.shapes import StepShapes
from jaxrunner.trace.encode import Geometry
from jaxrunner.trace.recorder import StepRecorder

BUDGET, BLOCK, MOST_STEPS = 4, 4, 100


class HostRunner:
    """Runs plans on the batch alone and records them. The token after t is t + 1.

    Args:
        path: the trace.
    """

    def __init__(self, path: str | Path, geometry: Geometry) -> None:
        self.batch = geometry.new_batch()
        self.shapes = StepShapes(
            geometry.max_num_batched_tokens,
            geometry.max_num_reqs,
            num_speculative_tokens=geometry.num_speculative_tokens,
            num_groups=len(geometry.block_sizes),
            min_block_size=min(geometry.block_sizes),
        )
        self.recorder = StepRecorder(path, geometry)
        self._buffers = BufferRing(max(layout.size for layout in self.shapes.layouts.values()))

    def step(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """One step; what ``ModelRunner.execute_model`` would do, with an arithmetic model."""
        self.recorder.check()
        self.settle(plan)
        if not self.batch.num_reqs:
            self.recorder.finish(self.recorder.begin(plan, None), [], {})
            return ModelRunnerOutput()
        inputs = self.prepare(plan)
        record = self.recorder.begin(plan, inputs)
        tokens = record_sampled(self.batch, self.sample(inputs)[:, None])
        self.recorder.finish(record, tokens, {})
        return ModelRunnerOutput(inputs.req_ids, {r: i for i, r in enumerate(inputs.req_ids)}, tokens)

    def settle(self, plan: SchedulerOutput) -> None:
        update_states(self.batch, plan)

    def prepare(self, plan: SchedulerOutput) -> StepInputs:
        return prepare_inputs(self.batch, plan, self.shapes, buffers=self._buffers)

    def sample(self, inputs: StepInputs) -> Int32[np.ndarray, "R"]:
        """The token of each row, -1 where it is discarded."""
        n = inputs.num_reqs
        last = inputs["token_ids"][inputs.query_start_loc[1 : n + 1] - 1]
        return np.where(inputs.discard[:n], -1, (last + 1) % self.batch.vocab_size)


def run_experiment(path: str | Path, prompts: dict[str, int] | None = None, max_tokens: int = 6) -> None:
    """Writes the experiment's trace.

    Args:
        prompts: tokens of each request's prompt; the default is A: 8, B: 10. One arrives when the one before it has
            its first token.
    """
    prompts = prompts or {"A": 8, "B": 10}
    longest = max(prompts.values()) + max_tokens
    blocks = 1 + len(prompts) * -(-longest // BLOCK)
    geometry = Geometry(
        max_num_reqs=len(prompts), max_model_len=longest, max_num_batched_tokens=max(BUDGET, len(prompts)),
        vocab_size=100 * (1 + len(prompts)), token_row_stride=0, block_sizes=(BLOCK,), widths=(0,),
        manager_block_sizes=(BLOCK,), num_blocks=blocks, num_speculative_tokens=0, eos_token_ids=(), seed=0,
    )  # fmt: skip
    runner = HostRunner(path, Geometry.of(geometry.new_batch()))
    config = SchedulerConfig(
        max_num_seqs=len(prompts), max_num_batched_tokens=geometry.max_num_batched_tokens, max_model_len=longest
    )
    scheduler = Scheduler(
        config, KVCacheManager(KVCacheConfig(blocks, (KVCacheGroup([0], FullAttentionSpec(BLOCK, 1, 1)),)), False)
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    waiting = [
        Request(name, list(range(100 * i, 100 * i + length)), params, ())
        for i, (name, length) in enumerate(prompts.items())
    ]
    last: Request | None = None
    try:
        for _ in range(MOST_STEPS):
            if waiting and (last is None or last.num_output_tokens):
                last = waiting.pop(0)
                scheduler.add_request(last)
            if not waiting and not scheduler.has_requests():
                return
            plan = scheduler.schedule()
            scheduler.update_from_output(plan, runner.step(plan))
        raise ValueError(f"the experiment did not end within {MOST_STEPS} steps: ask for shorter prompts")
    finally:
        runner.recorder.close()
