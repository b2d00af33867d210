"""The parts of scripts/bench_transformers.py that run without transformers."""

import os
import subprocess
import sys

import pytest

from scripts.bench_transformers import pin, split_steps


def test_prefill_lasts_until_every_row_has_a_token():
    # Two rows: the first prompt is done after the first step, the second after the third.
    steps = [(1, 10.5, 11.0), (1, 11.0, 12.0), (2, 12.0, 14.0), (2, 14.0, 14.25), (2, 14.5, 15.0), (1, 15.0, 15.25)]
    assert split_steps(steps, 2, start=10.0) == (4.0, [0.25, 0.5])


def test_too_few_decode_steps_are_an_error():
    with pytest.raises(ValueError, match="raise --new-tokens"):
        split_steps([(1, 0.0, 1.0), (2, 1.0, 2.0)], 2, start=0.0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no processor affinity")
def test_children_run_on_as_many_processors_as_asked_for():
    before = os.sched_getaffinity(0)
    try:
        pin(1)
        code = "import os; print(len(os.sched_getaffinity(0)))"
        assert subprocess.check_output([sys.executable, "-c", code], text=True) == "1\n"
        with pytest.raises(ValueError, match="may use 1 processors"):
            pin(2)
    finally:
        os.sched_setaffinity(0, before)
