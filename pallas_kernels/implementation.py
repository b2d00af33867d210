"""What an attention implementation is, what a model sees of one, and how any kernel's implementation is chosen.

Choosing is open: an implementation that does not take a case says why, and the choice falls to the next, keeping
the reasons. Naming one that refuses is an error with its reason; nothing is ever replaced silently.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from pallas_kernels.configurations import KernelConfiguration
from pallas_kernels.head_norms import HeadNorms
from pallas_kernels.metadata import CommonAttentionMetadata, KVCache

if TYPE_CHECKING:
    from pallas_kernels.rope import RopeTable


class AttentionSupport(enum.Enum):
    """Which batches an implementation can take inside one compiled step of fixed shape (vLLM's graph support)."""

    ALWAYS = "always"  # any mix of prefill and decode
    UNIFORM_BATCH = "uniform_batch"  # every request has the same number of query tokens
    SINGLE_TOKEN = "single_token"  # every request has one query token
    NEVER = "never"  # only outside a compiled step


@dataclass(frozen=True)
class AttentionLayer:
    """Static facts of one attention layer.

    With window W the query at position p sees the keys p-W+1 .. p (W keys, itself among them).
    Soft cap c turns a scaled score s into c * tanh(s / c). `group` is the cache group that the layer belongs to.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    group: int = 0

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_dim) < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"layer {self.name!r}: num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads}), and head_dim ({self.head_dim}) at least 1"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"layer {self.name!r}: window must be at least 1 or None, not {self.window}")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"layer {self.name!r}: soft_cap must be above 0 or None, not {self.soft_cap}")


@dataclass(frozen=True)
class GroupSpec:
    """Static facts of a cache group, the layers that share one block table: what `build` may specialise on."""

    block_size: int
    layers: tuple[AttentionLayer, ...] = ()  # empty: not known to the builder


class AttentionImplementation(Protocol):
    """One way of computing paged attention. `build` and `attend` are pure and run inside the compiled step."""

    @property
    def name(self) -> str: ...

    @property
    def support(self) -> AttentionSupport: ...

    def refuses(self, layer: AttentionLayer, block_size: int, dtype: DTypeLike, platform: str) -> str | None:
        """Why this implementation does not take the layer on a cache of this block size and dtype; None if it does."""
        ...

    def build(self, common: CommonAttentionMetadata, group: GroupSpec, common_prefix_len: int = 0) -> Any:
        """The pytree that `attend` takes. Built once a step for all layers of a group: work maps belong here."""
        ...

    def update_block_table(
        self, metadata: Any, block_table: Int32[Array, "R W"], slot_mapping: Int32[Array, "T"]
    ) -> Any:
        """Metadata for another group that differs in these two alone, without building anew."""
        ...

    def attend(
        self,
        q: Float[Array, "T H D"],
        cache: KVCache,
        metadata: Any,
        layer: AttentionLayer,
        sinks: Float[Array, "H"] | None = None,
    ) -> Float[Array, "T H D"]:
        """Attention of each token's query over its request's keys in the cache; zeros for padding tokens."""
        ...

    def configurations(self) -> Iterable[KernelConfiguration]:
        """All of its GPU kernels that a step can pick, for `scripts/check_kernels.py`; empty if it has none."""
        ...


@dataclass(frozen=True)
class StepAttention:
    """What a model sees of a cache group within one step: write this step's keys and values, then attend."""

    implementation: AttentionImplementation
    metadata: Any  # what implementation.build returned
    slot_mapping: Int32[Array, "T"]

    def __call__(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T Hkv D"],
        v: Float[Array, "T Hkv D"],
        cache: KVCache,
        layer: AttentionLayer,
        sinks: Float[Array, "H"] | None = None,
        rope: "RopeTable | None" = None,
        norms: HeadNorms | None = None,
    ) -> tuple[Float[Array, "T H D"], KVCache]:
        """(attention output, the cache with k and v written). With a table q and k are rotated first, and before
        that, with norms, each of their heads normalised.

        Raises:
            ValueError: the implementation or the write refuses; norms without a table. The message names the layer.
        """
        # Without its name a layer equals the others of its kind, so a step's attention is traced and lowered once
        # for all of them: for 30 layers that saves seconds a shape, also of what the compilation cache holds already.
        kind = replace(layer, name="")
        try:
            return _write_and_attend(
                self.implementation, kind, q, k, v, cache, self.metadata, self.slot_mapping, sinks, rope, norms
            )
        except ValueError as error:
            raise ValueError(f"layer {layer.name!r}: {error}") from error


@partial(jax.jit, static_argnums=(0, 1))
def _write_and_attend(
    implementation: AttentionImplementation,
    layer: AttentionLayer,
    q: Float[Array, "T H D"],
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    cache: KVCache,
    metadata: Any,
    slot_mapping: Int32[Array, "T"],
    sinks: Float[Array, "H"] | None,
    rope: "RopeTable | None",
    norms: HeadNorms | None,
) -> tuple[Float[Array, "T H D"], KVCache]:
    from pallas_kernels.rope import rope_and_write_kv_cache  # they build on this module
    from pallas_kernels.write_kv_cache import write_kv_cache

    # A step on the reference is differentiable, and so must the write be.
    write = "reference" if implementation.name == "reference" else "auto"
    if norms is not None and rope is None:
        raise ValueError("norms of heads are applied before a rotation: give its table as well (rope=)")
    if rope is None:
        cache = write_kv_cache(k, v, cache, slot_mapping, implementation=write)
    else:
        q, cache = rope_and_write_kv_cache(q, k, v, rope, cache, slot_mapping, norms=norms, implementation=write)
    return implementation.attend(q, cache, metadata, layer, sinks), cache


class Kernel(NamedTuple):
    """One implementation of a kernel that is a plain function. `refuses()` gives the reason, or None.

    `configurations()` lists the GPU kernels behind it, for `scripts/check_kernels.py`.
    """

    name: str
    function: Callable[..., Any]
    refuses: Callable[[], str | None] = lambda: None
    configurations: Callable[[], Iterable[KernelConfiguration]] = tuple


def choose_kernel(what: str, kernels: Sequence[Kernel], requested: str = "auto") -> tuple[Kernel, list[str]]:
    """The requested kernel, or the first that does not refuse; with the refusals on the way, as "name: reason".

    Raises:
        ValueError: the requested one is unknown or refuses, or all refuse; the message carries the reasons.
    """
    return _choose(what, [(kernel.name, kernel, kernel.refuses) for kernel in kernels], requested)


def choose_attention(
    layers: Sequence[AttentionLayer],
    block_size: int,
    dtype: DTypeLike,
    platform: str,
    requested: str = "auto",
    implementations: Sequence[AttentionImplementation] | None = None,
) -> tuple[AttentionImplementation, list[str]]:
    """One implementation for all of `layers` (a cache group), on a cache of this block size and dtype.

    Args:
        platform: where it will run, as `jax.default_backend()` names it: "cpu", "gpu" (NVIDIA), ...
        requested: the name of an implementation, or "auto": the first of the list that refuses no layer.
        implementations: the candidates, best first; those of `pallas_kernels.paged_attention` when not given.

    Returns:
        (implementation, refusals): a refusal is "name: reason", of those that were passed over.

    Raises:
        ValueError: the requested one is unknown or refuses, or all refuse; the message carries the reasons.
    """
    if implementations is None:
        from pallas_kernels.paged_attention import IMPLEMENTATIONS  # they build on this module

        implementations = IMPLEMENTATIONS

    def refusal(implementation: AttentionImplementation) -> Callable[[], str | None]:
        def refuses() -> str | None:
            for layer in layers:
                reason = implementation.refuses(layer, block_size, jnp.dtype(dtype), platform)
                if reason is not None:
                    return f"layer {layer.name!r}: {reason}"
            return None

        return refuses

    candidates = [(each.name, each, refusal(each)) for each in implementations]
    return _choose("paged_attention", candidates, requested)


def _choose[Candidate](
    what: str, candidates: Sequence[tuple[str, Candidate, Callable[[], str | None]]], requested: str
) -> tuple[Candidate, list[str]]:
    names = [name for name, _, _ in candidates]
    if requested != "auto":
        candidates = [candidate for candidate in candidates if candidate[0] == requested]
        if not candidates:
            raise ValueError(f"{what} has no implementation {requested!r}; there is: auto, {', '.join(names)}")
    refusals: list[str] = []
    for name, candidate, refuses in candidates:
        reason = refuses()
        if reason is None:
            return candidate, refusals
        refusals.append(f"{name}: {reason}")
    raise ValueError(f"no implementation of {what} takes this case (asked for {requested!r}). " + "; ".join(refusals))
