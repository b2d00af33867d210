"""The persistent batch: rows in the order of the step, over columns that stay where they are."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import compress

import numpy as np
from jaxtyping import Int32, Int64

from jaxrunner.batch.block_owners import BlockOwners
from jaxrunner.batch.block_table import MultiGroupBlockTable
from jaxrunner.batch.columns import FIRST_COLUMNS, ColumnTable, declared_columns
from jaxrunner.batch.packing import Scratch
from jaxrunner.batch.request_state import NO_INDEX, CachedRequestState
from jaxrunner.batch.row_views import RowArrays
from jaxrunner.batch.rows import NO_ROW, RowOrder
from jaxrunner.request_tables import TableSizes, check_tables, pack
from jaxrunner.sampling_columns import NEEDS_TABLES, RECORD_WORDS, RecordWriter, column_offset, sampling_record
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.shapes import StepLayout, StepShape, StepShapes

_FIRST_WORDS = struct.Struct(f"{len(FIRST_COLUMNS)}i")
_DEFAULT_PARAMS = SamplingParams(temperature=0.0)


class RowNames:
    """The requests of a batch's rows while they stand. Not to be changed.

    Attributes:
        req_ids: request of each row.
    """

    def __init__(self, req_ids: list[str]) -> None:
        self.req_ids = req_ids

    @cached_property
    def req_id_to_index(self) -> dict[str, int]:
        """The inverse of ``req_ids``."""
        return dict(zip(self.req_ids, range(len(self.req_ids)), strict=True))


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
        self.block_owners = tuple(BlockOwners(table) for table in self.block_table.tables)
        # The columns that every step touches, by name.
        self.num_tokens = self.columns["num_tokens"]
        self.num_prompt_tokens = self.columns["num_prompt_tokens"]
        self.num_computed_tokens = self.columns["num_computed_tokens"]
        self.num_draft_tokens = self.columns["num_draft_tokens"]
        self.token_ids = self.columns["token_ids"]
        self.flat_token_ids = self.token_ids.reshape(-1)
        self.token_row_stride = self.token_ids.shape[1]
        self.token_starts = np.arange(max_num_reqs) * self.token_row_stride
        self._min_length = self.columns["sampling_record"][:, column_offset("min_length")]
        self._sampling_flags = self.columns["sampling_flags"]
        self._records = RecordWriter(self.record_of, seed)
        record_at = self.columns.offsets["sampling_record"]
        self._words_before = self.columns.fill[len(FIRST_COLUMNS) : record_at].tobytes()
        self._words_behind = self.columns.fill[record_at + RECORD_WORDS :].tobytes()
        self.table_sizes = TableSizes(max_num_reqs, max_model_len, vocab_size)

        self.requests: dict[str, CachedRequestState] = {}
        self.index_of: dict[str, int] = {}  # request index of each of them, NO_INDEX while preempted
        self._id_of_index: list[str] = [""] * max_num_reqs
        self._free_indices = list(range(max_num_reqs - 1, -1, -1))
        self._entered: list[int] = []  # indices whose device state is not uploaded yet
        self._holding: set[int] = set()  # indices of requests with min_tokens

        # This step by row; written by update_states, read by prepare_inputs.
        self.row_arrays = RowArrays(max_num_reqs)
        self.row_fields: Int32[np.ndarray, "fields R"] = self.row_arrays.fields
        idx_mapping, self.num_computed, self.num_known, self.num_prompt, self.num_draft, _ = self.row_fields
        self.num_scheduled: Int32[np.ndarray, "R"] = self.row_arrays.num_scheduled
        self.by_row = self.row_arrays.cut(0)  # the same, cut to the rows in use
        self.rows = RowOrder(idx_mapping)
        self.fields_stamp = object()  # another one when row_fields has changed beyond its live fields
        self.scheduled_each = 0  # what num_scheduled is in all rows, if that is one number, else 0
        self.drafts_each = 0
        self.any_drafts = False
        self.next_drafts: Int32[np.ndarray, "R drafts_each"] | None = None  # if each row is its last token and these
        self.flags = 0
        self.longest = 0  # no request has more tokens; record_sampled looks closer when that could be too many
        # What holds until rows move again.
        self.scheduled_ids: list[str] = []  # in the scheduler's order: cached, then new
        self.scheduled_indices: Int64[np.ndarray, "n"] = np.zeros(0, np.intp)
        self._names, self._names_version = RowNames([]), self.rows.version

        # Shapes that prepare_inputs has asked for, and of whom.
        self.dispatched: dict[tuple[int, int, int, bool], tuple[StepShape, StepLayout]] = {}
        self.dispatched_by: StepShapes | None = None
        # Room to read a step's lists into.
        self.reading: Int32[np.ndarray, "3R"] = np.empty(3 * max_num_reqs, np.int32)
        self.staging = Scratch(max_model_len)
        most = max(max_num_batched_tokens, max_num_reqs * (1 + num_speculative_tokens)) + 1
        self.ascending: Int64[np.ndarray, "n"] = np.arange(most)
        self.ascending32: Int32[np.ndarray, "n"] = np.arange(most, dtype=np.int32)
        self._rows_in_order = self.ascending[:max_num_reqs].tobytes()
        self.refresh_metadata()

    def refresh_metadata(self) -> None:
        """To be called when rows have moved: refreshes what is derived from their order."""
        rows, scheduled = self.rows, self.scheduled_indices
        n = rows.num_rows
        self.by_row = by_row = self.row_arrays.cut(n)
        self.scheduled_rows: Int64[np.ndarray, "n"] = rows.row_of_index[scheduled]
        in_order = self.scheduled_rows.tobytes()  # strings of bytes are compared in a third of the time of arrays
        self.rows_in_order = len(scheduled) == n and in_order == self._rows_in_order[: len(in_order)]
        if self.rows_in_order:
            self._names, self._names_version = RowNames(self.scheduled_ids), rows.version
        self.row_indices: Int64[np.ndarray, "n"] = (
            scheduled if self.rows_in_order else rows.idx_mapping[:n].astype(np.intp)
        )
        self.row_starts: Int64[np.ndarray, "n"] = self.token_starts[self.row_indices]  # in the flat token table
        by_row.known[...] = self.num_tokens[self.row_indices]  # kept up by whoever changes either
        by_row.prompt[...] = self.num_prompt_tokens[self.row_indices]
        self.row_flags = int(np.bitwise_or.reduce(self._sampling_flags[self.row_indices]))
        # Tokens before which rows may not stop, if any request at all has such a bound.
        self.row_holds = self._min_length[self.row_indices] if self._holding else None
        self.fields_stamp = object()

    # ------------------------------------------------------------------ looking at it
    @property
    def num_reqs(self) -> int:
        return self.rows.num_rows

    @property
    def num_free_indices(self) -> int:
        return len(self._free_indices)

    @property
    def num_held_indices(self) -> int:
        return self.max_num_reqs - len(self._free_indices)

    @property
    def idx_mapping(self) -> Int32[np.ndarray, "R"]:
        return self.rows.idx_mapping

    @property
    def row_of_index(self) -> Int64[np.ndarray, "I"]:
        return self.rows.row_of_index

    @property
    def names(self) -> RowNames:
        """Who stands in each row; another object once rows have moved, so that a step can keep its own."""
        rows = self.rows
        if self._names_version != rows.version:
            ids = rows.req_ids.copy()
            for hole in reversed(rows.holes):
                del ids[hole]
            self._names, self._names_version = RowNames(ids), rows.version
        return self._names

    @property
    def req_ids(self) -> list[str]:
        """Request of each row."""
        return self.names.req_ids

    @property
    def req_id_to_index(self) -> dict[str, int]:
        """Row of each request that has one."""
        return self.names.req_id_to_index

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
    def words_of(
        self, states: Sequence[CachedRequestState], token_ids: Sequence[Sequence[int] | np.ndarray]
    ) -> list[bytes]:
        """What the int32 columns will hold of requests that enter with these tokens; ValueError for parameters that
        the device cannot hold. Changes nothing.
        """
        words: list[bytes] = []
        for state, tokens in zip(states, token_ids, strict=True):
            prompt = state.num_prompt_tokens
            if state.record is None:
                state.record = self._records.write(state.req_id, state.sampling_params, prompt)
            record, flags = state.record
            first = _FIRST_WORDS.pack(len(tokens), prompt, 0, 0, flags)
            words.append(b"".join((first, self._words_before, record, self._words_behind)))
        return words

    def enter(
        self,
        states: Sequence[CachedRequestState],
        token_ids: Sequence[Int32[np.ndarray, "n"]],
        words: Sequence[bytes],
    ) -> list[int]:
        """Gives each state a request index and fills its columns; ``words`` are those of ``words_of``.

        No row yet, no blocks and no computed tokens. Returns the indices.
        """
        indices = [self._free_indices.pop() for _ in states]
        for state, index, tokens in zip(states, indices, token_ids, strict=True):
            req_id, n = state.req_id, len(tokens)
            state.request_index, state.preempted_token_ids = index, None
            self.requests[req_id], self.index_of[req_id], self._id_of_index[index] = state, index, req_id
            self.token_ids[index, :n] = tokens
            self.longest = max(self.longest, n)
            if state.sampling_params.min_tokens:
                self._holding.add(index)
        self._entered += indices
        self.columns.put(indices, words)
        return indices

    def record_of(self, req_id: str, params: SamplingParams, num_prompt_tokens: int) -> bytes:
        """What the device is told of a request's sampling parameters; ValueError if it cannot be."""
        try:
            check_tables(params, self.vocab_size)
            return sampling_record(params, req_id, num_prompt_tokens, self.eos_token_ids, self.seed)
        except ValueError as e:
            raise ValueError(f"request {req_id!r}: {e}") from None

    def new_state(self, req_id: str, params: SamplingParams | None, num_prompt_tokens: int) -> CachedRequestState:
        """A state for ``enter``."""
        return CachedRequestState(req_id, params or _DEFAULT_PARAMS, num_prompt_tokens)

    def kept_token_ids(self, req_id: str) -> Int32[np.ndarray, "n"]:
        """What a preempted request, or one that is about to be, comes back with."""
        kept = self.requests[req_id].preempted_token_ids
        return self.token_ids_of(req_id).copy() if kept is None else kept

    def release(self, finished: Iterable[str] = (), preempted: Iterable[str] = ()) -> None:
        """Finished requests are forgotten; preempted ones lose row, blocks and index, and their tokens stay with their
        state. An id that is not known, or has no index already, is passed over: an abort may name such a one.
        """
        freed = []
        for req_id in preempted:
            state = self.requests.get(req_id)
            if state is not None and state.request_index != NO_INDEX:
                state.preempted_token_ids = self.token_ids_of(req_id).copy()
                freed.append(state.request_index)
                state.request_index = self.index_of[req_id] = NO_INDEX
        for req_id in finished:
            if self.requests.pop(req_id, None) is not None:
                index = self.index_of.pop(req_id)
                if index != NO_INDEX:
                    freed.append(index)
        if freed:
            freed.sort()  # sets have no order, and a replay must give the same indices
            self.rows.leave(freed)
            self.columns.clear(freed)
            self.block_table.clear_rows(freed)
            self._holding.difference_update(freed)
            self._free_indices += freed
            if self._entered:
                self._entered = [i for i in self._entered if i not in freed]

    def remove_request(self, req_id: str) -> None:
        """The runner forgets the request. Its row is a hole until it is taken or condensed."""
        self.release(finished=[req_id])
        for owners in self.block_owners:
            owners.stale = True

    def take_entered(self) -> list[int]:
        """Indices whose sampling record has to be uploaded, and which hold a request still."""
        entered, self._entered = self._entered, []
        return entered

    def tables_of(self, index: int) -> Int32[np.ndarray, "words"] | None:
        """What a request that has entered brings for the device's tables; None if it uses none of them."""
        if not self.columns["sampling_flags"][index] & NEEDS_TABLES:
            return None
        state = self.requests[self._id_of_index[index]]
        tokens = self.token_ids_of(state.req_id)
        return pack(self.table_sizes, state.sampling_params, tokens, state.num_prompt_tokens)

    # ------------------------------------------------------------------ rows
    def condense(self) -> None:
        """The last rows move into the holes, until rows 0..num_reqs-1 are all in use."""
        self.rows.condense()

    def swap_states(self, a: int, b: int) -> None:
        """The requests of rows ``a`` and ``b`` change places."""
        order = list(range(self.num_reqs))
        order[a], order[b] = b, a
        self.reorder(order)

    def reorder(self, order: Sequence[int]) -> None:
        """Row i becomes what row ``order[i]`` was; ``order`` is a permutation of the rows in use.

        The step's plan goes along, so this may also be called between ``update_states`` and ``prepare_inputs``.
        """
        self.rows.reorder(order)
        self.next_drafts, n = None, len(order)
        here = self.row_of_index[self.scheduled_indices] != NO_ROW
        if not here.all():  # some were aborted since they were scheduled
            self.scheduled_ids = list(compress(self.scheduled_ids, here))
            self.scheduled_indices = self.scheduled_indices[here]
        for by_row in (*self.row_fields[1:], self.num_scheduled):
            by_row[:n] = by_row[:n][order]
        self.refresh_metadata()
