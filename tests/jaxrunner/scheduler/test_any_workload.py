"""The scheduler under any workload: random pools, limits, lengths, shared prefixes, aborts, in any order."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.jaxrunner.scheduler.workload import Workload

NAMES = st.sampled_from("abcdefghijkl")
SEQUENCES = st.one_of(NAMES, NAMES.map("1_{}".format))
PREFIXES = [[], [1] * 9, [1] * 4 + [2] * 20, [3] * 16]


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 30),
        block_sizes=st.sampled_from([(4,), (1,), (3,), (2, 4), (2, 3)]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 24),
        max_model_len=st.integers(4, 60),
        threshold=st.sampled_from([0, 0, 1, 5]),
        caching=st.booleans(),
        tokens_per_step=st.sampled_from([1, 1, 3]),
        policy=st.sampled_from(["fcfs", "fcfs", "priority"]),
        partial=st.sampled_from([0, 0, 1, 2]),
        long_partial=st.sampled_from([0, 0, 1]),
    )
    def start(self, threshold, partial, long_partial, **limits):
        self.work = Workload(
            threshold=threshold, partial=partial, long_partial=long_partial if threshold else 0, **limits
        )

    @rule(
        name=NAMES,
        prompt=st.builds(list.__add__, st.sampled_from(PREFIXES), st.lists(st.integers(0, 2), min_size=1, max_size=8)),
        salt=st.sampled_from([None, None, "x"]),
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        min_tokens=st.sampled_from([0, 0, 1]),
        ignore_eos=st.booleans(),
        priority=st.integers(-1, 1),
        sequences=st.sampled_from([1, 1, 2, 3]),
    )
    def add(self, name, prompt, sequences, **params):
        if name in self.work.alive:
            return
        names = [name, *(f"{i}_{name}" for i in range(1, sequences))]
        if len(prompt) + 1 > self.work.limit:
            with pytest.raises(ValueError, match=f"has {len(prompt)} tokens"):
                self.work.add(name, prompt, **params)
        elif not self.work.alive.keys() & set(names):
            self.work.add_sequences(names, prompt, **params)

    @precondition(lambda self: self.work.scheduler.has_requests())
    @rule(
        abort_between=st.lists(st.one_of(NAMES, NAMES.map("1_{}".format)), max_size=1),
        reset_between=st.sampled_from([False, False, False, True]),
    )
    def step(self, abort_between, reset_between):
        self.work.step(abort_between, reset_between)

    @rule(name=SEQUENCES)
    def abort(self, name):
        self.work.abort(name)
        self.work.check()

    @rule()
    def reset_prefix_cache(self):
        self.work.reset_prefix_cache()
        self.work.check()

    def teardown(self):
        if hasattr(self, "work"):
            self.work.run()


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase


@pytest.mark.parametrize("seed", range(30))
def test_many_requests_in_a_small_pool(seed):
    """More of everything than hypothesis likes to draw: queues, preemptions, resumed requests with hits."""
    draw = random.Random(seed)
    work = Workload(
        num_blocks=draw.randint(8, 30),
        block_sizes=draw.choice([(4,), (4,), (3,), (2, 4)]),
        max_num_seqs=draw.randint(2, 12),
        max_num_batched_tokens=draw.choice([1, 7, 16, 64]),
        max_model_len=draw.choice([30, 80]),
        threshold=draw.choice([0, 0, 5]),
        caching=draw.random() < 0.7,
        tokens_per_step=draw.choice([1, 1, 3]),
        policy=draw.choice(["fcfs", "priority"]),
        partial=draw.choice([0, 0, 2]),
    )
    for i in range(25):
        prompt = (draw.choice(PREFIXES) + [draw.randrange(3) for _ in range(draw.randint(1, 12))])[: work.limit - 1]
        salt = draw.choice([None, None, None, "x"])
        names = [f"r{i}", *(f"{j}_r{i}" for j in range(1, draw.choice([1, 1, 4])))]
        max_tokens, priority = draw.choice([1, 8, 30, None]), draw.randint(0, 2)
        work.add_sequences(
            names, prompt, salt=salt, priority=priority, max_tokens=max_tokens, ignore_eos=draw.random() < 0.5
        )
        while draw.random() < 0.3 and work.scheduler.has_requests():
            work.step([f"r{draw.randint(0, i)}"] if draw.random() < 0.1 else (), draw.random() < 0.05)
    work.run()
