"""The blocks of one cache group: lent, shared, and kept for a while after their last owner has gone.

Every block is in one of four states. *null*: block 0, never lent; padding points at it. *owned*: one or more
requests hold it. *cached-free*: nobody holds it, but its content can still be found by hash. *free*: nobody
holds it and nobody can find it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

NULL_BLOCK_ID = 0


class BlockPool:
    """Block ids 1 .. num_blocks - 1 to lend. Ids only; the arrays are elsewhere.

    Free blocks without content go out first, then cached-free ones, least recently released first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is never lent), got {num_blocks}")
        self.num_blocks = num_blocks
        self._owners = [0] * num_blocks  # requests that hold the block
        self._hash: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, NULL_BLOCK_ID, -1))  # a stack: low ids first
        # In order of release. A dict would do, but finding its first key slows down with every one removed in
        # front.
        self._cached_free: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` could lend now."""
        return len(self._free) + len(self._cached_free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by hash, owned ones included."""
        return len(self._by_hash)

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this content, if any."""
        return self._by_hash.get(block_hash)

    def num_owners(self, block_id: int) -> int:
        return self._owners[block_id]

    def num_unowned(self, block_ids: Iterable[int]) -> int:
        """How many of these nobody holds: the ones that ``share`` would take out of the free blocks."""
        return sum(not self._owners[block_id] for block_id in block_ids)

    def allocate(self, count: int) -> list[int]:
        """Lend ``count`` blocks whose content is up to the new owner. The caller has looked at
        ``num_free``.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked of a pool with {self.num_free} free of {self.num_blocks}")
        blocks = []
        for _ in range(count):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, _ = self._cached_free.popitem(last=False)
                self._forget(block_id)
            self._owners[block_id] = 1
            blocks.append(block_id)
        return blocks

    def share(self, block_ids: Iterable[int]) -> None:
        """One more owner for blocks that were found by hash."""
        for block_id in block_ids:
            if not self._owners[block_id]:
                del self._cached_free[block_id]
            self._owners[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One owner less for each. The first to be released is the first to lose its content."""
        for block_id in block_ids:
            self._owners[block_id] -= 1
            if self._owners[block_id]:
                continue
            if self._hash[block_id] is None:
                self._free.append(block_id)
            else:
                self._cached_free[block_id] = None

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Let an owned block be found. Its content must be complete.

        Where another block already has this content, that one stays the one to be found.
        """
        if block_hash not in self._by_hash:
            self._hash[block_id] = block_hash
            self._by_hash[block_hash] = block_id

    def forget_all(self) -> None:
        """Nothing can be found any more; owners keep their blocks."""
        self._by_hash.clear()
        self._hash = [None] * self.num_blocks
        self._free.extend(reversed(self._cached_free))
        self._cached_free.clear()

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hash[block_id] = None

    def check_accounting(self, owned: dict[int, int]) -> None:
        """Every block in exactly one state, and the owners those that really hold it.

        Arguments:
            owned: block id -> requests that hold it, counted from the requests' own lists.
        Raises:
            RuntimeError: naming the block and both counts.
        """

        def check(ok: bool, message: str) -> None:
            if not ok:
                raise RuntimeError(f"block accounting is broken: {message}")

        for block_id, count in enumerate(self._owners):
            held = owned.get(block_id, 0)
            check(count == held, f"block {block_id} counts {count} owners, {held} requests hold it")
        free, cached = set(self._free), set(self._cached_free)
        for block_id in free | cached | {NULL_BLOCK_ID}:
            check(block_id not in owned, f"block {block_id} is owned, and also free or the null block")
        for block_id in free:
            check(self._hash[block_id] is None, f"free block {block_id} still has a hash")
        for block_id in cached:
            check(self._hash[block_id] is not None, f"cached-free block {block_id} has no hash")
        found = {block_id: block_hash for block_hash, block_id in self._by_hash.items()}
        noted = {i: block_hash for i, block_hash in enumerate(self._hash) if block_hash is not None}
        check(found == noted, f"blocks found by hash {sorted(found)}, blocks that have one {sorted(noted)}")
        counts = (len(self._free), len(self._cached_free), len(owned), 1)
        check(
            sum(counts) == self.num_blocks and len(free) == len(self._free),
            f"free, cached-free, owned, null = {counts}, in all {self.num_blocks} blocks",
        )
