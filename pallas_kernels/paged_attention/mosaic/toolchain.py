"""Which versions of JAX and CUDA the Mosaic kernels can be compiled with."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

# Loads of plain rows in the layout of a product's results, references as kernel operands, and transposed references.
OLDEST_JAX = (0, 11, 2)
# What the kernels call that JAX 0.11 has not, or not in every version.
CALLED = "store", "mma", "wait_gmem_to_smem"
# ptxas of these miscompiles causal attention (as JAX's own attention_mgpu says): from the first, before the second.
MISCOMPILING = (12, 8, 0), (12, 9, 1)


def cuda_version() -> tuple[int, int, int] | None:
    """The CUDA runtime that XLA's GPU plugin uses; None without a plugin.

    Known without a GPU too: it is the library's own answer.
    """
    from jax._src.lib import cuda_versions  # JAX has no public name for it

    return None if cuda_versions is None else as_version(cuda_versions.cuda_runtime_get_version())


def as_version(number: int) -> tuple[int, int, int]:
    """The runtime's way of writing versions: 12090 is 12.9.0."""
    return number // 1000, number % 1000 // 10, number % 10


def refuses_versions(jax_version: tuple[int, ...], cuda: tuple[int, int, int] | None) -> str | None:
    """Why kernels aren't compiled with these; None if they are. An unknown CUDA is taken to be a good one."""
    if jax_version < OLDEST_JAX:
        return f"it needs JAX {_dotted(OLDEST_JAX)} or newer, this is {_dotted(jax_version)}"
    first, fixed = MISCOMPILING
    if cuda is not None and first <= cuda < fixed:
        return (
            f"CUDA {_dotted(cuda)} miscompiles causal attention (from {_dotted(first)} on, fixed in {_dotted(fixed)})"
        )
    return None


def refuses_names() -> str | None:
    """Why kernels can't be traced with this JAX; None if they can."""
    missing = [f"plgpu.{name}" for name in CALLED if not hasattr(plgpu, name)]
    return f"JAX {jax.__version__} has no {', '.join(missing)}; 0.12 has" if missing else None


def refuses() -> str | None:
    return refuses_versions(jax.__version_info__, cuda_version()) or refuses_names()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
