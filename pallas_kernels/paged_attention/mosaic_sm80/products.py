"""What a warpgroup does on an Ampere GPU: asynchronous copies, waiting, products by mma.

The one place where compiled and interpreted kernels differ. JAX's interpreter of Mosaic kernels has neither mma nor
copies without a barrier; there each slot of the ring has a barrier, and copies are those of newer GPUs, so that what is
read too early, or overwritten too early, is still found. What runs on a GPU is compiled, and looked at, by
`scripts/check_kernels.py`.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.mosaic.softmax import iota

K = 16  # of an mma, for elements of two bytes
COLUMNS = 32  # of K that are in registers at once


@dataclass(frozen=True)
class Device:
    """Operations of one warpgroup. The names of layouts are those that mma has for its operands."""

    dtype: DTypeLike
    interpreted: bool

    @property
    def left(self) -> Any:
        return plgpu.Layout.MMA_LHS(self.dtype)

    @property
    def right(self) -> Any:
        return plgpu.Layout.MMA_RHS(self.dtype)

    @property
    def matrix(self) -> Any:
        return plgpu.Layout.MMA_ACC(self.dtype)

    @property
    def vector(self) -> Any:
        return self.matrix.reduce(1)

    def copy(self, source: Any, to: Any, here: Any) -> None:
        """Starts a copy to shared memory: one more that is under way."""
        if self.interpreted:
            plgpu.copy_gmem_to_smem(source, to, here)
        else:
            plgpu.copy_gmem_to_smem(source, to, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def wait(self, under_way: int, here: Any) -> None:
        """Waits until no more copies than that, the latest, are under way, and for all warps to be here.

        Args:
            here: the barrier of the copies waited for.
        """
        if self.interpreted:
            plgpu.barrier_wait(here)
            plgpu.commit_smem()
        else:
            plgpu.wait_gmem_to_smem(under_way)

    def meet(self) -> None:
        """All warps have done their reads and writes of shared memory before any goes on."""
        if self.interpreted:
            plgpu.commit_smem()
            return

        from jax.experimental.mosaic import gpu as mgpu

        @plgpu.inline_mgpu()
        def _barrier(_: Any) -> None:
            mgpu.warpgroup_barrier()

        _barrier()

    def scores(self, queries: Any, keys: Any) -> Array:
        """queries [64, D] (registers, or shared memory) @ keys [K, D]^T (shared memory); float32."""
        in_registers = isinstance(queries, Array)
        if self.interpreted:
            q = queries if in_registers else queries[...]
            return jnp.dot(q, keys[...].T, preferred_element_type=jnp.float32)
        rows, head_dim = queries.shape
        s = plgpu.layout_cast(jnp.zeros((rows, keys.shape[0]), jnp.float32), self.matrix)
        for first in range(0, head_dim, COLUMNS):
            columns = slice(first, first + COLUMNS)
            q = queries[:, columns] if in_registers else plgpu.load(queries.at[:, columns], layout=self.left)
            k = plgpu.load(keys.at[:, columns].transpose((1, 0)), layout=self.right)
            s = plgpu.mma(s, q, k)
        return s

    def add_product(self, acc: Array, weights: Array, values: Any, kept: tuple[Array, Array] | None) -> Array:
        """acc [64, D] + weights [64, K] @ values [K, D] (shared memory).

        Args:
            kept: [begin, end) of the values that count; whatever the others are, NaN too, zeros stand for them.
        """
        p = weights.astype(self.dtype)
        if self.interpreted:
            return acc + jnp.dot(p, _zero_outside(kept, values[...], 0, self.right), preferred_element_type=jnp.float32)
        p = _as_left(p, self.matrix, self.left)
        parts = []
        for column in range(0, acc.shape[1], COLUMNS):
            columns = slice(column, column + COLUMNS)
            part = acc[:, columns]
            for first in range(0, values.shape[0], K):
                v = plgpu.load(values.at[first : first + K, columns], layout=self.right)
                part = plgpu.mma(part, p[:, first : first + K], _zero_outside(kept, v, first, self.right))
            parts.append(part)
        return jnp.concatenate(parts, axis=1)


def _zero_outside(kept: tuple[Array, Array] | None, values: Array, first: int, layout: Any) -> Array:
    """The values [K, C], from the one at `first` on, with zeros for those not in [begin, end)."""
    if kept is None:
        return values
    row = iota(values.shape, 0, layout) + first
    return jnp.where((row >= kept[0]) & (row < kept[1]), values, jnp.zeros((), values.dtype))


def _as_left(x: Array, matrix: Any, left: Any) -> Array:
    """A product's result [64, K], rounded, as the left operand of the next: each thread has the right numbers, in the
    right order, and only the name of the layout differs."""
    from jax.experimental.mosaic import gpu as mgpu

    @plgpu.inline_mgpu(arg_types=(matrix,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=left))
    def _renamed(_: Any, x: Any) -> Any:
        layout = left.to_mgpu()
        registers = x.registers.reshape(layout.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=x.is_signed)

    return _renamed(x)
