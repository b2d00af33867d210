"""Plans written by hand for a small runner, and what compiles while they run."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxrunner.config import RunnerConfig
from jaxrunner.protocol import CachedRequestData, NewRequestData, SchedulerOutput

CONFIG = RunnerConfig(
    max_model_len=64,
    max_num_reqs=4,
    max_num_batched_tokens=32,
    token_buckets=(4, 32),
    logits_buckets=(4,),
    block_size=4,
    num_blocks=65,
    warmup="all",
    check_invariants=True,
    compilation_cache=False,
)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of JAX's compile events while the block runs."""
    events: list[str] = []

    def listen(name: str, *_, **__) -> None:
        if "compile" in name and "backend" in name:
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def new(req_id: str, tokens: list[int], first_block: int, count: int | None = None, computed: int = 0, **more):
    blocks = list(range(first_block, first_block + 12))
    data = NewRequestData(req_id, tokens, (blocks,), computed, **more)
    count = len(tokens) - computed if count is None else count
    return SchedulerOutput([data], num_scheduled_tokens={req_id: count}, total_num_scheduled_tokens=count)


def cached(counts: dict[str, int], computed: dict[str, int], outputs: dict[str, int], **more) -> SchedulerOutput:
    ids = list(counts)
    columns = CachedRequestData(ids, set(), [None] * len(ids), [computed[r] for r in ids], [outputs[r] for r in ids])
    return SchedulerOutput([], columns, counts, sum(counts.values()), **more)
