"""The persistent batch: rows in the order of the step, over columns that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, Int64

from jaxrunner.batch.block_table import MultiGroupBlockTable
from jaxrunner.batch.columns import ColumnTable, declared_columns
from jaxrunner.batch.request_state import NO_INDEX, CachedRequestState
from jaxrunner.protocol import TokenIds
from jaxrunner.request_tables import TableSizes, check_tables, pack
from jaxrunner.sampling_columns import NEEDS_TABLES, column_offset, sampling_flags, sampling_record
from jaxrunner.sampling_params import SamplingParams

NO_ROW = -1
_DEFAULT_PARAMS = SamplingParams(temperature=0.0)


class InputBatch:
    """Requests of the current step in rows 0..num_reqs-1, and the columns of every request that holds an index.

    Args:
        max_num_reqs: request indices, and so requests that may be running at once (scheduled or not).
        max_model_len: tokens a request may have, prompt and outputs.
        max_num_batched_tokens: tokens of one step.
        vocab_size: token ids are below it.
        block_sizes: tokens a block, per cache group, as the block manager counts them.
        kernel_block_sizes: tokens a block as the kernels address it; None: the same.
        num_blocks: blocks of every cache group; ids are below it. None: not known, any id goes.
        num_speculative_tokens: drafts a request may carry.
        eos_token_ids: the model's; min_tokens holds them back together with a request's stop_token_ids.
        seed: the engine's; requests without a seed of their own derive one from it.

    Attributes:
        req_ids: request of each row. ``req_id_to_index`` is its inverse.
        idx_mapping: int32 [R], request index of each row.
        row_of_index: int32 [I], row of each request index, NO_ROW for one that is not in this step.
        requests: every request the runner knows, by id.
    """

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        block_sizes: Sequence[int] = (16,),
        kernel_block_sizes: Sequence[int] | None = None,
        num_blocks: int | None = None,
        num_speculative_tokens: int = 0,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.block_sizes = tuple(block_sizes)
        self.num_blocks = num_blocks
        self.num_speculative_tokens = num_speculative_tokens
        self.eos_token_ids = tuple(eos_token_ids)
        self.seed = seed

        self.columns = ColumnTable(declared_columns(max_model_len, num_speculative_tokens), max_num_reqs)
        self.block_table = MultiGroupBlockTable(max_num_reqs, max_model_len, block_sizes, kernel_block_sizes)
        # The columns that every step touches, by name.
        self.num_tokens = self.columns["num_tokens"]
        self.num_computed_tokens = self.columns["num_computed_tokens"]
        self.num_draft_tokens = self.columns["num_draft_tokens"]
        self.token_ids = self.columns["token_ids"]
        self._min_length = self.columns["sampling_record"][:, column_offset("min_length")]
        self.token_row_stride = self.token_ids.shape[1]
        self.table_sizes = TableSizes(max_num_reqs, max_model_len, vocab_size)

        self.requests: dict[str, CachedRequestState] = {}
        self.req_ids: list[str] = []
        self.req_id_to_index: dict[str, int] = {}
        self.idx_mapping: Int32[np.ndarray, "R"] = np.full(max_num_reqs, NO_INDEX, np.int32)
        self.row_of_index: Int32[np.ndarray, "I"] = np.full(max_num_reqs, NO_ROW, np.int32)
        self._free_indices = list(range(max_num_reqs - 1, -1, -1))
        self._holes: list[int] = []  # rows given up since the last condense
        self._entered: list[int] = []  # indices whose device state is not uploaded yet

        # This step's plan by row; written by update_states, read by prepare_inputs.
        self.num_scheduled: Int32[np.ndarray, "R"] = np.zeros(max_num_reqs, np.int32)
        self.num_computed: Int32[np.ndarray, "R"] = np.zeros(max_num_reqs, np.int32)
        self.any_drafts = False
        self.flags = 0
        # What holds until rows move again.
        self.scheduled_ids: list[str] = []  # in the scheduler's order: cached, then new
        self.refresh_metadata()

    def refresh_metadata(self) -> None:
        """To be called when rows have moved: refreshes what is derived from their order."""
        n, ids = self.num_reqs, self.scheduled_ids
        self.row_indices: Int64[np.ndarray, "n"] = self.idx_mapping[:n].astype(np.intp)
        self.row_starts: Int64[np.ndarray, "n"] = self.row_indices * self.token_row_stride  # in the flat token table
        self.scheduled_rows: Int64[np.ndarray, "n"] = np.fromiter(
            map(self.req_id_to_index.__getitem__, ids), np.intp, len(ids)
        )
        self.rows_in_order = bool((self.scheduled_rows == np.arange(len(ids))).all())
        self.row_flags = int(np.bitwise_or.reduce(self.columns["sampling_flags"][self.row_indices], initial=0))
        self.row_prompts: Int32[np.ndarray, "n"] = self.columns["num_prompt_tokens"][self.row_indices]
        self.row_holds: Int32[np.ndarray, "n"] = self._min_length[self.row_indices]
        self.any_hold = bool(self.row_holds.any())

    # ------------------------------------------------------------------ looking at it
    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @property
    def num_free_indices(self) -> int:
        return len(self._free_indices)

    def token_ids_of(self, req_id: str) -> Int32[np.ndarray, "n"]:
        """Prompt and outputs of a request (a view while it holds an index)."""
        state = self.requests[req_id]
        if state.preempted_token_ids is not None:
            return state.preempted_token_ids
        return self.token_ids[state.request_index, : self.num_tokens[state.request_index]]

    def output_token_ids_of(self, req_id: str) -> Int32[np.ndarray, "n"]:
        """Outputs of a request."""
        return self.token_ids_of(req_id)[self.requests[req_id].num_prompt_tokens :]

    def block_ids_of(self, req_id: str, group: int = 0) -> Int32[np.ndarray, "n"]:
        """Kernel block ids of a request in a cache group; empty while it is preempted."""
        index = self.requests[req_id].request_index
        return self.block_table[group].row(index) if index != NO_INDEX else np.zeros(0, np.int32)

    # ------------------------------------------------------------------ requests and their indices
    def enter(
        self,
        state: CachedRequestState,
        token_ids: TokenIds,
        block_ids: Sequence[Sequence[int]],
        num_computed_tokens: int,
    ) -> None:
        """Gives ``state`` a request index and fills its columns. It has no row yet."""
        params = state.sampling_params
        record = self.record_of(state.req_id, params, state.num_prompt_tokens)
        index = self._free_indices.pop()
        state.request_index, state.preempted_token_ids = index, None
        n = len(token_ids)
        self.token_ids[index, :n] = token_ids
        self.num_tokens[index] = n
        self.columns["num_prompt_tokens"][index] = state.num_prompt_tokens
        self.num_computed_tokens[index] = num_computed_tokens
        self.columns["sampling_record"][index] = np.frombuffer(record, np.int32)
        self.columns["sampling_flags"][index] = sampling_flags(params)
        self.block_table.add_row(block_ids, index)
        self.requests[state.req_id] = state
        self._entered.append(index)

    def record_of(self, req_id: str, params: SamplingParams, num_prompt_tokens: int) -> bytes:
        """What the device is told of a request's sampling parameters; ValueError if it cannot be."""
        check_tables(params, self.vocab_size)
        return sampling_record(params, req_id, num_prompt_tokens, self.eos_token_ids, self.seed)

    def new_state(self, req_id: str, params: SamplingParams | None, num_prompt_tokens: int) -> CachedRequestState:
        """A state for ``enter``."""
        return CachedRequestState(req_id, params or _DEFAULT_PARAMS, num_prompt_tokens)

    def preempt(self, req_id: str) -> None:
        """The request loses row, blocks and index; its tokens stay with its state."""
        state = self.requests[req_id]
        if state.request_index == NO_INDEX:
            return
        state.preempted_token_ids = self.token_ids_of(req_id).copy()
        self._release(state)

    def remove_request(self, req_id: str) -> None:
        """The runner forgets the request."""
        self._release(self.requests.pop(req_id))

    def take_entered(self) -> list[int]:
        """Indices whose sampling record has to be uploaded, and which hold a request still."""
        entered = [i for i in dict.fromkeys(self._entered) if self.num_tokens[i]]
        self._entered = []
        return entered

    def tables_of(self, index: int) -> Int32[np.ndarray, "words"] | None:
        """What a request that has entered brings for the device's tables; None if it uses none of them."""
        if not self.columns["sampling_flags"][index] & NEEDS_TABLES:
            return None
        state = self.requests[self.req_ids[self.row_of_index[index]]]
        tokens = self.token_ids_of(state.req_id)
        return pack(self.table_sizes, state.sampling_params, tokens, state.num_prompt_tokens)

    def _release(self, state: CachedRequestState) -> None:
        index = state.request_index
        if index == NO_INDEX:
            return
        if self.row_of_index[index] != NO_ROW:
            self.leave_row(state.req_id)
        self.columns.clear(index)
        self.block_table.clear_row(index)
        state.request_index = NO_INDEX
        self._free_indices.append(index)

    # ------------------------------------------------------------------ rows
    def take_row(self, req_id: str) -> int:
        """A row for a request that holds an index: the lowest one given up, else the next."""
        index = self.requests[req_id].request_index
        if self._holes:
            row = min(self._holes)
            self._holes.remove(row)
            self.req_ids[row] = req_id
        else:
            row = len(self.req_ids)
            self.req_ids.append(req_id)
        self._place(req_id, index, row)
        return row

    def leave_row(self, req_id: str) -> None:
        """The request gives up its row, and keeps its index. The row is a hole until it is taken or condensed."""
        row = self.req_id_to_index.pop(req_id)
        self.row_of_index[self.idx_mapping[row]] = NO_ROW
        self.idx_mapping[row] = NO_INDEX
        self._holes.append(row)

    def condense(self) -> None:
        """The last rows move into the holes, until rows 0..num_reqs-1 are all in use."""
        if not self._holes:
            return
        holes = sorted(self._holes)
        self._holes = []
        gone = set(holes)
        last = len(self.req_ids) - 1
        for hole in holes:
            while last in gone:
                last -= 1
            if last < hole:
                break
            req_id = self.req_ids[hole] = self.req_ids[last]
            index = int(self.idx_mapping[last])
            self.idx_mapping[last] = NO_INDEX
            self._place(req_id, index, hole)
            gone.add(last)
        del self.req_ids[len(self.req_id_to_index) :]

    def swap_states(self, a: int, b: int) -> None:
        """The requests of rows ``a`` and ``b`` change places."""
        order = list(range(self.num_reqs))
        order[a], order[b] = b, a
        self.reorder(order)

    def reorder(self, order: Sequence[int]) -> None:
        """Row i becomes what row ``order[i]`` was; ``order`` is a permutation of the rows in use.

        The step's plan goes along, so this may also be called between ``update_states`` and ``prepare_inputs``.
        """
        n = self.num_reqs
        if sorted(order) != list(range(n)):
            raise ValueError(f"order must be a permutation of 0..{n - 1}, got {list(order)}")
        self.req_ids = [self.req_ids[i] for i in order]
        indices = self.idx_mapping[:n][np.asarray(order, np.intp)]
        self.idx_mapping[:n] = indices
        self.row_of_index[indices] = np.arange(n)
        self.req_id_to_index = {req_id: row for row, req_id in enumerate(self.req_ids)}
        for column in (self.num_scheduled, self.num_computed):
            column[:n] = column[:n][np.asarray(order, np.intp)]
        self.scheduled_ids = [r for r in self.scheduled_ids if r in self.req_id_to_index]  # without the aborted
        self.refresh_metadata()

    def _place(self, req_id: str, index: int, row: int) -> None:
        self.req_id_to_index[req_id] = row
        self.idx_mapping[row] = index
        self.row_of_index[index] = row
