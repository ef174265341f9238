"""Steps and layers compile for a GPU that is not there. `.ci/run gpu` has the compiler for it."""

import functools
import os
import pathlib

import pytest
import tensorflow as tf

import keras_mp
from benchmarks import gpu_compiled, gpu_compiled_steps, gpu_targets
from tests.common import once
from tests.kernels.stock_layers import LAYERS, inputs_of
from tests.op_autocast import operations

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


def _calls():
    """Functions, and what they are called on, by name. Layers have their weights."""
    for name, (make, _) in LAYERS.items():
        layer, inputs = make(), inputs_of(name)
        # Symbolic: this CPU may have no kernel in 16 bits.
        layer(*(tf.keras.Input(x.shape[1:], x.shape[0], dtype=x.dtype) for x in inputs))
        is_trained = {"training": True} if name == "BatchNormalization" else {}
        yield name, functools.partial(layer, **is_trained), inputs
    for group in operations.GROUPS.values():
        for name, function in group.items():
            # XLA has no gradient of the last one.
            if name not in (*operations.NOT_IN_XLA, "image.resize nearest"):
                yield name, function, [tf.linspace([0.1] * 4, [0.9] * 4, 4)]


def _all_of(calls, dtype):
    def compute(arguments):
        results = []
        for (_, function, _), tensors in zip(calls, arguments, strict=True):
            tensors = [tf.cast(x, dtype) if x.dtype.is_floating else x for x in tensors]
            with tf.GradientTape() as tape, keras_mp.autocast_scope(dtype):
                tape.watch([x for x in tensors if x.dtype.is_floating])
                found = tf.nest.flatten(function(*tensors))
            floating = [each for each in found if each.dtype.is_floating]
            gradients = tape.gradient(floating, tensors, unconnected_gradients="zero")
            results.append([found, gradients])
        return results

    return compute


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_layers_and_functions_compile(dtype, compile_for):
    """What XLA compiles in float32. Many are in one module, which takes less time."""
    with keras_mp.policy_scope(f"mixed_{dtype}"), gpu_compiled_steps.as_on_a_gpu():
        calls = list(_calls())
        groups = [calls[i : i + 12] for i in range(0, len(calls), 12)]
        hlo_of = {
            ", ".join(name for name, *_ in group): gpu_compiled_steps.hlo(
                _all_of(group, dtype), [tensors for *_, tensors in group]
            )
            for group in groups
        }
    compile_for("H100", hlo_of)
