"""A GPU to compile for that isn't there: what XLA asks to know of it, as a mesh to lower and compile on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.gpus import Gpu

# What no kernel choice depends on: XLA wants a number, and the driver is one that the toolkit of `compiler` needs.
_CUDA, _CUDNN = "13.0.0", "9.12.0"


def target_config(gpu: Gpu) -> str:
    """XLA's GpuTargetConfigProto of a GPU, in text form; the field names are XLA's."""
    major, minor = gpu.capability
    threads_per_sm = 1536 if (major, minor) in ((8, 6), (8, 9)) else 2048
    accelerated = "ACCELERATED_FEATURES" if gpu.arch.endswith("a") else "NONE"
    cudnn = "  ".join(
        f"{part}: {value}" for part, value in zip(("major", "minor", "patch"), _CUDNN.split("."), strict=True)
    )
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: {threads_per_sm}
  shared_memory_per_block: 49152  shared_memory_per_block_optin: {gpu.shared_bytes}
  shared_memory_per_core: {gpu.shared_bytes + 1024}
  core_count: {gpu.num_sms}  fpus_per_core: {64 if (major, minor) == (8, 0) else 128}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  memory_bandwidth: {int(gpu.memory_bytes_per_s)}  l2_cache_size: {gpu.l2_bytes}
  device_memory_size: {gpu.memory_bytes}  clock_rate_ghz: 1.7
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {accelerated} }}
  name: "{gpu.kind}"  driver_version: "{_CUDA}"  runtime_version: "{_CUDA}"
  compile_time_toolkit_version: "{_CUDA}"  dnn_version: "{_CUDNN}"
}}
platform_name: "CUDA"
dnn_version_info {{ {cudnn} }}
device_description_str: "{gpu.kind}"
"""


def target_mesh(gpu: Gpu) -> Mesh:
    """A mesh of one such GPU. Lower inside `jax.set_mesh` of it: kernels ask the mesh which GPU they are for.

    It needs the CUDA plugin on the path, and so a process that `GpuCompiler.environment` was given to.
    """
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=target_config(gpu))
    return Mesh(np.array(topology.devices).reshape(1), ("x",))


def placed(tree: Any, mesh: Mesh) -> Any:
    """The shapes of a pytree's leaves, as of arrays on the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)
