"""Whatever a scheduler does, the batch, every column, table and array of a step are what the naive model says.

A failure is shrunk to the shortest scenario: the calls of ``books.Driver`` that lead to it, with each plan in a line.
``--long-schedules`` runs a hundred times as many of them.
"""

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.jaxrunner.batch.books import PARAMS, Driver
from tests.jaxrunner.batch.naive import Limits

LIMITS = {
    "one group": Limits(),
    "blocks that kernels halve": Limits(block_sizes=(8,), kernel_block_sizes=(4,), num_speculative_tokens=3),
    "two groups": Limits(block_sizes=(4, 8), kernel_block_sizes=(2, 8)),
}

which = st.integers(0, 5)
row = st.integers(0, 4)
# How many steps run after a change: none lets the next change fall into the same step.
then = st.sampled_from((1, 0, 2, 4))


class Schedules(RuleBasedStateMachine):
    @initialize(limits=st.sampled_from(sorted(LIMITS)))
    def start(self, limits: str) -> None:
        self.driver = Driver(LIMITS[limits], note)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @rule(
        prompt=st.integers(1, 12),
        params=st.integers(0, len(PARAMS) - 1),
        hit=st.integers(0, 2),
        chunk=st.sampled_from((99, 1, 2, 5)),
        then=then,
    )
    def submit(self, prompt: int, params: int, hit: int, chunk: int, then: int) -> None:
        self.driver.submit(prompt, params, hit, chunk)
        self.run(then)

    @rule(prompt=st.integers(1, 6), like=which, copies=st.integers(1, 3), then=then)
    def submit_with_a_shared_prefix(self, prompt: int, like: int, copies: int, then: int) -> None:
        for i in range(copies):
            self.driver.submit(prompt, params=i, like=like)
        self.run(then)

    @rule(which=which, then=then)
    def finish(self, which: int, then: int) -> None:
        self.driver.finish(which)
        self.run(then)

    @rule(which=which, prompt=st.integers(1, 9), restart=st.booleans(), then=then)
    def resubmit(self, which: int, prompt: int, restart: bool, then: int) -> None:
        self.driver.resubmit(which, prompt, restart)
        self.run(then)

    @rule(which=which, resume=st.booleans(), then=then)
    def preempt(self, which: int, resume: bool, then: int) -> None:
        self.driver.preempt(which, resume)
        self.run(then)

    @rule(which=which, tokens=st.booleans(), then=then)
    def resume(self, which: int, tokens: bool, then: int) -> None:
        self.driver.resume(which, tokens)
        self.run(then)

    @rule(which=which, steps=st.integers(1, 3))
    def skip(self, which: int, steps: int) -> None:
        for _ in range(steps):
            self.driver.wish(which, skip=True)
            self.driver.step()

    @rule(which=which, count=st.integers(1, 4), then=then)
    def cut_into_chunks(self, which: int, count: int, then: int) -> None:
        self.driver.wish(which, chunk=count)
        self.run(then)

    @rule(which=which, drafts=st.lists(st.integers(0, 49), min_size=1, max_size=3), accept=st.integers(1, 4), then=then)
    def draft(self, which: int, drafts: list[int], accept: int, then: int) -> None:
        self.driver.wish(which, drafts=drafts, accept=accept)
        self.run(then)

    @rule(which=which, blocks=st.integers(1, 3), then=then)
    def blocks_ahead(self, which: int, blocks: int, then: int) -> None:
        self.driver.wish(which, ahead=blocks)
        self.run(then)

    @rule(which=which, outputs=st.integers(1, 3), then=then)
    def drop_outputs(self, which: int, outputs: int, then: int) -> None:
        self.driver.wish(which, drop=outputs)
        self.run(then)

    @rule(which=which, then=then)
    def lose_the_sample(self, which: int, then: int) -> None:
        self.driver.wish(which, lose=True)
        self.run(then)

    @rule(which=which, then=then)
    def sample_elsewhere(self, which: int, then: int) -> None:
        self.driver.wish(which, elsewhere=True)
        self.run(then)

    @rule(threshold=st.integers(1, 4), then=then)
    def decodes_first(self, threshold: int, then: int) -> None:
        self.driver.reorder(threshold)
        self.run(then)

    @rule(then=then)
    def without_validation(self, then: int) -> None:
        self.driver.without_validation()
        self.run(then)

    @rule(a=row, b=row, then=then)
    def swap_in_the_step(self, a: int, b: int, then: int) -> None:
        self.driver.swap_in_step(a, b)
        self.run(then)

    @rule(a=row, b=row)
    def swap_between_steps(self, a: int, b: int) -> None:
        self.driver.swap_now(a, b)

    @rule(which=which, condense=st.booleans(), then=then)
    def abort_between_steps(self, which: int, condense: bool, then: int) -> None:
        self.driver.abort_now(which, condense)
        self.run(then)


@pytest.mark.parametrize(("rules", "runs"), [(30, 40), (300, 6)], ids=["short", "several hundred steps"])
def test_any_schedule(rules: int, runs: int, pytestconfig: pytest.Config) -> None:
    """The short ones shrink in seconds; the long ones have time for what piles up."""
    if pytestconfig.getoption("--long-schedules"):
        runs *= 100
    run_state_machine_as_test(
        Schedules,
        settings=settings(
            max_examples=runs,
            stateful_step_count=rules,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            report_multiple_bugs=False,  # one, shrunk, is what can be read
            suppress_health_check=[*HealthCheck],
        ),
    )
