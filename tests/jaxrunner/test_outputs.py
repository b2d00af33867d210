"""Copies of outputs that leave nothing out."""

from dataclasses import fields, replace

import numpy as np

from jaxrunner.active_request import ActiveRequest
from jaxrunner.logprobs import SequenceLogprobs
from jaxrunner.logprobs_lists import LogprobsLists
from jaxrunner.outputs import CompletionOutput, Prompt, RequestOutput
from jaxrunner.request import Request
from jaxrunner.sampling_params import RequestOutputKind, SamplingParams
from jaxrunner.sequence_text import SequenceText


def test_every_field_of_a_request_comes_along():
    output = RequestOutput(*(f"value of {field.name}" for field in fields(RequestOutput)))
    assert output.with_outputs([]) == replace(output, outputs=[])


def test_every_field_of_a_sequence_comes_along():
    params = SamplingParams(detokenize=False, logprobs=0)
    active = ActiveRequest("r", Prompt(None, [1], params), RequestOutputKind.CUMULATIVE)
    logprobs = SequenceLogprobs(params, lambda token: None)
    sequence = active.add(Request("r", [1], params), SequenceText(None, params), logprobs)
    step = LogprobsLists(np.array([[7, 0, 1]], np.int32))
    logprobs.append(step, 0)
    sequence.output = CompletionOutput(3, "", [7], 0.5, logprobs.positions, "stop", 9)
    assert all(getattr(sequence.output, field.name) is not None for field in fields(CompletionOutput))
    copy = sequence.so_far()
    assert copy == sequence.output
    logprobs.append(step, 0)  # of the next step
    sequence.output.token_ids.append(7)
    assert copy.token_ids == [7] and len(copy.logprobs) == 1
