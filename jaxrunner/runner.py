"""ModelRunner: the one place where host and device meet."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxrunner.background import BackgroundCompilation
from jaxrunner.batch import (
    BufferRing,
    InputBatch,
    MultiGroupBlockTable,
    StepInputs,
    prepare_inputs,
    record_tokens,
    update_states,
)
from jaxrunner.block_edits import BlockEdit, block_edits
from jaxrunner.compilation_cache import use_compilation_cache
from jaxrunner.compilation_counter import CompilationCounter
from jaxrunner.config import RunnerConfig
from jaxrunner.executables import StepExecutables
from jaxrunner.grammar_masks import GrammarMasks
from jaxrunner.invariants import check_invariants
from jaxrunner.kv_cache.allocate import KVCachePlan, abstract_caches, allocate_caches, plan_caches
from jaxrunner.logits_processors import CustomEntry, CustomStates, LogitsProcessor, init_custom
from jaxrunner.logprobs_lists import check_logprobs
from jaxrunner.model_step import model_step
from jaxrunner.pending import DeviceOutputs, Pending, SegmentTimes
from jaxrunner.pooling import Pooling
from jaxrunner.prompt_logprobs import PromptLogprobs
from jaxrunner.protocol import ModelRunnerOutput, SchedulerOutput
from jaxrunner.refusals import refuse_unserved
from jaxrunner.request_tables import TableSizes
from jaxrunner.sampling_columns import LOGPROB_IDS, LOGPROBS
from jaxrunner.shape_record import ShapeRecorder
from jaxrunner.step import DeviceState, init_state
from jaxrunner.step_output import runner_output
from jaxrunner.trace.of_run import recorder_of_run
from jaxrunner.update_weights import replaced_params
from jaxrunner.uploads import uploads_ahead
from jaxrunner.warm_up import OnCompiled, warm_up
from models import Decoder
from pallas_kernels import KVCache

segment = jax.profiler.TraceAnnotation  # names a stretch of a profile; about a microsecond when none is taken


class ModelRunner:
    """Executes a scheduler's steps on a model.

    Args:
        model: a decoder of ``models`` with its parameters.
        eos_token_ids: what min_tokens holds back; None: those of the model's configuration.
        logits_processors: compiled into the head, in their order.
        on_compiled: for a progress bar; see ``OnCompiled``.

    Attributes:
        batch: the persistent batch (host).
        kv_caches, state: on the device; donated to every step.
        attention_choice: why which attention implementation was taken, a line each.
        times: where the time went, by ``clock``.
        recorder: writes the trace, if ``config.trace`` asks for one; its ``close`` ends the file.
        counter: hears of JAX's compilations; its hits and misses are those of the persistent cache.
        compilations: what JAX compiled while a step ran, after warm-up, from merging its plan to reading its results:
            0, or something is wrong. (Mode NONE compiles when it meets a shape, and that is counted.)
        background: compiles what the warm-up left out, where ``config.background_compilation`` asks for it.
    """

    def __init__(
        self,
        model: Decoder,
        config: RunnerConfig | None = None,
        *,
        eos_token_ids: tuple[int, ...] | None = None,
        on_compiled: OnCompiled | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.config = config = config or RunnerConfig()
        use_compilation_cache(config.compilation_cache)
        self.model_config = model.config
        self.counter = CompilationCounter()
        self.compilations = 0
        self.background: BackgroundCompilation | None = None
        self._shape_recorder = ShapeRecorder(config.record_shapes) if config.record_shapes is not None else None
        self._processors = tuple(logits_processors)
        made = model_step(model, config, self._processors)
        self.functions, self.params, self.shapes = made.functions, made.params, made.shapes
        self.attention_choice = made.attention_choice
        self._cache_dtype = dtype = model.dtype
        layers = model.config.attention_layers()
        self._eos_token_ids = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        self._table_widths = MultiGroupBlockTable(1, config.max_model_len, (config.block_size,)).widths
        self._table_sizes = TableSizes(config.max_num_reqs, config.max_model_len, model.config.vocab_size)
        self.state: DeviceState = self._new_state()
        self.cache_plan: KVCachePlan = plan_caches(
            config,
            layers,
            dtype,
            lambda: self._executables(abstract_caches(layers, 2, config.block_size, dtype)).temporaries(),
        )
        self.batch = self._new_batch()
        self.kv_caches = allocate_caches(layers, self.cache_plan.num_blocks, config.block_size, dtype)
        self.executables = self._executables(self.kv_caches)
        if config.executables is not None:
            self.executables.load(config.executables)
        self._buffers = self._new_buffers()
        self._pending: Pending | None = None
        self._prompt_logprobs, self._pooling = PromptLogprobs(self.executables.prompt_chunk), Pooling()
        self._grammar_masks = GrammarMasks()
        self.recorder = recorder_of_run(config, self.batch, model.config, dtype, self.attention_choice)
        self.times = SegmentTimes()
        self.clock = time.perf_counter
        self.warm_up(on_compiled)

    def _new_batch(self) -> InputBatch:
        config = self.config
        return InputBatch(
            max_num_reqs=config.max_num_reqs,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=self.model_config.vocab_size,
            block_sizes=(config.block_size,),
            num_blocks=self.cache_plan.num_blocks,
            eos_token_ids=self._eos_token_ids,
            seed=config.seed,
        )

    def _new_state(self) -> DeviceState:
        state = init_state(self.config.max_num_reqs, self._table_widths, self._table_sizes)
        self._custom = CustomStates(self._processors, self.config.max_num_reqs)
        return replace(state, custom=init_custom(self._processors, self.config.max_num_reqs))

    def _new_buffers(self) -> BufferRing:
        largest = max(layout.size for layout in self.shapes.layouts.values())
        return BufferRing(largest, depth=2)  # one step in flight, one being written

    def reset(self) -> None:
        """Forgets every request and what a failed step may have left half done; executables and times stay.

        Keys and values are gone too, so whoever keeps a prefix cache must forget it as well.
        """
        try:
            jax.block_until_ready((self.kv_caches, self.state))
        except RuntimeError:  # the failed step consumed them, or its own failure shows up here
            pass
        self._pending = None
        if self.recorder is not None:
            self.recorder.reset()
        self.batch, self._buffers = self._new_batch(), self._new_buffers()
        self._prompt_logprobs, self._pooling = PromptLogprobs(self.executables.prompt_chunk), Pooling()
        self._grammar_masks = GrammarMasks()
        self.state = self._new_state()
        self.kv_caches = ()  # makes room for the new ones
        config = self.config
        layers, dtype = self.model_config.attention_layers(), self._cache_dtype
        self.kv_caches = allocate_caches(layers, self.cache_plan.num_blocks, config.block_size, dtype)

    def _executables(self, kv_caches: tuple[KVCache, ...]) -> StepExecutables:
        return StepExecutables(self.functions, self.shapes, self.params, kv_caches, self.state, self.counter)

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache, the null block among them."""
        return self.cache_plan.num_blocks

    def update_params(self, weights: Decoder | Mapping[str, Any]) -> None:
        """Replaces parameters between two steps; nothing recompiles.

        What the caches hold stays, computed with the old ones: whoever keeps a prefix cache must forget it.

        Args:
            weights: see ``jaxrunner.update_weights.replaced_params``.

        Raises:
            ValueError: they don't fit the model; every misfit is named, and the old ones stay.
        """
        if self._pending is not None:
            raise RuntimeError("a step is pending: call its result() before the weights are replaced")
        self.params = replaced_params(self.functions.graphdef, self.params, self.model_config, weights)

    def warm_up(self, on_compiled: OnCompiled | None = None) -> None:
        """Compiles what ``config.warmup`` asks for. After "all", a step never compiles.

        With ``config.background_compilation`` the token budget's bucket is compiled in any case, and what is left out
        follows beside the work.
        """
        self.background = warm_up(self.executables, self.config, self.shapes, self.counter, on_compiled)

    def execute_model(self, scheduler_output: SchedulerOutput, *, return_logits: bool = False) -> ModelRunnerOutput:
        """One step: ``submit`` and its ``result``.

        Raises:
            ValueError: a field that is not served yet, a SchedulerOutput that contradicts the batch
                (``SchedulerOutputError``). The batch is then what it was.
        """
        return self.submit(scheduler_output, return_logits=return_logits).result()

    def submit(self, scheduler_output: SchedulerOutput, *, return_logits: bool = False) -> Pending:
        """Hands a step to the device without waiting for it.

        Args:
            return_logits: keep the step's logits, in the output's ``logits`` (float32 [rows, V]). They come from a
                head of their own, which no warm-up compiles: the first step that asks does.
        """
        if self._pending is not None:
            raise RuntimeError("the previous step is pending: call its result() before the next submit")
        if self.recorder is not None:
            self.recorder.check()
        with self._stepping(scheduler_output):
            return self._submit(scheduler_output, self._checked_edits(scheduler_output), return_logits)

    @contextmanager
    def _stepping(self, scheduler_output: SchedulerOutput | None = None) -> Iterator[None]:
        """What JAX compiles in the block counts as compiled in a step; what the block raises is in the trace."""
        before = self.counter.compilations
        try:
            yield
        except BaseException as error:
            if self.recorder is not None:
                self.recorder.fail(error, scheduler_output)
            raise
        finally:
            if self.executables.warm:
                self.compilations += self.counter.compilations - before

    def _checked_edits(self, so: SchedulerOutput) -> list[BlockEdit]:
        """Refuses what can't be served, before anything changes; returns the edits of blocks that the plan asks for."""
        refuse_unserved(so, self._custom.extra_args)
        for data in so.scheduled_new_reqs:
            if data.sampling_params is not None:
                check_logprobs(data.sampling_params, self.config.max_logprobs, self.model_config.vocab_size)
        self._prompt_logprobs.check(so)
        self._grammar_masks.check(self.batch, so)
        self._pooling.check(so, self.model_config.hidden_size)
        return block_edits(so, len(self.functions.groups), self.num_blocks)

    def _submit(self, scheduler_output: SchedulerOutput, edits: list[BlockEdit], return_logits: bool) -> Pending:
        clock = self.clock
        start = clock()
        with segment("update"):
            update_states(self.batch, scheduler_output, check=self.config.validate)
            self._prompt_logprobs.note(scheduler_output)
            self._pooling.note(scheduler_output)
            self._grammar_masks.note(scheduler_output)
        updated = clock()
        for edit in edits:
            run = self.executables.edit_blocks(edit.group)
            self.kv_caches = run(self.kv_caches, edit.sources, edit.targets, edit.clear)
        recorder = self.recorder
        if not self.batch.num_reqs:
            if recorder is not None:
                recorder.finish(recorder.begin(scheduler_output, None), [], {"update": updated - start})
            return Pending(self, None, None, _result=ModelRunnerOutput())
        shapes = self.shapes if self.background is None else self.background.ready
        with segment("prepare"):
            inputs = prepare_inputs(self.batch, scheduler_output, shapes, buffers=self._buffers)
            custom = self._custom.enter(self.batch, inputs)
        packed = clock()
        record = None if recorder is None else recorder.begin(scheduler_output, inputs)
        recording = clock()
        if self._shape_recorder is not None:
            self._shape_recorder.write(inputs)
        if self.config.check_invariants:
            check_invariants(self.batch, scheduler_output, inputs)
        prepared = clock()
        with segment("dispatch"):
            outputs = self._dispatch(scheduler_output, inputs, custom, return_logits)
        dispatched = clock()
        self._pending = Pending(self, inputs, outputs, record)
        prepare = packed - updated + prepared - recording
        segments = {"update": updated - start, "prepare": prepare, "dispatch": dispatched - prepared}
        self.times.add(segments)
        if record is not None:
            record.segments = segments
        return self._pending

    def _dispatch(
        self, so: SchedulerOutput, inputs: StepInputs, custom: list[CustomEntry], return_logits: bool
    ) -> DeviceOutputs:
        run, shape = self.executables, inputs.shape
        forward = run.forward(shape)
        head = run.head(shape.num_logits, return_logits=return_logits)
        for upload, arguments in uploads_ahead(run, self.batch, so, inputs, custom):
            self.state = upload(self.state, *arguments)
        hidden, head_inputs, self.kv_caches, self.state, all_hidden = forward(
            self.params, self.kv_caches, self.state, inputs.buffer
        )
        self._buffers.read_by(hidden)  # should the head fail: the buffer is being read all the same
        sampled, self.state, *logits, logprobs = head(self.params, self.state, hidden, head_inputs)
        self._buffers.read_by(sampled)
        outputs = DeviceOutputs(sampled, logits[0] if logits else None)
        if self.batch.flags & LOGPROBS:
            outputs.logprobs = logprobs[0]
        if self.batch.flags & LOGPROB_IDS:
            outputs.given_logprobs = logprobs[1]
        for chunk in self._prompt_logprobs.rows_of(self.batch, inputs):
            rows = run.hidden_rows(shape.num_tokens)(all_hidden, chunk.rows)
            outputs.prompt_logprobs.append((chunk, run.prompt_logprobs()(self.params, rows, chunk.targets)))
        pooled = self._pooling.rows_of(self.batch, inputs)
        if pooled is not None:
            outputs.pooled = pooled, run.pool(shape.num_tokens)(all_hidden, pooled.starts)
        return outputs

    def _finish(self, pending: Pending) -> ModelRunnerOutput:
        with self._stepping():
            return self._read(pending)

    def _read(self, pending: Pending) -> ModelRunnerOutput:
        inputs, outputs, clock = pending._inputs, pending._outputs, self.clock
        assert inputs is not None and outputs is not None
        start = clock()
        with segment("wait"):
            sampled = np.asarray(outputs.sampled)[: inputs.num_reqs]
        arrived = clock()
        with segment("record"):
            committed = record_tokens(self.batch, sampled[:, None])
            tokens = committed.lists()
        recorded = clock()
        self._pending = None
        self.times.steps += 1
        self.times.tokens += inputs.num_tokens
        self.times.padded_tokens += inputs.shape.num_tokens
        segments = {"wait": arrived - start, "record": recorded - arrived}
        self.times.add(segments)
        if self.recorder is not None and (record := pending._record) is not None:
            self.recorder.finish(record, tokens, {**record.segments, **segments})
        return runner_output(
            self.batch, inputs, outputs, sampled, committed, tokens, self._prompt_logprobs, self._pooling
        )
