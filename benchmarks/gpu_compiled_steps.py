"""The steps that `benchmarks.gpu_compiled` compiles, as HLO. It runs once for each Keras.

They are traced as on a machine with a GPU: the kernels of TensorFlow that are wrong on the GPU that
was tried (docs/h200.json) are replaced, and not those of this CPU.
"""

import contextlib
import gc
import json
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from benchmarks import common, models, small_steps, step
from keras_mp.kernels import convolutions, sums, trials
from keras_mp.support import attributes

# Steps of `small_steps`, compiled as a whole.
KINDS = (
    *("float32, no wrapper", "Keras's LossScaleOptimizer", "LossScaleOptimizer, dynamic"),
    *("LossScaleOptimizer, fixed", "GradScaler"),
    *("MasterWeightOptimizer, split", "MasterWeightOptimizer, copy"),
    "MasterWeightOptimizer, stochastic_rounding",
    *("autocast, float16", "autocast, bfloat16"),
    *("fit, Keras's mixed_float16", "fit, mixed_float16"),
    *("fit, Keras's mixed_bfloat16", "fit, mixed_bfloat16"),
)
# XLA has no kernel for cuDNN's recurrent layers, so there is no LSTM.
MODELS = {
    **{name: (name, each) for name, each in models.SIZES["full"].items() if name != "LSTM"},
    "GPT of 12 blocks": ("language model", models.Sizes(12, 768, 16, 512, 32000)),
}
_WRONG = pathlib.Path(__file__).parent.parent / "docs" / "h200.json"


def names() -> list[str]:
    """Returns the names of all steps."""
    return [*KINDS, *(f"{model}, {each}" for model in MODELS for each in common.POLICIES)]


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A context manager in which keras_mp chooses kernels as on a machine with a GPU."""
    found = json.loads(_WRONG.read_text())["check_quick_keras3"]["kernels"]
    wrong = {(each["op"], each["dtype"], each["case"]) for each in found if each["own_is_wrong"]}

    def asks(op: str, kernel: Any, dtype: tf.DType, case: Any, device: str) -> bool:
        del kernel, device
        return (op, dtype.name, str(case)) in wrong

    with contextlib.ExitStack() as stack:
        for name in ("usual_device", "device_type"):
            stack.enter_context(attributes.replaced(trials, name, lambda: "GPU"))
        for table in (sums.TABLE, convolutions.TABLE):
            stack.enter_context(attributes.replaced(table, "_asks", asks))
        yield


def hlo(function: Callable[..., Any], *arguments: Any) -> bytes:
    """Traces a function that XLA compiles, without running it, and returns its HLO.

    Args:
        function: a Python function.
        *arguments: tensors.
    """
    compiled = tf.function(function, autograph=False, jit_compile=True)
    return compiled.experimental_get_compiler_ir(*arguments)(stage="hlo_serialized")


def step_of(name: str) -> bytes:
    """Returns the HLO of a step.

    Args:
        name: str. One of `names`.
    """
    if name in KINDS:
        return hlo(small_steps.STEPS[name].make().python_function, tf.zeros(small_steps.X.shape))
    model = next(each for each in MODELS if name.startswith(f"{each}, "))
    whose, policy = common.POLICIES[name.removeprefix(f"{model}, ")]
    # Keras's guide asks for a head in float32; keras_mp gives float32 outputs by itself.
    head = None if whose == "keras_mp" else "float32"
    return hlo(*step.training_step(*MODELS[model], whose, policy, head=head))


def main() -> None:
    """Writes the HLO of the steps whose names begin as is said; without names, of all."""
    folder, *beginnings = sys.argv[1:]
    chosen = [name for name in names() if name.startswith(tuple(beginnings) or "")]
    warnings.simplefilter("ignore")
    files = {}
    with as_on_a_gpu():
        for i, name in enumerate(chosen):
            files[name] = f"{i:03}.hlo"
            pathlib.Path(folder, files[name]).write_bytes(step_of(name))
            gc.collect()
    print(json.dumps(files))


if __name__ == "__main__":
    main()
