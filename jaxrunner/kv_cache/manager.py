"""The blocks of every request in every cache group, and the prefix cache over them.

Everything is per group: a request's blocks are a tuple with one list a group, each group has a pool of its own, and a
prefix counts as found only as far as all groups have it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxrunner.kv_cache.block_pool import BlockPool
from jaxrunner.kv_cache.hashing import chain_root, extend_chain
from jaxrunner.kv_cache.prompt_holds import GroupBlocks, PromptHolds
from jaxrunner.kv_cache.spec import KVCacheConfig
from jaxrunner.request import Request


@dataclass(slots=True)
class PrefixCacheStats:
    """How well the prefix cache does, in tokens, counted when a request is admitted.

    Attributes:
        requests, queries, hits: requests admitted for the first time, their tokens, and those found.
        resumed_requests, resumed_queries, resumed_hits: the same for requests that come back from preemption,
            which mostly find what they computed themselves.
        branches, branched: sequences that branched off another's computed prompt, and tokens they didn't compute for
            it. No look-up in the cache, so not among the others.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    resumed_requests: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0
    branches: int = 0
    branched: int = 0

    def record(self, request: Request, num_hit_tokens: int, branches: bool = False) -> None:
        if branches:
            self.branches += 1
            self.branched += num_hit_tokens
        elif request.num_preemptions:
            self.resumed_requests += 1
            self.resumed_queries += request.num_tokens
            self.resumed_hits += num_hit_tokens
        else:
            self.requests += 1
            self.queries += request.num_tokens
            self.hits += num_hit_tokens


class KVCacheManager:
    """Lends blocks to requests.

    Arguments:
        config: groups and pool size.
        enable_prefix_caching: let full blocks be found by later requests with the same prefix.

    Attributes:
        holds: computed prompts that wait for further sequences to branch off.
    """

    def __init__(self, config: KVCacheConfig, enable_prefix_caching: bool = True) -> None:
        self.config = config
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixCacheStats()
        self.pools = tuple(BlockPool(config.num_blocks) for _ in config.groups)
        self._block_sizes = tuple(group.spec.block_size for group in config.groups)
        # One chain serves groups of different block sizes: a hash covers everything before it, so the hash of
        # a large block is that of the last small one inside it.
        self._hash_block_size = math.gcd(*self._block_sizes)
        self._hit_alignment = math.lcm(*self._block_sizes)
        # A request has nothing new to publish before it has computed so many tokens more.
        self.publish_interval = self._hash_block_size if enable_prefix_caching else 2**62
        # By object, not by id: an ended request may keep its blocks a little longer, and its id is free by then.
        self._blocks: dict[Request, GroupBlocks] = {}
        self._ended: list[Request] = []  # those that a step in flight may still write for
        self.holds = PromptHolds(self.pools, self._block_sizes)
        self._epoch = 0

    @property
    def num_groups(self) -> int:
        return len(self.pools)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be lent now, in the group that has fewest."""
        return min(pool.num_free for pool in self.pools)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, from 0 to 1."""
        return 1 - self.num_free_blocks / (self.config.num_blocks - 1)

    def get_blocks(self, request: Request) -> GroupBlocks:
        """The request's blocks in logical order: the manager's own lists, not to be kept or changed."""
        return self._blocks[request]

    def get_computed_blocks(self, request: Request) -> tuple[GroupBlocks, int]:
        """The longest computed prefix that all groups have, for a request that holds no blocks.

        Returns:
            Blocks per group and the tokens they hold: a multiple of every group's block size and at most
            ``num_tokens - 1``, because the last token must run to give logits. Nothing is taken yet: pass the
            blocks to ``allocate_slots`` before anything else is allocated.
        """
        found: GroupBlocks = tuple([] for _ in self.pools)
        if not self.enable_prefix_caching:
            return found, 0
        self._extend_hashes(request)
        if not request.reads_prefix_cache:
            return found, 0
        num_hit = request.num_tokens - 1
        for pool, block_size, held in zip(self.pools, self._block_sizes, found, strict=True):
            ratio = block_size // self._hash_block_size
            for block_hash in request.block_hashes[ratio - 1 : num_hit // block_size * ratio : ratio]:
                block_id = pool.find(block_hash)
                if block_id is None:
                    break
                held.append(block_id)
            num_hit = len(held) * block_size // self._hit_alignment * self._hit_alignment
        for block_size, held in zip(self._block_sizes, found, strict=True):
            del held[num_hit // block_size :]
        return found, num_hit

    def allocate_slots(
        self, request: Request, num_tokens: int, computed_blocks: GroupBlocks | None = None, keep_free: int = 0
    ) -> GroupBlocks | tuple[()] | None:
        """Give the request room for its first ``num_tokens`` tokens.

        Arguments:
            num_tokens: tokens in all, not only the new ones.
            computed_blocks: what ``get_computed_blocks`` just found, for a request that holds no blocks yet.
            keep_free: give nothing unless so many blocks stay free in every group.
        Returns:
            The newly lent blocks per group, found ones not among them; () when there was room already; None,
            and nothing changed, when a group has too few free blocks.
        """
        if num_tokens <= request.num_block_tokens:
            return ()
        found = computed_blocks or tuple([] for _ in self.pools)
        blocks = self._blocks.get(request, found)
        starts = blocks is found
        counts = []
        for pool, block_size, held in zip(self.pools, self._block_sizes, blocks, strict=True):
            count = max(-(-num_tokens // block_size) - len(held), 0)
            taken = pool.num_unowned(held) if starts else 0
            if count + taken + keep_free > pool.num_free:
                return None
            counts.append(count)

        if starts:
            self._blocks[request] = found
            self._enter_epoch(request)
            for pool, held in zip(self.pools, found, strict=True):
                pool.share(held)  # before anything is lent as new, so that it can't be one of these
        new_blocks = []
        room = []
        for pool, block_size, held, count in zip(self.pools, self._block_sizes, blocks, counts, strict=True):
            new = pool.allocate(count)
            held.extend(new)
            new_blocks.append(new)
            room.append(len(held) * block_size)
        request.num_block_tokens = min(room)
        return tuple(new_blocks)

    def cache_blocks(self, request: Request) -> None:
        """Let the full blocks among the request's *computed* tokens be found by others.

        To be called once a step has been processed, never when it is scheduled: a request that found a block in the
        same step would read what isn't written yet.
        """
        computed = request.num_computed_tokens
        if computed - request.num_published_tokens < self.publish_interval:
            return
        if request.hash_epoch != self._epoch:
            return  # computed before a reset, in part at least
        self._extend_hashes(request)
        blocks = self._blocks[request]
        for pool, block_size, held in zip(self.pools, self._block_sizes, blocks, strict=True):
            ratio = block_size // self._hash_block_size
            for i in range(request.num_published_tokens // block_size, computed // block_size):
                pool.publish(held[i], request.block_hashes[(i + 1) * ratio - 1])
        request.num_published_tokens = computed - computed % self._hash_block_size

    def free(self, request: Request) -> None:
        """Take back all blocks. Computed full ones can still be found until they are lent again."""
        if request not in self._blocks:
            return
        # Again from the start: where a twin with the same content stood in for one of these blocks and has
        # been overwritten since, this one takes its place.
        request.num_published_tokens = 0
        self.cache_blocks(request)
        for pool, held in zip(self.pools, self._blocks.pop(request), strict=True):
            # The tail first: a block is worth nothing without those before it, and fewer requests share it.
            pool.release(reversed(held))
        request.num_published_tokens = 0
        request.num_block_tokens = 0

    def free_later(self, request: Request) -> None:
        """``free``, once the step is over that may still write into the blocks."""
        if request in self._blocks:
            self._ended.append(request)

    def free_ended(self) -> None:
        """The step is over: now ``free`` what ``free_later`` was told of."""
        while self._ended:
            self.free(self._ended.pop())

    def hold_prompt(self, leader: Request, waiting: Iterable[Request]) -> None:
        """Keep the blocks of a leader's computed prompt until all of ``waiting`` have branched off."""
        if leader.hash_epoch == self._epoch:  # else computed before a reset, in part at least
            self.holds.hold(leader, self._blocks[leader], waiting)

    def num_common_prefix_blocks(self, requests: Sequence[Request]) -> list[int]:
        """Per group, the leading blocks that all requests hold: not only these, all that have any.

        All 0 for fewer than two: the blocks of one are not necessarily computed, shared ones are.
        """
        owners = len(self._blocks)
        if owners < 2 or not requests:
            return [0] * self.num_groups
        common = []
        for group, (pool, held) in enumerate(zip(self.pools, self._blocks[requests[0]], strict=True)):
            holds = self.holds.owned(group) if self.holds else {}
            count = 0
            while count < len(held) and pool.num_owners(held[count]) == owners + holds.get(held[count], 0):
                count += 1
            common.append(count)
        return common

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far will be found again, as after a change of weights. Running requests go on."""
        self._epoch += 1  # what they compute from here on builds on the old state: not to be found either
        self.holds.drop_all()
        for pool in self.pools:
            pool.forget_all()

    def check_accounting(self) -> None:
        """free + cached-free + owned + null = total, in every group, with the right owners.

        Raises:
            RuntimeError: naming group, block and counts. It costs a pass over all blocks: for tests and debugging.
        """
        for group, pool in enumerate(self.pools):
            held = Counter(block_id for blocks in self._blocks.values() for block_id in blocks[group])
            held.update(self.holds.owned(group))
            for request, blocks in self._blocks.items():
                if len(set(blocks[group])) != len(blocks[group]):
                    raise RuntimeError(
                        f"request {request.request_id!r} holds a block twice in group {group}: {blocks[group]}"
                    )
            try:
                pool.check_accounting(held)
            except RuntimeError as error:
                raise RuntimeError(f"group {group}: {error}") from None

    def _enter_epoch(self, request: Request) -> None:
        """What it computes from here on belongs to the cache as it is since its last reset."""
        if request.hash_epoch != self._epoch:
            request.hash_epoch = self._epoch
            request.block_hashes.clear()

    def _extend_hashes(self, request: Request) -> None:
        self._enter_epoch(request)
        hashes, salt = request.block_hashes, request.cache_salt
        if hashes:
            parent = hashes[-1]
        else:
            parent = chain_root(self._epoch, () if salt is None else (("cache_salt", salt),))
        extend_chain(hashes, request.all_token_ids, self._hash_block_size, parent)
