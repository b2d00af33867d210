"""The GPU compiler, for tests that compile for a GPU."""

import os

import pytest

from scripts.gpu.compiler import CompilerUnavailable, GpuCompiler, ensure_compiler


@pytest.fixture(scope="session")
def gpu_compiler() -> GpuCompiler:
    """Installed if it wasn't there. Where it can't be, the tests that need it are left out; but not in CI."""
    try:
        return ensure_compiler(print)
    except CompilerUnavailable as error:
        reason = f"nothing was compiled for a GPU: the compiler can't be had: {error}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
