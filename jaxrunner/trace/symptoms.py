"""The symptom table: what goes wrong in a batch, how a step shows it, and where to look.

``jaxrunner.trace.check`` decides which symptom a wrong number is. ``stop`` is the breakpoint (``stops.py``) at which
the cause can be seen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """One row of the table."""

    name: str
    sign: str
    cause: str
    stop: int


_TABLE = (
    Symptom(
        "row_not_moved",
        "a row leads to numbers, tokens or blocks of another request",
        "a column was left behind when condense, a swap or a reorder moved its row",
        3,
    ),
    Symptom(
        "stale_row",
        "a request that is finished, preempted or not scheduled has a row",
        "its row was not given up: the sets of finished and unscheduled requests were mixed up, or read too late",
        1,
    ),
    Symptom(
        "missing_row",
        "a scheduled request has no row",
        "it was taken for finished or unscheduled, or never added",
        2,
    ),
    Symptom(
        "append_on_resume",
        "a resumed request's table begins with the blocks that it had before preemption",
        "its new block ids were appended; on a resume they replace",
        2,
    ),
    Symptom(
        "blocks_not_taken",
        "a table lacks blocks that the scheduler gave",
        "the new block ids of a running request were not appended, or not uploaded",
        1,
    ),
    Symptom(
        "built_before_condense",
        "intervals or row numbers of the tokens are right for another order of the rows",
        "req_indices or query_start_loc was computed before the rows had settled",
        4,
    ),
    Symptom(
        "stale_tokens",
        "a token of the stream is not the request's token of that position",
        "the token table lacks a token, or the gather's linear index is wrong",
        5,
    ),
    Symptom(
        "wrong_position",
        "a position is not the computed count plus the offset in the interval",
        "positions were computed from another count, or from an old req_indices",
        4,
    ),
    Symptom(
        "count_jumped",
        "the computed count is not what the last step left",
        "a count went back without preemption or ahead of what was scheduled: an optimistic count was not taken back",
        1,
    ),
    Symptom(
        "wrong_count",
        "a count of a row is neither its request's nor another's",
        "the difference was not merged, or merged twice",
        1,
    ),
    Symptom(
        "padding_slot",
        "a padding token has a KV slot",
        "slots were filled with 0 (or left from a larger step) in place of -1: padding writes into a real block",
        6,
    ),
    Symptom(
        "wrong_slot",
        "a slot is not block * block_size + offset of the token's position",
        "block and offset were split wrongly, or the table row was another's",
        6,
    ),
    Symptom(
        "stale_padding",
        "a padding row or token shows numbers of an earlier, larger step",
        "only the part in use was written: seq_lens, intervals or tokens behind it are stale",
        7,
    ),
    Symptom(
        "stale_table_tail",
        "a table row goes on behind its sequence's last block",
        "the row's former request had more blocks, and the tail was not cleared",
        7,
    ),
    Symptom(
        "wrong_seq_len",
        "a sequence's length is not computed + scheduled",
        "lengths were computed from counts of another step or row",
        7,
    ),
    Symptom(
        "logits_off_by_one",
        "logits are taken one token beside a request's last",
        "query_start_loc[1:] was used where query_start_loc[1:] - 1 is meant, or the other way round",
        8,
    ),
    Symptom("wrong_logits_rows", "logits rows are not each request's last 1 + drafts tokens", "see their formula", 8),
    Symptom(
        "discard_by_length",
        "samples are discarded by how many tokens were scheduled",
        "query length was taken for phase: a prompt's last chunk may be long, an early one may be a single token",
        8,
    ),
    Symptom(
        "wrong_discard",
        "a sample counts though known tokens remain to be computed, or the other way round",
        "seq_len was compared with another count than the request's known tokens",
        8,
    ),
    Symptom(
        "discarded_sample_kept",
        "a row whose sample is discarded committed a token, or one that is not committed none",
        "the discard mask did not reach the bookkeeping",
        8,
    ),
    Symptom(
        "shared_block_written",
        "a block that the step writes is held by another request",
        "it was freed while in use, or handed out twice, or a shared prefix block was not copied before the write",
        6,
    ),
    Symptom(
        "buffer_overwritten",
        "the upload had changed by the time its step had ended",
        "the host buffer was written again while the step in flight still read it",
        4,
    ),
    Symptom(
        "plan_contradiction",
        "the scheduler's plan contradicts itself or an earlier one",
        "the plan is at fault, not the batch: see the scheduler",
        1,
    ),
)
SYMPTOMS = {symptom.name: symptom for symptom in _TABLE}
