"""The device half of the runner: pure functions of arrays, to be jitted, scanned and differentiated by anyone.

    step = StepFunctions(definition, groups, max_num_reqs, max_logits)
    hidden, head_inputs, kv_caches, state = step.forward(params, kv_caches, state, inputs)
    sampled, state = step.head_and_sample(params, state, hidden, head_inputs)

Imports nothing of ``jaxrunner.batch``; the two meet in ``jaxrunner.runner`` only.
"""

from jaxrunner.step.custom import enter_custom
from jaxrunner.step.edit_blocks import edit_blocks
from jaxrunner.step.functions import CacheGroup, HeadInputs, StepFunctions
from jaxrunner.step.inputs import StepArrays, unpack
from jaxrunner.step.logprobs import given_logprobs, packed_logprobs
from jaxrunner.step.noise import gumbel_noise, murmur3
from jaxrunner.step.pooling import pool_rows
from jaxrunner.step.sampling import SamplingState, sample
from jaxrunner.step.state import DeviceState, ForwardState, enter_requests, init_state, update_block_table
from jaxrunner.step.tables import RequestTables, enter_tables, set_allowed

__all__ = [
    "CacheGroup",
    "DeviceState",
    "ForwardState",
    "HeadInputs",
    "RequestTables",
    "SamplingState",
    "StepArrays",
    "StepFunctions",
    "edit_blocks",
    "enter_custom",
    "enter_requests",
    "enter_tables",
    "given_logprobs",
    "gumbel_noise",
    "init_state",
    "murmur3",
    "packed_logprobs",
    "pool_rows",
    "sample",
    "set_allowed",
    "unpack",
    "update_block_table",
]
