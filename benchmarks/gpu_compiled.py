"""What XLA makes of training steps on GPUs and TPUs that are not there.

TensorFlow gives the HLO of a function that XLA compiles; XLA's compiler for GPUs, which is a plugin
of JAX, compiles it for a described GPU, and says what would run: kernels, copies, conditions,
memory. Nothing runs, so there are no times, and kernels that XLA would choose by timing them are
its defaults. The compiler takes 1.2 GB, in an environment of its own.
"""

import json
import os
import pathlib
import subprocess
import tempfile
import venv
from collections.abc import Sequence
from typing import Any

from benchmarks import common, gpu_targets

VARIABLE = "KERAS_MP_GPU_COMPILER"
REQUIREMENTS = pathlib.Path(__file__).parent / "gpu_compiler.txt"
_FOLDER = common.ROOT / ".gpu_compiler"
_COMPILER = pathlib.Path(__file__).parent / "gpu_compiler.py"
_COLUMNS = ("kernels", "in conditions", "copies", "to the host", "temporary MiB")


def compiler(folder: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Returns the Python of the environment with XLA's compiler, which is made if it is missing.

    Args:
        folder: of the environment, or its Python; by default what the environment variable
            `KERAS_MP_GPU_COMPILER` names, or `.gpu_compiler` in the repository.

    Raises:
        SystemExit: it cannot be made here.
    """
    path = pathlib.Path(folder or os.environ.get(VARIABLE) or _FOLDER)
    python = path if path.is_file() else path / "bin" / "python"
    if python.exists():
        return python
    print(f"Installing XLA's compiler for GPUs in {path} (1.2 GB).", flush=True)
    try:
        venv.create(path, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)]
        subprocess.run(install, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        python.unlink(missing_ok=True)  # It would be taken for a complete one.
        raise SystemExit(
            f"XLA's compiler for GPUs could not be installed in {path}. It needs Linux on x86-64, "
            f"Python 3.11 or later, 1.2 GB, and the network for what {REQUIREMENTS.name} names. "
            f"Name an environment that has it with {VARIABLE} or --compiler. Received: {error}"
        ) from error
    return python


def compile_for(
    target: str,
    files: Sequence[pathlib.Path],
    python: pathlib.Path,
    texts: pathlib.Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Compiles HLO for a device that is not there.

    Args:
        target: str. One of `gpu_targets.TARGETS`.
        files: with serialized HLO.
        python: that of `compiler`.
        texts: a folder for what XLA has made of each; by default it is not kept.

    Returns:
        dict by the stem of a file: the counts of `gpu_compiler.counts` and "temporary" bytes; or
        an "error".

    Raises:
        SystemExit: the compiler for this target is not there.
    """
    with tempfile.TemporaryDirectory() as folder:
        described = gpu_targets.TPUS.get(target)
        if described is None:
            described = os.path.join(folder, "gpu.txtpb")
            text = gpu_targets.description(target)
            pathlib.Path(described).write_text(text)
        command = [python, _COMPILER, described, texts or "-", *files]
        done = subprocess.run(
            [str(each) for each in command], capture_output=True, text=True, check=False
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise SystemExit(
            f"XLA's compiler for a {target} ended with an error: {''.join(last)[:300]}"
        )
    return {line.pop("name"): line for line in lines}


def run(
    folder: str | None = None, targets: Sequence[str] = (), only: Sequence[str] = ()
) -> dict[str, Any]:
    """Compiles the steps of both Kerases for each target, and prints tables.

    Args:
        folder: of the environment with the compiler. See `compiler`.
        targets: names of `gpu_targets.TARGETS`. Defaults to all.
        only: what the names of steps begin with. Defaults to all.

    Returns:
        dict by Keras, target and step.
    """
    python = compiler(folder)
    results: dict[str, Any] = {}
    for keras in common.KERASES:
        results[keras] = found = {}
        with tempfile.TemporaryDirectory() as hlo:
            exported = common.in_own_process(
                "benchmarks.gpu_compiled_steps", hlo, *only, keras=keras, on_cpu=True
            )
            files = [pathlib.Path(hlo, file) for file in exported.values()]
            for target in targets or gpu_targets.TARGETS:
                of_file = compile_for(target, files, python)
                found[target] = {
                    name: of_file[pathlib.Path(file).stem] for name, file in exported.items()
                }
                common.print_table(
                    f"Compiled by XLA for a {target} ({keras})",
                    ["", *_COLUMNS, "products", "roundings to 16 bits"],
                    [[name, *_row(each)] for name, each in found[target].items()],
                )
    return results


def _row(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return [found["error"]]
    counts = (found[each] for each in ("kernels", "in_conditions", "copies", "to_host"))
    dtypes = (found[each] for each in ("products", "roundings"))
    return [
        *(f"{each:,}" for each in counts),
        f"{found['temporary'] / 2**20:,.1f}",
        *(
            ", ".join(f"{count} {dtype}" for dtype, count in sorted(each.items()))
            for each in dtypes
        ),
    ]
