"""The device half of the runner: pure functions of arrays, to be jitted, scanned and differentiated by anyone.

    step = StepFunctions(definition, groups, max_num_reqs, max_logits)
    hidden, head_inputs, kv_caches, state = step.forward(params, kv_caches, state, inputs)
    sampled, state = step.head_and_sample(params, state, hidden, head_inputs)

Imports nothing of ``jaxrunner.batch``; the two meet in ``jaxrunner.runner`` only.
"""

from jaxrunner.step.edit_blocks import edit_blocks
from jaxrunner.step.functions import CacheGroup, HeadInputs, StepFunctions
from jaxrunner.step.inputs import StepArrays, unpack
from jaxrunner.step.noise import gumbel_noise, murmur3
from jaxrunner.step.sampling import SamplingState, filter_logits, sample
from jaxrunner.step.state import DeviceState, enter_requests, init_state, update_block_table

__all__ = [
    "CacheGroup",
    "DeviceState",
    "HeadInputs",
    "SamplingState",
    "StepArrays",
    "StepFunctions",
    "edit_blocks",
    "enter_requests",
    "filter_logits",
    "gumbel_noise",
    "init_state",
    "murmur3",
    "sample",
    "unpack",
    "update_block_table",
]
