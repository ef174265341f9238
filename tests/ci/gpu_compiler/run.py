"""Runs on the CPU what XLA compiles for an H100 that is not there.

python run.py FOLDER

FOLDER has modules NAME.hlo, and NAME.npz with their arguments. Each is compiled for the GPU, up to
where kernels are made of it: what XLA leaves out is gone then. The text of that becomes NAME.txt.
With each fusion as a call, it runs on the CPU, where XLA is told to keep all casts, and its
results become NAME.results.npz.

It needs an environment of its own, with `jax`, `jax-cuda12-plugin` and `nvidia-cuda-nvcc-cu12`.
"""

import os
import pathlib
import re
import sys

import jax_cuda12_plugin

_NVCC = pathlib.Path(jax_cuda12_plugin.__file__).parent.parent / "nvidia/cuda_nvcc"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PATH"] = f"{_NVCC / 'bin'}:{os.environ['PATH']}"
# There is no GPU on which kernels could be tried.
os.environ["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={_NVCC} --xla_gpu_autotune_level=0"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from jax._src.lib import _jax, xla_client  # noqa: E402
from jax._src.lib.mlir import ir  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jaxlib import _hlo  # noqa: E402

_ONE_GPU = {"topology_name": "1x1x1", "topology": "1x1x1"}
_H100 = (pathlib.Path(__file__).parent / "h100.txtpb").read_text()
_gpu = topologies.get_topology_desc(platform="cuda", target_config=_H100, **_ONE_GPU).devices[0]
_cpu = jax.devices("cpu")[0]


def _options() -> xla_client.CompileOptions:
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    return options


def _text_of(module: bytes) -> str:
    """Returns a serialized HLO module as text that the compilers take."""
    return _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(module))


def compiled(module: bytes) -> str:
    """Compiles a serialized HLO module for the GPU.

    Args:
        module: the module.

    Returns:
        The optimized module, as XLA prints it.
    """
    with mlir.make_ir_context():
        operations = ir.Module.parse(_text_of(module)).operation
        text = operations.get_asm(large_elements_limit=None)
        # TensorFlow copies results, by an operation that JAX's compiler does not take.
        text = re.sub(
            r"mhlo\.copy (%[\w#]+) : (tensor<[^>]*>)", r"stablehlo.reshape \1 : (\2) -> \2", text
        )
        devices = xla_client.DeviceList((_gpu,))
        executable = _gpu.client.compile(ir.Module.parse(text), devices, _options())
    return executable.hlo_modules()[0].to_string()


def run(text: str, arguments: list[np.ndarray]) -> list[np.ndarray]:
    """Runs an optimized module on the CPU.

    Args:
        text: as `compiled` returns it.
        arguments: of the module.

    Returns:
        Its results.
    """
    text = text.replace("is_scheduled=true, ", "")
    text = re.sub(r"fusion\((.*?)\), kind=\w+, calls=(\S+)", r"call(\1), to_apply=\2", text)
    types = dict(re.findall(r"(%\S+) = (\w+)\[", text))

    def of_values(bitcast: re.Match[str]) -> str:
        result, middle, source = bitcast.groups()
        verb = "reshape" if types[result] == types[source] else "bitcast-convert"
        return f"{result}{middle}{verb}({source})"

    text = re.sub(r"(%\S+)( = \S+ )bitcast\((%[\w.-]+)\)", of_values, text)
    module = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    options = _options()
    options.env_option_overrides = [("xla_allow_excess_precision", False)]
    with mlir.make_ir_context():
        parsed = ir.Module.parse(_text_of(module))
        devices = xla_client.DeviceList((_cpu,))
        executable = _cpu.client.compile_and_load(parsed, devices, options)
    results = executable.execute_sharded([jax.device_put(each, _cpu) for each in arguments])
    shards = results.disassemble_into_single_device_arrays()
    return [np.asarray(of_one_device[0]) for of_one_device in shards]


def main() -> None:
    """Compiles and runs the modules of a folder."""
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.hlo")):
        text = compiled(path.read_bytes())
        path.with_suffix(".txt").write_text(text)
        with np.load(path.with_suffix(".npz")) as arguments:
            results = run(text, [arguments[name] for name in sorted(arguments.files)])
        np.savez(path.with_suffix(".results.npz"), *results)


if __name__ == "__main__":
    main()
