"""GPUs and TPUs to compile for, as XLA's compiler takes them. The figures are their makers'."""

from typing import Any

from benchmarks import gpu_compiler

# In the names of XLA's `GpuDeviceInfoProto`, but for the name and the compute capability.
_EVERY_GPU = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 << 10,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "registers_per_core_limit": 64 << 10,
    "registers_per_block_limit": 64 << 10,
}
GPUS: dict[str, dict[str, Any]] = {
    "H100": {
        **{"name": "NVIDIA H100", "capability": (9, 0), "core_count": 132, "fpus_per_core": 128},
        **{"threads_per_core_limit": 2048, "clock_rate_ghz": 1.98},
        **{"shared_memory_per_core": 228 << 10, "shared_memory_per_block_optin": 227 << 10},
        **{"l2_cache_size": 50 << 20, "device_memory_size": 80_000_000_000},
        "memory_bandwidth": 3_350_000_000_000,
    },
    "A100": {
        **{"name": "NVIDIA A100", "capability": (8, 0), "core_count": 108, "fpus_per_core": 64},
        **{"threads_per_core_limit": 2048, "clock_rate_ghz": 1.41},
        **{"shared_memory_per_core": 164 << 10, "shared_memory_per_block_optin": 163 << 10},
        **{"l2_cache_size": 40 << 20, "device_memory_size": 80_000_000_000},
        "memory_bandwidth": 2_039_000_000_000,
    },
    "T4": {
        **{"name": "Tesla T4", "capability": (7, 5), "core_count": 40, "fpus_per_core": 64},
        **{"threads_per_core_limit": 1024, "clock_rate_ghz": 1.59},
        **{"shared_memory_per_core": 64 << 10, "shared_memory_per_block_optin": 64 << 10},
        **{"l2_cache_size": 4 << 20, "device_memory_size": 16_000_000_000},
        "memory_bandwidth": 320_000_000_000,
    },
}
TPUS = {"TPU v5e": f"{gpu_compiler.TPU}v5e:2x2"}
TARGETS = (*GPUS, *TPUS)


def description(name: str) -> str:
    """Returns the text that describes a GPU to XLA's compiler.

    Args:
        name: str. A key of `GPUS`.
    """
    fields = {**_EVERY_GPU, **GPUS[name]}
    device, (major, minor) = fields.pop("name"), fields.pop("capability")
    return "\n".join(
        [
            "gpu_device_info {",
            *(f"  {field}: {value}" for field, value in fields.items()),
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
            *("}", 'platform_name: "CUDA"', "dnn_version_info { major: 9 minor: 3 patch: 0 }"),
            f'device_description_str: "{device}"\n',
        ]
    )
