"""Steps and layers compile for a GPU that is not there. `.ci/run gpu` has the compiler for it."""

import os
import pathlib

import pytest

import keras_mp
from benchmarks import gpu_compiled, gpu_compiled_steps, gpu_targets
from tests.ci import functions_of_keras
from tests.common import once

COMPILER = os.environ.get(gpu_compiled.VARIABLE)
needs_compiler = pytest.mark.skipif(
    not COMPILER, reason=f"{gpu_compiled.VARIABLE} names no environment with XLA's compiler."
)


@once
def test_a_description_has_what_a_gpu_is_known_by():
    text = gpu_targets.description("A100")
    assert "cuda_compute_capability { major: 8 minor: 0 }" in text
    assert "core_count: 108" in text


@pytest.fixture
def compile_for(tmp_path):
    """Compiles HLO by name, and returns the counts and the text of each."""

    def compiled(target, hlo_of):
        files = [tmp_path / f"{i:03}.hlo" for i in range(len(hlo_of))]
        for file, hlo in zip(files, hlo_of.values(), strict=True):
            file.write_bytes(hlo)
        python = gpu_compiled.compiler(COMPILER)
        found = gpu_compiled.compile_for(target, files, python, tmp_path)
        assert not {name: each["error"] for name, each in found.items() if "error" in each}
        return {
            name: {
                **found[file.stem],
                "text": pathlib.Path(tmp_path, f"{file.stem}.txt").read_text(),
            }
            for name, file in zip(hlo_of, files, strict=True)
        }

    return compiled


@needs_compiler
def test_steps_wait_for_nothing(compile_for):
    """The wish of docs/gpus.md: no condition and no copy to the host."""
    kinds = [kind for kind in gpu_compiled_steps.KINDS if "stochastic" not in kind]
    with gpu_compiled_steps.as_on_a_gpu():
        hlo_of = {kind: gpu_compiled_steps.step_of(kind) for kind in kinds}
    found = compile_for("H100", hlo_of)
    for kind in kinds:
        if "Keras's" not in kind:
            assert (found[kind]["conditions"], found[kind]["to_host"]) == (0, 0), kind
    for dtype, short in (("float16", "f16"), ("bfloat16", "bf16")):
        for kind in (f"fit, mixed_{dtype}", f"autocast, {dtype}"):
            assert found[kind]["products"][short] >= 4
    ours, own = found["fit, mixed_bfloat16"], found["fit, Keras's mixed_bfloat16"]
    assert ours["kernels"] <= own["kernels"]
    assert ours["temporary"] <= own["temporary"]


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_layers_activations_and_functions_compile(dtype, compile_for):
    """All that XLA compiles in float32. Many are in one module, which takes less time."""
    with keras_mp.policy_scope(f"mixed_{dtype}"), gpu_compiled_steps.as_on_a_gpu():
        hlo_of = {
            name: gpu_compiled_steps.hlo(compute, arguments)
            for name, (compute, arguments) in functions_of_keras.together(dtype).items()
        }
    compile_for("H100", hlo_of)
