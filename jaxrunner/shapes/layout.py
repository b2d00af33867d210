"""Where each array of a step lies in the one int32 buffer that is uploaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class StepLayout:
    """Layout of a step's upload for T tokens, R rows, S logits rows and U block-table updates. All int32.

    ``fields`` maps a name to (offset, length), in the order of the buffer:

    ==================  ====  =====================================================================
    num_reqs            1     rows in use
    num_tokens          1     tokens in use
    num_logits          1     logits rows in use
    flags               1     which sampling features any row uses (``jaxrunner.sampling_columns``)
    query_start_loc     R+1   row r owns tokens [query_start_loc[r], query_start_loc[r+1])
    idx_mapping         R     request index of each row; padding: the scratch index max_num_reqs
    num_computed        R     tokens whose keys and values exist before the step
    num_known           R     tokens the request has (prompt and outputs, drafts not counted)
    num_prompt          R     tokens of the user's prompt
    num_draft           R     draft tokens at the end of the row's interval
    use_device          R     1: the last token before the drafts is the device's last sample, not token_ids
    logits_indices      S     token whose hidden state gets logits; padding 0
    update_group        U     block-table updates; padding: group 0, cell past the end
    update_cell         U     request index * W + column, of the group's table
    update_value        U     physical block
    token_ids           T     padding 0
    ==================  ====  =====================================================================
    """

    num_tokens: int
    num_reqs: int
    num_logits: int
    num_updates: int

    @cached_property
    def fields(self) -> dict[str, tuple[int, int]]:
        t, r, s, u = self.num_tokens, self.num_reqs, self.num_logits, self.num_updates
        lengths = {
            "num_reqs": 1,
            "num_tokens": 1,
            "num_logits": 1,
            "flags": 1,
            "query_start_loc": r + 1,
            "idx_mapping": r,
            "num_computed": r,
            "num_known": r,
            "num_prompt": r,
            "num_draft": r,
            "use_device": r,
            "logits_indices": s,
            "update_group": u,
            "update_cell": u,
            "update_value": u,
            "token_ids": t,
        }
        fields, at = {}, 0
        for name, length in lengths.items():
            fields[name] = (at, length)
            at += length
        return fields

    @cached_property
    def size(self) -> int:
        """Length of the buffer in int32 words."""
        at, length = self.fields["token_ids"]
        return at + length
