"""The host half of the runner: request states, the persistent batch, and the upload of a step. NumPy only, no JAX."""

from jaxrunner.batch.block_table import (
    NULL_BLOCK_ID,
    BlockTable,
    MultiGroupBlockTable,
    map_to_kernel_blocks,
    select_common_block_size,
)
from jaxrunner.batch.buffers import BufferRing
from jaxrunner.batch.columns import Column, ColumnTable
from jaxrunner.batch.errors import SchedulerOutputError
from jaxrunner.batch.input_batch import InputBatch
from jaxrunner.batch.prepare_inputs import commit_block_table, prepare_inputs
from jaxrunner.batch.record_sampled import NOT_SAMPLED, SampledTokens, record_sampled, record_tokens
from jaxrunner.batch.reorder import reorder_decodes_first, split_order
from jaxrunner.batch.request_state import CachedRequestState
from jaxrunner.batch.spec_decode import SpecDecodeMetadata, spec_decode_metadata
from jaxrunner.batch.step_inputs import PAD_SLOT_ID, StepInputs
from jaxrunner.batch.update_states import update_states
from jaxrunner.batch.validate import validate

__all__ = [
    "NOT_SAMPLED",
    "NULL_BLOCK_ID",
    "PAD_SLOT_ID",
    "BlockTable",
    "BufferRing",
    "CachedRequestState",
    "Column",
    "ColumnTable",
    "InputBatch",
    "MultiGroupBlockTable",
    "SampledTokens",
    "SchedulerOutputError",
    "SpecDecodeMetadata",
    "StepInputs",
    "commit_block_table",
    "map_to_kernel_blocks",
    "prepare_inputs",
    "record_sampled",
    "record_tokens",
    "reorder_decodes_first",
    "select_common_block_size",
    "spec_decode_metadata",
    "split_order",
    "update_states",
    "validate",
]
