"""Pages on their way to the ring of K and V tiles, ahead of what is computed."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.mosaic.pieces import Piece
from pallas_kernels.paged_attention.mosaic.plan import Plan
from pallas_kernels.paged_attention.mosaic_sm80.products import Device

Pages = tuple[Array, ...]


@dataclass(frozen=True)
class Ring:
    """The K/V tiles of a piece, which begin anew at slot 0.

    The copies of a tile start when the tile `stages` - 1 before it is about to be computed. A wait says how many copies
    may still be under way, the latest ones: those of the later tiles that were started.

    Attributes:
        k, v: the caches, [N, B, Hkv * D]: only the last two axes of a reference can be a tile that is copied.
        keys, values: [stages, K, D], in shared memory.
        here: of each slot, where the kernel is interpreted.
    """

    k: Any
    v: Any
    table: Any
    head: Array
    keys: Any
    values: Any
    here: Any
    device: Device
    plan: Plan

    def begin(self, piece: Piece) -> Pages:
        """Starts the first tiles; the slots must be free. Returns the pages of the next."""
        for i in range(self.plan.stages - 1):
            j = piece.begin + i
            pl.when(j < piece.end)(partial(self._start_first, piece, j))
        return self.pages(piece, piece.begin + self.plan.stages - 1)

    def take(self, piece: Piece, j: Array, pages: Pages) -> tuple[Array, Pages]:
        """Waits for tile j, whose slot is returned, and until no warp is at an earlier one; starts tile j + stages - 1.

        Args:
            pages: of the tile to start. They are read a tile ahead, so that the wait for them costs nothing.
        """
        slot = self._slot(piece, j)
        most = self.plan.stages - 2  # later tiles that were started
        if self.device.interpreted or most == 0:
            self.device.wait(0, self._here(slot))
        else:
            later = jnp.minimum(piece.end - 1 - j, most)
            for n in range(most + 1):  # a wait has its number in the code
                under_way = n * 2 * self.plan.copies
                pl.when(later == n)(partial(self.device.wait, under_way, self._here(slot)))
        following = j + (self.plan.stages - 1)
        pl.when(following < piece.end)(lambda: self._start(piece, following, pages))
        return slot, self.pages(piece, following + 1)

    def pages(self, piece: Piece, j: Array) -> Pages:
        """The page of each copy of tile j; the row's last page where the tile ends after it."""
        plan = self.plan
        last = lax.div(jnp.maximum(piece.num_keys - 1, 0), jnp.int32(plan.block_size))
        keys = (piece.first_key + j * plan.block_keys + i * plan.copied_keys for i in range(plan.copies))
        return tuple(self.table[piece.row, jnp.minimum(lax.div(key, jnp.int32(plan.block_size)), last)] for key in keys)

    def _start_first(self, piece: Piece, j: Array) -> None:
        self._start(piece, j, self.pages(piece, j))

    def _start(self, piece: Piece, j: Array, pages: Pages) -> None:
        plan, slot = self.plan, self._slot(piece, j)
        # A tile is several pages, or a part of one.
        offset: Any = 0
        if plan.copies == 1:
            offset = lax.rem(piece.first_key + j * plan.block_keys, jnp.int32(plan.block_size))
        columns = pl.ds(self.head * plan.head_dim, plan.head_dim)
        for cache, ring in ((self.k, self.keys), (self.v, self.values)):
            for i, page in enumerate(pages):
                source = cache.at[page, pl.ds(offset, plan.copied_keys), columns]
                to = ring.at[slot, pl.ds(i * plan.copied_keys, plan.copied_keys)]
                self.device.copy(source, to, self._here(slot))

    def _slot(self, piece: Piece, j: Array) -> Array:
        return lax.rem(j - piece.begin, jnp.int32(self.plan.stages))

    def _here(self, slot: Array) -> Any:
        return None if self.here is None else self.here.at[slot]
