"""Compiles HLO for a GPU or a TPU that is not there, and counts what would run.

python gpu_compiler.py TARGET FOLDER FILE...

It runs in the environment of `gpu_compiler.txt`, and imports nothing of this package. TARGET is the
file with the description of a GPU, or "tpu:" and the name of a topology. Each FILE is the HLO of a
function, serialized. For each a line of JSON is printed. What XLA has made of it is written to
FOLDER, unless that is "-".
"""

import collections
import json
import os
import pathlib
import re
import sys
from typing import Any

TPU = "tpu:"
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][a-z0-9-]*)\(",
    re.MULTILINE,
)
_DTYPE = re.compile(r"\(?([a-z]+[0-9]*(?:e[0-9a-z]+)?)\[")
_LIBRARIES = ("gemm", "matmul", "conv", "cudnn")
# They start nothing on the device, or are counted by themselves.
_NO_KERNELS = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
    *("copy-done", "partition-id", "replica-id", "after-all", "opt-barrier", "call"),
)
_HOST = "S(5)"


def prepare() -> None:
    """Sets the environment in which JAX has the compilers, before it is imported."""
    import importlib.util

    os.environ["JAX_PLATFORMS"] = "cpu"
    # Without a TPU it would ask the network which one this is.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    found = importlib.util.find_spec("nvidia.cuda_nvcc")
    for folder in [] if found is None else list(found.submodule_search_locations or ()):
        os.environ["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
        # There is no GPU to time kernels on: those that XLA takes by default are compiled.
        flags = f"--xla_gpu_cuda_data_dir={folder} --xla_gpu_autotune_level=0"
        os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"


def device_of(target: str) -> Any:
    """Returns the device that is compiled for, which is a description only."""
    from jax.experimental import topologies

    if target.startswith(TPU):
        found = topologies.get_topology_desc(platform="tpu", topology_name=target[len(TPU) :])
    else:
        found = topologies.get_topology_desc(
            *("1x1x1", "cuda"), topology="1x1x1", target_config=pathlib.Path(target).read_text()
        )
    return found.devices[0]


def compiled(hlo: bytes, device: Any) -> Any:
    """Compiles a serialized module of HLO for a device."""
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax, xla_client
    from jax._src.lib.mlir import ir

    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    with mlir.make_ir_context():
        text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(hlo))
        text = ir.Module.parse(text).operation.get_asm(large_elements_limit=None)
        # TensorFlow copies results with an operation that JAX does not register.
        copies = r"mhlo\.copy (%[\w#]+) : (tensor<[^>]*>)"
        module = ir.Module.parse(re.sub(copies, r"stablehlo.reshape \1 : (\2) -> \2", text))
        return device.client.compile(module, xla_client.DeviceList((device,)), options)


def counts(text: str) -> dict[str, Any]:
    """Counts what a compiled module runs.

    Args:
        text: str. The module, as XLA prints it.

    Returns:
        dict of "kernels", of which "in_conditions" only run in a branch; "copies" within the memory
        of the device, "to_host" and "conditions"; "products" by dtype, matrix products and
        convolutions; "roundings", conversions to 16 bits, by dtype.
    """
    entry = text[text.index("\nENTRY ") :]
    bodies = dict(_bodies(text))
    branches = "".join(
        bodies.get(name, "")
        for line in re.findall(r"(?:branch_computations=\{|(?:true|false)_computation=).*", text)
        for name in re.findall(r"%?([\w.-]+)", line)
    )
    ops = collections.Counter(each["op"] for each in _INSTRUCTION.finditer(entry))
    in_branches = _kernels(branches)
    dtypes = {each["name"]: _dtype(each["type"]) for each in _INSTRUCTION.finditer(text)}
    products: collections.Counter[str] = collections.Counter()
    for each in _INSTRUCTION.finditer(text):
        line = text[each.start() : text.find("\n", each.end())]
        target = re.search(r'custom_call_target="([^"]*)"', line)
        is_library = target is not None and any(name in target[1].lower() for name in _LIBRARIES)
        if each["op"] in ("dot", "convolution") or (each["op"] == "custom-call" and is_library):
            operand = re.match(
                r"(?:[a-z0-9]+\[[^]]*\]\S* )?%?([\w.-]+)", line.partition(f"{each['op']}(")[2]
            )
            products[dtypes.get(operand[1], "") if operand else ""] += 1
    rounded = collections.Counter(
        _dtype(each["type"])
        for each in _INSTRUCTION.finditer(text)
        if each["op"] == "convert" and _dtype(each["type"]) in ("f16", "bf16")
    )
    return {
        "kernels": _kernels(entry) + in_branches,
        "in_conditions": in_branches,
        "copies": ops["copy"] + ops["copy-start"],
        "to_host": sum(_HOST in line for line in entry.splitlines() if "copy" in line),
        "conditions": text.count(" conditional("),
        "products": dict(products),
        "roundings": dict(rounded),
    }


def _bodies(text: str) -> list[tuple[str, str]]:
    starts = list(_COMPUTATION.finditer(text))
    ends = [each.start() for each in starts[1:]] + [len(text)]
    return [(each[1], text[each.end() : end]) for each, end in zip(starts, ends, strict=True)]


def _kernels(text: str) -> int:
    return sum(each["op"] not in _NO_KERNELS for each in _INSTRUCTION.finditer(text))


def _dtype(kind: str) -> str:
    found = _DTYPE.match(kind)
    return found[1] if found else ""


def main() -> None:
    """Compiles the files that are named on the command line."""
    target, folder, *files = sys.argv[1:]
    prepare()
    device = device_of(target)
    for path in map(pathlib.Path, files):
        found: dict[str, Any] = {"name": path.stem}
        try:
            executable = compiled(path.read_bytes(), device)
            text = executable.hlo_modules()[0].to_string()
            found.update(counts(text))
            found["temporary"] = executable.get_compiled_memory_stats().temp_size_in_bytes
            if folder != "-":
                pathlib.Path(folder, f"{path.stem}.txt").write_text(text)
        except Exception as error:  # Of XLA, whatever it is: the other files are compiled, too.
            found["error"] = " ".join(str(error).split())[:300]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
