"""Runs on the CPU what XLA compiles for an H100 that is not there.

python run.py FOLDER

FOLDER has modules NAME.hlo, and NAME.npz with their arguments. Each is compiled for the GPU, up to
where kernels are made of it: what XLA leaves out is gone then. The text of that becomes NAME.txt.
With each fusion as a call, it runs on the CPU, where XLA is told to keep all casts, and its
results become NAME.results.npz.

It needs an environment of its own, that of `benchmarks/gpu_compiler.txt`.
"""

import pathlib
import re
import sys

import numpy as np

from benchmarks import gpu_compiler, gpu_targets

gpu_compiler.prepare()

import jax  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from jax._src.lib import _jax, xla_client  # noqa: E402
from jax._src.lib.mlir import ir  # noqa: E402
from jaxlib import _hlo  # noqa: E402

_cpu = jax.devices("cpu")[0]


def _options() -> xla_client.CompileOptions:
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    return options


def _text_of(module: bytes) -> str:
    """Returns a serialized HLO module as text that the compilers take."""
    return _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(module))


def run(text: str, arguments: list[np.ndarray]) -> list[np.ndarray]:
    """Runs an optimized module on the CPU.

    Args:
        text: as XLA prints it.
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
    folder = pathlib.Path(sys.argv[1])
    description = folder / "gpu.txtpb"
    description.write_text(gpu_targets.description("H100"))
    gpu = gpu_compiler.device_of(str(description))
    for path in sorted(folder.glob("*.hlo")):
        text = gpu_compiler.compiled(path.read_bytes(), gpu).hlo_modules()[0].to_string()
        path.with_suffix(".txt").write_text(text)
        with np.load(path.with_suffix(".npz")) as arguments:
            results = run(text, [arguments[name] for name in sorted(arguments.files)])
        np.savez(path.with_suffix(".results.npz"), *results)


if __name__ == "__main__":
    main()
