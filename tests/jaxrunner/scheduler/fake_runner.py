"""A runner without a model, with a memory that notices every wrong block.

It knows only what the protocol tells it. In place of keys and values it writes, for every position, a hash of the
request's whole history up to there; before a step it reads all positions that are said to be computed back through the
block tables. The next token is a function of that hash, so it depends on nothing but the history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from jaxrunner.protocol import ModelRunnerOutput, SchedulerOutput

VOCABULARY = 50


def history_hashes(token_ids: list[int], salt: str | None) -> list[int]:
    """One number per position, of all tokens up to it and of the salt."""
    value, hashes = crc32(repr(salt).encode()), []
    for token in token_ids:
        value = hash((value, token))
        hashes.append(value)
    return hashes


def next_token(history_hash: int) -> int:
    return history_hash % VOCABULARY


@dataclass
class _Known:
    token_ids: list[int]
    blocks: tuple[list[int], ...]
    num_computed: int
    weights: int  # which weights computed it


class FakeRunner:
    """Arguments:
    block_sizes: tokens per block, by group.
    salts: cache salt by request id; the real runner needs none, this one uses it to tell histories apart.
    tokens_per_step: tokens it samples at once.
    """

    def __init__(
        self, block_sizes: tuple[int, ...], salts: Mapping[str, str | None] | None = None, tokens_per_step: int = 1
    ) -> None:
        self.block_sizes = block_sizes
        self.salts = salts if salts is not None else {}
        self.tokens_per_step = tokens_per_step
        self.requests: dict[str, _Known] = {}
        self.memory: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in block_sizes]
        self.weights = 0  # to be raised where the prefix cache is reset: nothing computed before may be read after

    def step(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._take_differences(output)
        for memory, copies in zip(self.memory, output.block_copies, strict=False):
            read = {
                target: [memory.get((source, i)) for i in range(max(self.block_sizes))] for source, target in copies
            }
            assert len(read) == len(copies), "a block is the target of two copies"
            for target, cells in read.items():
                memory |= {(target, i): cell for i, cell in enumerate(cells) if cell is not None}
        counts = output.num_scheduled_tokens
        for req_id in counts:
            self._check_reads(req_id)
        for req_id, count in counts.items():
            self._write(req_id, count)
        return self._sample(output)

    def _take_differences(self, output: SchedulerOutput) -> None:
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        for req_id in output.finished_req_ids:
            del self.requests[req_id]  # only ids that it was told of
        for req_id in output.preempted_req_ids:
            self.requests[req_id].blocks = ()
        for data in new:
            assert data.req_id not in self.requests
            blocks = tuple(list(ids) for ids in data.block_ids)
            self.requests[data.req_id] = _Known(
                list(data.prompt_token_ids), blocks, data.num_computed_tokens, self.weights
            )
        for i, req_id in enumerate(cached.req_ids):
            known, blocks = self.requests[req_id], cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                assert req_id not in output.preempted_req_ids  # in one step: told as resumed only
                assert known.token_ids == cached.all_token_ids[req_id]
                known.blocks = tuple(list(ids) for ids in blocks)
                known.num_computed, known.weights = cached.num_computed_tokens[i], self.weights
            else:
                assert known.blocks and known.num_computed == cached.num_computed_tokens[i]
                for held, ids in zip(known.blocks, blocks or (), strict=blocks is not None):
                    held.extend(ids)
            assert cached.num_output_tokens[i] <= len(known.token_ids)
        assert list(output.num_scheduled_tokens) == cached.req_ids + [data.req_id for data in new]
        assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens

    def _cells(self, req_id: str, start: int, end: int):
        """(group, block, offset, position) of a range of positions."""
        for group, (size, blocks) in enumerate(zip(self.block_sizes, self.requests[req_id].blocks, strict=True)):
            for position in range(start, end):
                yield group, blocks[position // size], position % size, position

    def _check_reads(self, req_id: str) -> None:
        known = self.requests[req_id]
        hashes = history_hashes(known.token_ids, self.salts.get(req_id))
        for group, block, offset, position in self._cells(req_id, 0, known.num_computed):
            found = self.memory[group].get((block, offset))
            right = (known.weights, hashes[position])
            assert found == right, f"{req_id} position {position}: block {block} holds something else"

    def _write(self, req_id: str, count: int) -> None:
        known = self.requests[req_id]
        end = known.num_computed + count
        hashes = history_hashes(known.token_ids, self.salts.get(req_id))
        others = [other for other_id, other in self.requests.items() if other_id != req_id and other.blocks]
        for group, block, offset, position in self._cells(req_id, known.num_computed, end):
            assert block != 0, f"{req_id} writes into the null block"
            assert all(block not in other.blocks[group] for other in others), f"{req_id} writes into a shared block"
            self.memory[group][block, offset] = (known.weights, hashes[position])
        known.num_computed = end

    def _sample(self, output: SchedulerOutput) -> ModelRunnerOutput:
        ids = sorted(output.num_scheduled_tokens)  # rows are in an order of their own
        sampled: list[list[int]] = []
        for req_id in ids:
            known = self.requests[req_id]
            tokens: list[int] = []
            if known.num_computed == len(known.token_ids):
                for _ in range(self.tokens_per_step):
                    hashes = history_hashes(known.token_ids, self.salts.get(req_id))
                    tokens.append(next_token(hashes[-1]))
                    known.token_ids.append(tokens[-1])
            sampled.append(tokens)
        return ModelRunnerOutput(ids, {req_id: row for row, req_id in enumerate(ids)}, sampled)


def expected_output(
    prompt: list[int], salt: str | None, stopping: frozenset[int], min_tokens: int, max_total: int
) -> list[int]:
    """What the fake runner's "model" generates for a request that is alone in the world."""
    token_ids = list(prompt)
    while len(token_ids) < max_total:
        token_ids.append(next_token(history_hashes(token_ids, salt)[-1]))
        if token_ids[-1] in stopping and len(token_ids) - len(prompt) > min_tokens:
            break
    return token_ids[len(prompt) :]
