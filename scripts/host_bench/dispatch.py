"""What a step costs its calling thread, by segment, and what the calls of its executables cost for themselves."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.config import RunnerConfig
from jaxrunner.kv_cache.manager import KVCacheManager
from jaxrunner.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from jaxrunner.request import Request
from jaxrunner.runner import ModelRunner
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.scheduler import Scheduler, SchedulerConfig
from jaxrunner.sweep.costs import prompts_upload
from models import Decoder

SEGMENTS = ("update", "prepare", "dispatch")
BLOCK = 16
HOT = 100  # calls in a row of a program that does nothing


class Decoding:
    """A runner in one execution mode with ``num_reqs`` requests that decode, compiled without a cache.

    Attributes:
        compile_cpu_s: CPU seconds that its programs took, of all threads.
        segments: CPU microseconds of the calling thread, a list per segment.
        step_ms: wall milliseconds of each step.
    """

    def __init__(self, model: Decoder, mode: str, num_reqs: int, steps: int) -> None:
        length = 8 + steps
        config = RunnerConfig(
            max_model_len=length,
            max_num_reqs=num_reqs,
            max_num_batched_tokens=num_reqs,
            token_buckets=(num_reqs,),
            logits_buckets=(num_reqs,),
            request_buckets=(num_reqs,),
            execution_mode=mode,
            block_size=BLOCK,
            cpu_cache_bytes=256 << 20,
            compilation_cache=False,
        )
        self.mode = mode
        self.runner = ModelRunner(model, config)
        self.runner.clock = time.thread_time
        layer = model.config.attention_layers()[0]
        group = KVCacheGroup([0], FullAttentionSpec(BLOCK, layer.num_kv_heads, layer.head_dim))
        manager = KVCacheManager(KVCacheConfig(self.runner.num_blocks, [group]), False)
        self._scheduler = Scheduler(SchedulerConfig(num_reqs, num_reqs, length), manager)
        params = SamplingParams(max_tokens=length - 1, temperature=0.0, ignore_eos=True, detokenize=False)
        for number in range(num_reqs):
            self._scheduler.add_request(Request(str(number), [1 + number % 8], params))
        self.segments: dict[str, list[float]] = {name: [] for name in SEGMENTS}
        self.step_ms: list[float] = []
        start = time.process_time()
        self._step()  # the prompts, of one token each; compiles
        self.compile_cpu_s = time.process_time() - start
        self._step()

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        self._scheduler.update_from_output(plan, self.runner.execute_model(plan))

    def step(self) -> None:
        """One decode of all requests, timed."""
        before, start = self.runner.times.seconds(), time.perf_counter()
        self._step()
        self.step_ms.append((time.perf_counter() - start) * 1e3)
        after = self.runner.times.seconds()
        for name in SEGMENTS:
            self.segments[name].append((after[name] - before[name]) * 1e6)

    @property
    def calls(self) -> int:
        """Executables that a step calls, the head's included."""
        layers = len(self.runner.kv_caches)
        return 2 * layers + 3 if self.mode == "PIECEWISE" else 2

    @property
    def executables(self) -> list[str]:
        """Those of the forward."""
        kinds = ("forward", "begin", "metadata", "attend", "between", "end")
        return [name for name in self.runner.executables.compiled if name.startswith(kinds)]


class Nothing:
    """A program that does nothing, called with as many arrays as an executable, in the same structure.

    As many are donated, and as many come back; but for what the host uploads all are of one element. A call costs what
    passing arrays costs.

    Args:
        upload: the argument that lies on the host.
    """

    def __init__(self, executable: Any, upload: int | None = None) -> None:
        infos = executable.args_info[0]
        self.arguments: list[Any] = [jax.tree.map(lambda info: jnp.zeros(1, info.dtype), info) for info in infos]
        if upload is not None:
            self.arguments[upload] = np.zeros(infos[upload].shape, infos[upload].dtype)
        leaves = [jax.tree.leaves(info) for info in infos]
        self._donated = tuple(i for i, each in enumerate(leaves) if each and each[0].donated)
        self.arrays_in = sum(map(len, leaves))
        self.arrays_donated = sum(len(leaves[i]) for i in self._donated)
        self.arrays_out = len(jax.tree.leaves(executable.out_info))
        new = self.arrays_out - self.arrays_donated

        def nothing(*arguments: Any) -> Any:
            kept = [arguments[i] for i in self._donated]
            first = jax.tree.leaves(arguments)[0].reshape(-1)[:1]
            return kept, [first + i for i in range(new)]

        jitted = jax.jit(nothing, donate_argnums=self._donated, keep_unused=True)
        self._call = jitted.lower(*self.arguments).compile()

    def __call__(self) -> float:
        """CPU microseconds of the calling thread."""
        start = time.thread_time()
        kept, made = self._call(*self.arguments)
        took = time.thread_time() - start
        for place, value in zip(self._donated, kept, strict=True):
            self.arguments[place] = value
        jax.block_until_ready((kept, made))
        return took * 1e6

    def hot(self) -> list[float]:
        return [self() for _ in range(HOT)]


def calls_of(decoding: Decoding, steps: int, on_step: Callable[[], None] = lambda: None) -> dict[str, dict[str, Any]]:
    """Of the forward (mode FULL) and the head: CPU microseconds of their calls, and of calls that do nothing.

    "call": with the executable at work; "nothing": with none, right behind a step, when the processor's caches hold
    what the step left there; "nothing, hot": one such call after the other.
    """
    runner = decoding.runner
    runner.reset()
    size = runner.shapes.tokens[-1]
    shape = runner.shapes.full(size)
    forward, head = runner.executables.forward(shape), runner.executables.head(shape.num_logits)
    compiled = runner.executables.compiled
    nothing = {
        "forward": Nothing(compiled[f"forward[{size}]"].executable, upload=3),
        "head": Nothing(compiled[f"head[{shape.num_logits}]"].executable),
    }
    buffer = prompts_upload(runner.shapes.layout(shape))
    clock = time.thread_time
    took: dict[str, dict[str, list[float]]] = {
        name: {"call": [], "nothing": [], "nothing, hot": []} for name in nothing
    }

    def step() -> None:
        params, start = runner.params, clock()
        hidden, head_inputs, runner.kv_caches, runner.state, _ = forward(params, runner.kv_caches, runner.state, buffer)
        called = clock()
        sampled, runner.state, *_ = head(params, runner.state, hidden, head_inputs)
        both = clock()
        jax.block_until_ready((sampled, runner.kv_caches))
        took["forward"]["call"].append((called - start) * 1e6)
        took["head"]["call"].append((both - called) * 1e6)

    with collector_off():
        for each in nothing.values():
            each()
        for _ in range(steps):
            for name, each in nothing.items():
                step()
                took[name]["nothing"].append(each())
            on_step()
        for name, each in nothing.items():
            took[name]["nothing, hot"] = each.hot()
    counts = {
        name: {"in": each.arrays_in, "donated": each.arrays_donated, "out": each.arrays_out}
        for name, each in nothing.items()
    }
    return {name: {"arrays": counts[name], **took[name]} for name in nothing}


@contextmanager
def collector_off() -> Iterator[None]:
    """A collection in the middle of a call would count as the call's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
