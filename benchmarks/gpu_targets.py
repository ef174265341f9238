"""GPUs and TPUs to compile for, as XLA's compiler takes them. The figures are their makers'."""

from typing import NamedTuple

from benchmarks import gpu_compiler


class Gpu(NamedTuple):
    """What XLA asks about a GPU.

    Attributes:
        name: str.
        capability: its compute capability.
        cores: int. Streaming multiprocessors.
        units: int. Of each, the units for float32.
        threads: int. Of each, at most.
        shared: int. Of each, bytes of shared memory; a block may take all but one KiB of them.
        cache: int. Bytes of the second cache.
        memory: int. Bytes.
        bandwidth: int. Bytes a second.
        gigahertz: float.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    units: int
    threads: int
    shared: int
    cache: int
    memory: int
    bandwidth: int
    gigahertz: float


GPUS = {
    "H100": Gpu(
        *("NVIDIA H100", (9, 0), 132, 128, 2048, 228 << 10, 50 << 20, 80_000_000_000),
        *(3_350_000_000_000, 1.98),
    ),
    "A100": Gpu(
        *("NVIDIA A100", (8, 0), 108, 64, 2048, 164 << 10, 40 << 20, 80_000_000_000),
        *(2_039_000_000_000, 1.41),
    ),
    "T4": Gpu(
        *("Tesla T4", (7, 5), 40, 64, 1024, 64 << 10, 4 << 20, 16_000_000_000),
        *(320_000_000_000, 1.59),
    ),
}
TPUS = {"TPU v5e": f"{gpu_compiler.TPU}v5e:2x2"}
TARGETS = (*GPUS, *TPUS)


def description(gpu: Gpu) -> str:
    """Returns the text that describes a GPU to XLA's compiler.

    Args:
        gpu: `Gpu`.
    """
    major, minor = gpu.capability
    optin = gpu.shared - 1024 if major >= 8 else gpu.shared
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": gpu.shared,
        "shared_memory_per_block_optin": optin,
        "threads_per_core_limit": gpu.threads,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": gpu.bandwidth,
        "l2_cache_size": gpu.cache,
        "clock_rate_ghz": gpu.gigahertz,
        "device_memory_size": gpu.memory,
        "registers_per_core_limit": 64 << 10,
        "registers_per_block_limit": 64 << 10,
    }
    lines = [f"  {name}: {value}" for name, value in fields.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    return "\n".join(
        [
            *("gpu_device_info {", *lines, "}", 'platform_name: "CUDA"'),
            "dnn_version_info { major: 9 minor: 3 patch: 0 }",
            f'device_description_str: "{gpu.name}"\n',
        ]
    )
