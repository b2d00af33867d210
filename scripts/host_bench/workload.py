"""Deterministic scheduler traces: what a scheduler would send, step by step, and what a model would sample.

A trace needs no model and no engine. All choices come from one seed, so that every replay of a ``TraceConfig`` sees
the same requests, blocks, tokens, accepted drafts and preemptions. The books of the imagined scheduler are in
``host_bench.books``; here is what happens in a step of each scenario.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxrunner.protocol import SchedulerOutput
from jaxrunner.shapes import round_up_to_multiple
from scripts.host_bench.books import Books

NEVER = 1 << 30  # outputs after which a request that doesn't finish by itself would


@dataclass(frozen=True)
class TraceConfig:
    """Sizes of a trace; fractions are of ``num_reqs``.

    Attributes:
        num_reqs: requests that run at once; in ``alternate`` half of them in each step.
        prompt_min, prompt_max: prompt lengths of the first population.
        turnover: share of requests that leave (and arrive) a step in churn; twice that every other step in churn_gap.
        arrival_prompt, arrival_cached: prompt of an arrival, and how much of it churn_gap finds in the prefix cache.
        token_budget, mixed_min, mixed_max: of mixed: tokens a step, prompt lengths.
        preempted, preempted_for: share of requests preempted a step, and the steps until they are back.
        num_drafts, acceptance: of spec.
    """

    scenario: str
    num_reqs: int
    warmup_steps: int = 50
    measured_steps: int = 300
    seed: int = 0
    block_size: int = 16
    max_model_len: int = 8192
    max_num_reqs: int = 1024
    vocab_size: int = 128256
    prompt_min: int = 256
    prompt_max: int = 1024
    turnover: float = 0.05
    arrival_prompt: int = 512
    arrival_cached: int = 496
    token_budget: int = 2048
    mixed_min: int = 512
    mixed_max: int = 3072
    preempted: float = 0.02
    preempted_for: int = 3
    num_drafts: int = 4
    acceptance: float = 0.7

    @property
    def leaving(self) -> int:
        """Requests that leave a step of churn."""
        return max(1, round(self.turnover * self.num_reqs))

    @property
    def max_num_batched_tokens(self) -> int:
        """Holds every step of the trace."""
        if self.scenario == "churn":
            return max(8192, round_up_to_multiple(self.num_reqs + self.leaving * self.arrival_prompt, 1024))
        return 8192

    @property
    def num_speculative_tokens(self) -> int:
        return self.num_drafts if self.scenario == "spec" else 0


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step: the plan, the tokens sampled for each scheduled request, and whether its time counts."""

    scheduler_output: SchedulerOutput
    sampled: dict[str, list[int]]
    measured: bool


def steady(books: Books, config: TraceConfig) -> None:
    """Everyone decodes a token; a sixteenth of the requests gets a block."""
    for live in books.running:
        books.advance(live, 1)


def churn(books: Books, config: TraceConfig) -> None:
    """As many requests arrive, with their whole prompt in one step, as leave."""
    for live in books.pick(config.leaving):
        books.finish(live)
    for live in books.running:
        books.advance(live, 1)
    for _ in range(config.leaving):
        books.admit(books.make(config.arrival_prompt, NEVER), 0, config.arrival_prompt)


def churn_gap(books: Books, config: TraceConfig) -> None:
    """Odd steps lose requests, so that the batch has to be condensed; even steps gain as many."""
    if books.index % 2:
        for live in books.pick(min(2 * config.leaving, config.num_reqs - 1)):
            books.finish(live)
    for live in books.running:
        books.advance(live, 1)
    if books.index % 2 == 0:
        for _ in range(config.num_reqs - len(books.running)):
            live = books.make(config.arrival_prompt, NEVER)
            books.admit(live, config.arrival_cached, config.arrival_prompt - config.arrival_cached)


def mixed_quota(books: Books, config: TraceConfig) -> int:
    """Outputs after which a request leaves, so that arrivals which fill the budget balance departures."""
    life = config.num_reqs * (config.mixed_min + config.mixed_max) / 2 / max(1, config.token_budget - config.num_reqs)
    return max(2, round(life * books.rng.uniform(0.5, 1.5)))


def mixed(books: Books, config: TraceConfig) -> None:
    """Decodes and the next chunks of running prompts first, then waiting prompts, until the budget is used."""
    for live in [live for live in books.running if live.num_outputs >= live.quota]:
        books.finish(live)
    budget = config.token_budget
    for live in books.running:
        count = min(live.length - live.computed, budget)
        if count > 0:
            books.advance(live, count)
            budget -= count
    while budget > 0 and len(books.running) < config.num_reqs:
        length = int(books.rng.integers(config.mixed_min, config.mixed_max + 1))
        live = books.make(length, mixed_quota(books, config))
        count = min(length, budget)
        books.admit(live, 0, count)
        budget -= count


def preempt(books: Books, config: TraceConfig) -> None:
    """A few requests lose their blocks each step and come back with others some steps later."""
    for live in books.pick(max(1, round(config.preempted * config.num_reqs))):
        books.preempt(live, books.index + config.preempted_for)
    for live in books.running:
        books.advance(live, 1)
    while books.waiting and books.waiting[0][0] <= books.index:
        books.resume(books.waiting.popleft()[1])


def spec(books: Books, config: TraceConfig) -> None:
    """Everyone has drafts verified beside the token."""
    for live in books.running:
        books.advance(live, 1 + config.num_drafts, config.num_drafts)


def alternate(books: Books, config: TraceConfig) -> None:
    """Two halves of the requests take turns; whoever does not run keeps blocks and place: merely unscheduled."""
    for live in books.running[books.index % 2 :: 2]:
        books.advance(live, 1)


SCENARIOS: dict[str, Callable[[Books, TraceConfig], None]] = {
    function.__name__: function for function in (steady, churn, churn_gap, mixed, preempt, spec, alternate)
}


def trace(config: TraceConfig) -> Iterator[TraceStep]:
    """One step that admits the first population, then the warm-up and the measured steps."""
    books = Books(
        config.seed, config.block_size, config.max_num_reqs * -(-config.max_model_len // config.block_size),
        config.vocab_size, config.acceptance,
    )  # fmt: skip
    for _ in range(config.num_reqs):
        length = int(books.rng.integers(config.prompt_min, config.prompt_max + 1))
        quota = int(books.rng.integers(1, mixed_quota(books, config) + 1)) if config.scenario == "mixed" else NEVER
        books.admit(books.make(length, quota), length - 1, 1)
    yield TraceStep(*books.close(), measured=False)
    for step in range(config.warmup_steps + config.measured_steps):
        SCENARIOS[config.scenario](books, config)
        yield TraceStep(*books.close(), measured=step >= config.warmup_steps)
