"""What is static in a Mosaic kernel for one kind of layer: tile sizes, pipeline depth, number of workers.

A tile is a run of query tokens of one request for one kv head: its tokens times the group's heads are the rows of the
products, 64 rows for each compute warpgroup, so every group size packs the tensor cores as well as it can: G = 3 fills
63 rows with 21 tokens.
"""

from dataclasses import dataclass
from typing import Any

ROWS = 64  # of a compute warpgroup: M of wgmma, and the 16 rows of an mma for each of its four warps


@dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for, beside shapes.

    Attributes:
        num_tokens: T of the step.
        group: query heads per kv head, G.
        block_size: keys of a page.
        window, causal: which keys a query sees.
        warpgroups: that compute, 1 or 2.
        block_keys: keys of a K or V tile, a multiple or a divisor of block_size.
        stages: K and V tiles in the ring.
        workers: blocks for each kv head; they share the step's work evenly.
        by_token: the order of a warpgroup's rows: the heads of a token side by side, else the tokens of a head.
        rows: of a compute warpgroup, a multiple of ROWS.
    """

    num_tokens: int
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int | None
    causal: bool
    warpgroups: int
    block_keys: int
    stages: int
    workers: int
    by_token: bool = False
    rows: int = ROWS

    @property
    def tokens_per_warpgroup(self) -> int:
        return self.rows // self.group

    @property
    def tokens_per_tile(self) -> int:
        return self.tokens_per_warpgroup * self.warpgroups

    @property
    def box(self) -> int:
        """Tokens whose queries a warpgroup loads together."""
        return min(self.tokens_per_warpgroup, self.num_tokens)

    @property
    def staged(self) -> int:
        """Columns of the staging buffer."""
        return min(self.head_dim, 128)

    @property
    def copied_keys(self) -> int:
        """Keys that one copy brings: a page, or as much of it as a tile has."""
        return min(self.block_size, self.block_keys)

    @property
    def copies(self) -> int:
        """Copies for a K or V tile."""
        return self.block_keys // self.copied_keys

    def row_of(self, token: Any, head: Any) -> Any:
        """A warpgroup's row of a token among the box's, and of a query head among the group's."""
        return token * self.group + head if self.by_token else head * self.box + token
