"""Which shape a step takes by what its requests are: a chunk of a prompt is no decode, however short."""

import numpy as np
import pytest

from jaxrunner.batch import InputBatch, prepare_inputs, record_tokens, update_states
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.shapes import Policy, StepShapes
from tests.jaxrunner.batch.naive import Limits
from tests.jaxrunner.plans import cached, new

PROMPT = [3, 1, 4, 1, 5, 9, 2]


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_chunk_as_long_as_a_decode_is_none(drafts: int) -> None:
    limits = Limits(max_model_len=48, num_speculative_tokens=drafts)
    batch, query_len = InputBatch(**vars(limits)), 1 + drafts
    shapes = StepShapes(40, 5, drafts, min_block_size=4, policy=Policy.FULL_AND_PIECEWISE)
    more = {"scheduled_spec_decode_tokens": {"a": [7] * drafts}} if drafts else {}
    first = len(PROMPT) - query_len
    plans: list[tuple[SchedulerOutput, str]] = [
        (new("a", PROMPT, 1, first), "PIECEWISE"),
        (cached({"a": query_len}, {"a": first}, {"a": 0}), "PIECEWISE"),  # the prompt's last chunk
        (cached({"a": query_len}, {"a": len(PROMPT)}, {"a": 1}, **more), "FULL"),
    ]
    for plan, mode in plans:
        update_states(batch, plan)
        shape = prepare_inputs(batch, plan, shapes).shape
        assert (shape.mode.name, shape.uniform) == (mode, mode == "FULL")
        record_tokens(batch, np.full((1, query_len), 8, np.int32))
