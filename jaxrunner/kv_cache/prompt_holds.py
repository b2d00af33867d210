"""Prompts that several sequences continue: computed once, then kept until the last sequence has branched off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxrunner.kv_cache.block_pool import BlockPool
from jaxrunner.request import Request

GroupBlocks = tuple[list[int], ...]


@dataclass(slots=True)
class _Hold:
    blocks: GroupBlocks
    waiting: set[Request]  # sequences that have yet to branch off


class PromptHolds:
    """One more owner for the blocks of computed prompts, by the request that computed them (the leader).

    A sequence that branches off shares the blocks that it will never write into. It computes the prompt's last token
    once more, for logits of its own; so the block of that token, if tokens before it lie in it too, is copied first.
    """

    def __init__(self, pools: Sequence[BlockPool], block_sizes: Sequence[int]) -> None:
        self._pools, self._block_sizes = pools, block_sizes
        self._holds: dict[Request, _Hold] = {}

    def __bool__(self) -> bool:
        return bool(self._holds)

    def __contains__(self, leader: Request | None) -> bool:
        return leader in self._holds

    def hold(self, leader: Request, blocks: GroupBlocks, waiting: Iterable[Request]) -> None:
        """Keep the blocks of a leader's prompt, which is computed, for the sequences in ``waiting``."""
        prompt = leader.num_prompt_tokens
        kept = tuple(held[: -(-prompt // size)] for held, size in zip(blocks, self._block_sizes, strict=True))
        for pool, held in zip(self._pools, kept, strict=True):
            pool.share(held)
        self._holds[leader] = _Hold(kept, set(waiting))

    def branch(self, leader: Request) -> tuple[GroupBlocks, int, tuple[int | None, ...]]:
        """What a sequence starts with that branches off a held prompt.

        Returns:
            The blocks to share, the tokens that are computed, and per group the block to be copied into the first new
            one (None: it starts empty).
        """
        blocks = self._holds[leader].blocks
        computed = leader.num_prompt_tokens - 1
        shared = tuple(held[: computed // size] for held, size in zip(blocks, self._block_sizes, strict=True))
        sources = tuple(
            held[computed // size] if computed % size else None
            for held, size in zip(blocks, self._block_sizes, strict=True)
        )
        return shared, computed, sources

    def leave(self, request: Request) -> None:
        """A sequence has branched off, or has ended before; with the last one goes the hold."""
        hold = self._holds.get(request.leader) if request.leader is not None else None
        if hold is None:
            return
        hold.waiting.discard(request)
        if not hold.waiting:
            self._drop(request.leader)  # type: ignore[arg-type]

    def drop_last(self) -> bool:
        """Give up the latest hold, for want of blocks; its sequences will compute the prompt. False: there is none."""
        if not self._holds:
            return False
        self._drop(next(reversed(self._holds)))
        return True

    def drop_all(self) -> None:
        while self.drop_last():
            pass

    def owned(self, group: int) -> Counter[int]:
        """Block id -> holds on it."""
        return Counter(block_id for hold in self._holds.values() for block_id in hold.blocks[group])

    def _drop(self, leader: Request) -> None:
        for pool, held in zip(self._pools, self._holds.pop(leader).blocks, strict=True):
            pool.release(reversed(held))
