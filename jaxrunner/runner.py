"""ModelRunner: the one place where host and device meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
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
from jaxrunner.block_edits import block_edits
from jaxrunner.compilation_cache import use_compilation_cache
from jaxrunner.compilation_counter import CompilationCounter
from jaxrunner.compiled import Compiled
from jaxrunner.config import RunnerConfig
from jaxrunner.executables import ENTER_CAPACITY, TABLE_CAPACITY, StepExecutables
from jaxrunner.grammar_masks import check_grammar_bitmask, grammar_uploads
from jaxrunner.invariants import check_invariants
from jaxrunner.kv_cache.allocate import KVCachePlan, abstract_caches, allocate_caches, plan_caches
from jaxrunner.logits_processors import CustomStates, LogitsProcessor, init_custom
from jaxrunner.logprobs import ALL, check_logprobs, unpack_logprobs
from jaxrunner.pending import DeviceOutputs, Pending, SegmentTimes
from jaxrunner.pooling import Pooling
from jaxrunner.prompt_logprobs import PromptLogprobs
from jaxrunner.protocol import ModelRunnerOutput, SchedulerOutput
from jaxrunner.refusals import refuse_unserved
from jaxrunner.request_tables import TableSizes
from jaxrunner.sampling_columns import LOGPROBS, RECORD_WORDS
from jaxrunner.shape_record import ShapeRecorder
from jaxrunner.shapes import StepShapes, Support, supported_policy
from jaxrunner.step import CacheGroup, DeviceState, StepFunctions, init_state
from jaxrunner.trace.encode import Geometry
from jaxrunner.trace.recorder import Recorder, StepRecorder
from jaxrunner.update_weights import replaced_params
from models import Decoder, split
from pallas_kernels import GroupSpec, KVCache, choose_attention

segment = jax.profiler.TraceAnnotation  # names a stretch of a profile; about a microsecond when none is taken
_PADDING_INDEX = np.iinfo(np.int32).max  # past every table: a scatter drops it


OnCompiled = Callable[[Compiled, int], None]
"""Called with each executable as it is ready, and the number of programs that the warm-up makes in all."""


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
        times: where the time went.
        recorder: writes the trace, if ``config.trace`` asks for one; its ``close`` ends the file.
        counter: hears of JAX's compilations; its hits and misses are those of the persistent cache.
        compilations: what JAX compiled while a step ran, after warm-up: 0, or something is wrong. (Mode NONE and a
            lazy warm-up compile when they meet a shape, and that is counted.)
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
        if config.max_model_len > model.config.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {config.max_model_len}, the model was made for"
                f" {model.config.max_position_embeddings} tokens: lower it"
            )
        self.counter = CompilationCounter()
        self.compilations = 0
        self.background: BackgroundCompilation | None = None
        self._shape_recorder = ShapeRecorder(config.record_shapes) if config.record_shapes is not None else None
        graphdef, self.params = split(model)
        self._cache_dtype = dtype = model.dtype
        layers = model.config.attention_layers()
        platform = jax.default_backend()
        implementation, refusals = choose_attention(
            layers, config.block_size, dtype, platform, requested=config.attention
        )
        self.attention_choice = [*(f"passed over {r}" for r in refusals), f"took {implementation.name}"]
        shapes = config.shapes()
        policy = supported_policy(shapes.policy, Support[implementation.support.name], shapes.query_len)
        self.shapes: StepShapes = replace(shapes, policy=policy)
        group = CacheGroup(GroupSpec(config.block_size, layers), implementation)
        vocab_size = model.config.vocab_size
        num_logprobs = vocab_size if config.max_logprobs == ALL else min(config.max_logprobs, vocab_size)
        self._processors = tuple(logits_processors)
        self.functions = StepFunctions(
            graphdef, (group,), config.max_num_reqs, self.shapes.max_logits, num_logprobs, self._processors
        )
        self._eos_token_ids = model.config.eos_token_ids if eos_token_ids is None else eos_token_ids
        widths = MultiGroupBlockTable(1, config.max_model_len, (config.block_size,)).widths
        self._table_sizes = TableSizes(config.max_num_reqs, config.max_model_len, model.config.vocab_size)
        self._table_widths = widths
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
        self._buffers = self._new_buffers()
        self._pending: Pending | None = None
        self._prompt_logprobs, self._pooling = PromptLogprobs(self.executables.prompt_chunk), Pooling()
        self.recorder: Recorder | None = self._new_recorder()
        self.times = SegmentTimes()
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

    def _new_recorder(self) -> StepRecorder | None:
        if self.config.trace is None:
            return None
        about = {
            "config": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(self.config).items()},
            "model": {
                "architecture": self.model_config.architecture,
                "num_layers": self.model_config.num_layers,
                "dtype": str(self._cache_dtype),
            },
            "device": jax.devices()[0].device_kind,
            "attention": self.attention_choice,
        }
        return StepRecorder(self.config.trace, Geometry.of(self.batch), about)

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
        config, shapes, wanted = self.config, self.shapes, self.config.warmup
        tokens = shapes.tokens if wanted == "all" else () if wanted == "lazy" else tuple(wanted)
        if config.background_compilation:
            tokens = tuple(sorted({*tokens, shapes.tokens[-1]}))
        if not tokens:
            return
        total = len(self.executables.jobs(tokens))
        for compiled in self.executables.compile_all(tokens, config.compile_workers):
            if on_compiled is not None:
                on_compiled(compiled, total)
        self.executables.warm = True
        if config.background_compilation:
            self.background = BackgroundCompilation(self.executables, shapes, tokens, self.counter)

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
        refuse_unserved(scheduler_output, self._custom.extra_args)
        for data in scheduler_output.scheduled_new_reqs:
            if data.sampling_params is not None:
                check_logprobs(data.sampling_params, self.config.max_logprobs, self.model_config.vocab_size)
        self._prompt_logprobs.check(scheduler_output)
        check_grammar_bitmask(self.batch, scheduler_output)
        self._pooling.check(scheduler_output, self.model_config.hidden_size)
        edits = block_edits(scheduler_output, len(self.functions.groups), self.num_blocks)
        clock = time.perf_counter
        start = clock()
        with segment("update"):
            update_states(self.batch, scheduler_output, check=self.config.validate)
            self._prompt_logprobs.note(scheduler_output)
            self._pooling.note(scheduler_output)
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
        if self._shape_recorder is not None:
            self._shape_recorder.write(inputs)
        if self.config.check_invariants:
            check_invariants(self.batch, scheduler_output, inputs)
        prepared = clock()
        record = None if recorder is None else recorder.begin(scheduler_output, inputs)
        dispatching, compilations = clock(), self.counter.compilations
        with segment("dispatch"):
            outputs = self._dispatch(scheduler_output, inputs, return_logits)
        dispatched = clock()
        if self.executables.warm:
            self.compilations += self.counter.compilations - compilations
        self._pending = Pending(self, inputs, outputs, record)
        times = self.times
        times.update += updated - start
        times.prepare += prepared - updated
        times.dispatch += dispatched - dispatching
        if record is not None:
            record.segments = {
                "update": updated - start,
                "prepare": prepared - updated,
                "dispatch": dispatched - dispatching,
            }
        return self._pending

    def _dispatch(self, so: SchedulerOutput, inputs: StepInputs, return_logits: bool) -> DeviceOutputs:
        run, shape = self.executables, inputs.shape
        forward = run.forward(shape)
        head = run.head(shape.num_logits, return_logits=return_logits)
        self._upload_ahead(inputs)
        for indices, masks in grammar_uploads(self.batch, so, run.mask_capacity, _PADDING_INDEX):
            self.state = run.set_allowed()(self.state, indices, masks)
        hidden, head_inputs, self.kv_caches, self.state, all_hidden = forward(
            self.params, self.kv_caches, self.state, inputs.buffer
        )
        self._buffers.read_by(hidden)  # should the head fail: the buffer is being read all the same
        sampled, self.state, *logits, logprobs = head(self.params, self.state, hidden, head_inputs)
        self._buffers.read_by(sampled)
        outputs = DeviceOutputs(sampled, logits[0] if logits else None)
        if self.batch.flags & LOGPROBS:
            outputs.logprobs = logprobs
        for chunk in self._prompt_logprobs.rows_of(self.batch, inputs):
            rows = run.hidden_rows(shape.num_tokens)(all_hidden, chunk.rows)
            outputs.prompt_logprobs.append((chunk, run.prompt_logprobs()(self.params, rows, chunk.targets)))
        pooled = self._pooling.rows_of(self.batch, inputs)
        if pooled is not None:
            outputs.pooled = pooled, run.pool(shape.num_tokens)(all_hidden, pooled.starts)
        return outputs

    def _upload_ahead(self, inputs: StepInputs) -> None:
        """What does not fit into the step's own upload: new requests' records, large block tables."""
        entered = inputs.entered
        for at in range(0, len(entered), ENTER_CAPACITY):
            part = entered[at : at + ENTER_CAPACITY]
            indices = np.full(ENTER_CAPACITY, _PADDING_INDEX, np.int32)
            records = np.zeros((ENTER_CAPACITY, RECORD_WORDS), np.int32)
            indices[: len(part)] = part
            records[: len(part)] = self.batch.columns["sampling_record"][part]
            self.state = self.executables.enter()(self.state, indices, records)
        for index in entered:
            tables = self.batch.tables_of(index)
            if tables is not None:
                self.state = self.executables.enter_tables()(self.state, np.int32(index), tables)
        for k, index, row in self._custom.uploads(self.batch, entered):
            self.state = self.executables.enter_custom(k)(self.state, np.int32(index), row)
        inputs["flags"][0] |= self._custom.flags(self.batch)
        for updates in inputs.overflow:
            for at in range(0, len(updates.cells), TABLE_CAPACITY):
                part_cells = updates.cells[at : at + TABLE_CAPACITY]
                cells = np.full(TABLE_CAPACITY, _PADDING_INDEX, np.int32)
                values = np.zeros(TABLE_CAPACITY, np.int32)
                cells[: len(part_cells)] = part_cells
                values[: len(part_cells)] = updates.values[at : at + TABLE_CAPACITY]
                self.state = self.executables.update_table(updates.group)(self.state, cells, values)

    def _finish(self, pending: Pending) -> ModelRunnerOutput:
        inputs, outputs, clock = pending._inputs, pending._outputs, time.perf_counter
        assert inputs is not None and outputs is not None
        start = clock()
        with segment("wait"):
            sampled = np.asarray(outputs.sampled)[: inputs.num_reqs]
        arrived = clock()
        with segment("record"):
            recorded_tokens = record_tokens(self.batch, sampled[:, None])
            tokens = recorded_tokens.lists()
        recorded = clock()
        self._pending = None
        times = self.times
        times.steps += 1
        times.tokens += inputs.num_tokens
        times.padded_tokens += inputs.shape.num_tokens
        times.wait += arrived - start
        times.record += recorded - arrived
        if self.recorder is not None and (record := pending._record) is not None:
            segments = {"wait": arrived - start, "record": recorded - arrived}
            self.recorder.finish(record, tokens, {**record.segments, **segments})
        result = ModelRunnerOutput(
            req_ids=inputs.req_ids.copy(),
            req_id_to_index=inputs.names.req_id_to_index.copy(),
            sampled_token_ids=tokens,
            flat_token_ids=recorded_tokens.token_ids,
            token_offsets=recorded_tokens.offsets,
        )
        if outputs.logprobs is not None:
            result.logprobs = unpack_logprobs(np.asarray(outputs.logprobs)[: inputs.num_reqs], sampled)
        if outputs.logits is not None:
            result.logits = np.asarray(outputs.logits)[: inputs.num_logits]
        if outputs.prompt_logprobs:
            answers = [(chunk, np.asarray(words)) for chunk, words in outputs.prompt_logprobs]
            result.prompt_logprobs_dict = self._prompt_logprobs.take(self.batch, answers)
        if outputs.pooled is not None:
            pooled, values = outputs.pooled
            result.pooler_output = self._pooling.take(self.batch, pooled, np.asarray(values))
        return result
