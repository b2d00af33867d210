"""The GPU compiler for machines without a GPU: XLA's CUDA plugin, ptxas and nvdisasm, in a folder of the user's cache.

They stay out of the project's environment, where the plugin would be loaded by every program that imports JAX. Only
the processes that compile for a GPU get the folder on their path, see `environment`. The plugin needs none of NVIDIA's
libraries for that, so what it depends on isn't installed: 0.3 GB are downloaded instead of 3.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import platformdirs

# One toolkit for all, so that figures are comparable between machines: CUDA 13, since Mosaic's causal kernels are
# miscompiled by the CUDA 12.8.0 to 12.9.0 toolkits. 13.0 is the oldest that JAX's cuda13 packages accept.
# nvdisasm has no 13.0 package; it reads what every ptxas writes.
TOOLS = {"nvidia-cuda-nvcc": "13.0.88", "nvidia-nvvm": "13.0.88", "nvidia-cuda-nvdisasm": "13.2.86"}


class CompilerUnavailable(Exception):
    """The GPU compiler isn't here and could not be installed; the message says why."""


@dataclass(frozen=True)
class GpuCompiler:
    """An installed compiler.

    Attributes:
        folder: what goes on the path of compiling processes.
        versions: of its packages, by name.
        installed_now: this call installed it.
    """

    folder: Path
    versions: dict[str, str]
    installed_now: bool

    @property
    def toolkit(self) -> Path:
        return self.folder / "nvidia" / "cu13"

    @property
    def ptxas(self) -> Path:
        return self.toolkit / "bin" / "ptxas"

    @property
    def nvdisasm(self) -> Path:
        return self.toolkit / "bin" / "nvdisasm"

    def environment(self, dumps: Path) -> dict[str, str]:
        """Environment of a process that compiles for a GPU and leaves what the compilers say in `dumps`.

        Its JAX computes on the CPU; a GPU in the machine is left alone.
        """
        root = Path(__file__).resolve().parents[2]
        mosaic = dumps / "mosaic"
        mosaic.mkdir(parents=True, exist_ok=True)
        flags = (
            f"--xla_dump_to={dumps / 'xla'} --xla_dump_hlo_as_text --xla_dump_emitter_re=ptx"
            f" --xla_gpu_cuda_data_dir={self.toolkit}"
        )
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "MOSAIC_GPU_"))},
            "PYTHONPATH": os.pathsep.join((str(root), str(self.folder))),
            "PATH": os.pathsep.join((str(self.toolkit / "bin"), os.environ.get("PATH", ""))),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "MOSAIC_GPU_DUMP_TO": str(mosaic),
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_MLIR_PASSES": "1",
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }


def requirements() -> dict[str, str]:
    """Packages and versions to install: the plugin of this very version of JAX, and the tools.

    Where the environment has a plugin of its own, as on a machine with a GPU, that one compiles: JAX takes one only.
    """
    if any(find_spec(f"jax_cuda{major}_plugin") is not None for major in (12, 13)):
        return TOOLS
    version = importlib.metadata.version("jax")
    return {"jax-cuda13-plugin": version, "jax-cuda13-pjrt": version, **TOOLS}


def find_compiler() -> GpuCompiler | None:
    """The compiler, if it is installed."""
    versions = requirements()
    folder = _folder(versions)
    return GpuCompiler(folder, versions, installed_now=False) if (folder / "complete").is_file() else None


def ensure_compiler(say: Callable[[str], None] = lambda line: None) -> GpuCompiler:
    """The compiler, installed first if it isn't there: once per version of JAX and Python.

    Args:
        say: told what is being installed, and how long that takes.

    Raises:
        CompilerUnavailable: this isn't Linux, or pip failed.
    """
    found = find_compiler()
    if found is not None:
        return found
    if sys.platform != "linux":
        raise CompilerUnavailable(f"the CUDA plugin of JAX exists for Linux, not for {sys.platform}")
    versions = requirements()
    folder = _folder(versions)
    say(f"installing the GPU compiler, once, into {folder} (0.3 GB): {', '.join(_pins(versions))}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
        work = Path(name, "packages")
        command = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-input"]
        command += ["--only-binary=:all:", "--disable-pip-version-check", "--target", str(work), *_pins(versions)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIP_USER": "0"})
        if done.returncode:
            raise CompilerUnavailable(f"pip could not install {', '.join(_pins(versions))}:\n{done.stderr[-2000:]}")
        (work / "complete").touch()
        try:
            work.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "complete").is_file():
                raise
    return GpuCompiler(folder, versions, installed_now=True)


def _pins(versions: dict[str, str]) -> list[str]:
    return [f"{package}=={version}" for package, version in versions.items()]


def _folder(versions: dict[str, str]) -> Path:
    plugin = versions.get("jax-cuda13-plugin", "tools")
    name = f"{plugin}-cuda{versions['nvidia-cuda-nvcc']}-py{sys.version_info.major}{sys.version_info.minor}"
    return platformdirs.user_cache_path("jaxrunner") / "gpu-compiler" / name
