"""Plans as JSON and back: nothing that a runner serves is lost."""

import json

import numpy as np
import pytest

from jaxrunner.pooling import PoolingParams
from jaxrunner.protocol import GrammarOutput, NewRequestData, SchedulerOutput
from jaxrunner.sampling_params import RequestOutputKind, SamplingParams
from jaxrunner.structured_outputs import StructuredOutputsParams
from jaxrunner.trace.plan_json import plan_from_json, plan_to_json, snapshot


def back(plan: SchedulerOutput) -> SchedulerOutput:
    return plan_from_json(json.loads(json.dumps(plan_to_json(plan))))


def test_structured_outputs_and_their_masks_come_back():
    mask = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 5)).astype(np.int32)
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
        stop_token_ids=[np.int64(3)],
        repetition_detection={"max_pattern_size": 3, "min_count": 2},
        output_kind=RequestOutputKind.DELTA,  # as streams have it
    )
    plan = SchedulerOutput(
        scheduled_new_reqs=[NewRequestData("a", np.arange(3), ([1],), 0, params)],
        num_scheduled_tokens={"a": 3},
        total_num_scheduled_tokens=3,
        grammar_bitmask=GrammarOutput(["a", "b"], mask[:, ::-1]),
    )
    again = back(plan)
    assert again.scheduled_new_reqs[0].sampling_params == params
    assert again.grammar_bitmask is not None and again.grammar_bitmask.structured_output_request_ids == ["a", "b"]
    assert again.grammar_bitmask.grammar_bitmask.dtype == np.int32
    np.testing.assert_array_equal(again.grammar_bitmask.grammar_bitmask, mask[:, ::-1])
    kept, before = snapshot(plan), mask[:, ::-1].copy()
    mask[:] = 0  # a scheduler may use its memory again
    np.testing.assert_array_equal(kept.grammar_bitmask.grammar_bitmask, before)


def test_pooling_comes_back():
    pooling = PoolingParams(pooling="mean", normalize=False, dimensions=3)
    data = NewRequestData("a", [1, 2], ([1],), pooling_params=pooling)
    plan = SchedulerOutput([data], num_scheduled_tokens={"a": 2}, total_num_scheduled_tokens=2)
    assert back(plan).scheduled_new_reqs[0].pooling_params == pooling


def test_what_has_no_form_in_json_is_named():
    data = NewRequestData("a", [1, 2], ([1],), prompt_embeds=np.zeros((2, 3)))
    plan = SchedulerOutput([data], num_scheduled_tokens={"a": 2}, total_num_scheduled_tokens=2)
    with pytest.raises(ValueError, match="request 'a' used .*prompt_embeds.*not replayed"):
        back(plan)
