"""What all tests share: --all-models, models by name, hypothesis's settings, a cache of compiled programs."""

import gc
import hashlib
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import platformdirs
import pytest
from hypothesis import HealthCheck, settings

from models.fetch import fetch_model
from models.registry import DEFAULT_MODEL, MODELS

LARGER_MODELS = sorted(MODELS.keys() - {DEFAULT_MODEL})
COMPILATIONS_LIMIT = 2**30  # bytes

settings.register_profile(
    "jaxrunner",
    # The first example of a shape compiles, the next ones don't, so time per example says nothing.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # CI checks a change, so it must not depend on luck; at a desk, new examples every time find more.
    derandomize=os.environ.get("CI") == "true",
    print_blob=True,
)
settings.load_profile("jaxrunner")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-models",
        action="store_true",
        help=f"also run the tests that need {' or '.join(LARGER_MODELS)} (fetches them)",
    )
    parser.addoption(
        "--long-schedules",
        action="store_true",
        help="run the state machine of the host path for a hundred times as many schedules (minutes to an hour)",
    )
    parser.addoption(
        "--random-requests",
        type=int,
        default=60,
        metavar="N",
        help="how many requests tests/jaxrunner/test_random_requests.py runs",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs between runs: most of a test's time is XLA's."""
    folder = platformdirs.user_cache_path("jaxrunner") / "test-compilations" / _processor()
    if sum(file.stat().st_size for file in folder.glob("*") if file.is_file()) > COMPILATIONS_LIMIT:
        shutil.rmtree(folder, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _processor() -> str:
    """A name for this kind of CPU: code compiled for one may use instructions that another lacks."""
    cpuinfo = Path("/proc/cpuinfo")
    facts = [platform.machine(), platform.processor()]
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        facts += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("larger_model"):
            if len(marker.args) != 1 or marker.args[0] not in LARGER_MODELS:
                raise pytest.UsageError(f"{item.nodeid}: larger_model takes one of {LARGER_MODELS}, got {marker.args}")
            if not config.getoption("--all-models"):
                reason = f"needs {marker.args[0]}: run scripts/test --all-models"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def nothing_in_memory_from_other_files() -> None:
    """Each file starts in a process that has compiled nothing: what JAX finds in memory never hangs on other files."""
    gc.collect()  # runners and models of the file before
    jax.clear_caches()


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """A function from a registered model's name to its file, fetched if it isn't there yet."""
    return lambda name: fetch_model(name)[0]


@pytest.fixture(autouse=True)
def larger_models(request: pytest.FixtureRequest) -> None:
    """The models that a test is marked with are there, also for tests that load them by name."""
    for marker in request.node.iter_markers("larger_model"):
        fetch_model(marker.args[0])


@pytest.fixture(scope="session")
def default_model() -> str:
    """The default model's name, for tests that load it by name: it's there, fetched if it wasn't."""
    fetch_model(DEFAULT_MODEL)
    return DEFAULT_MODEL
