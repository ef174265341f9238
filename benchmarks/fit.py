"""How long `fit` takes in mixed precision: ours, Keras's own, a graph rewrite and PyTorch."""

import contextlib
import importlib.util
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable

from benchmarks import common, models

TURNS, STEPS = 9, 1
MATMUL = 2048
REWRITE = "auto_mixed_precision_onednn_bfloat16"

# Where there is a GPU, Keras 3 compiles what it can with XLA, unless it is told not to. On CPUs it
# has to be asked for, and the rewrite has no part in it, so it is measured for one model.
VARIANTS = {
    "float32": {},
    "Keras mixed_bfloat16": {"own": "mixed_bfloat16"},
    "keras_mp mixed_bfloat16": {"keras_mp": "mixed_bfloat16"},
    "graph rewrite": {"rewrite": True},
}
ONLY_MLP = {
    "Keras mixed_float16": {"own": "mixed_float16"},
    "keras_mp mixed_float16": {"keras_mp": "mixed_float16"},
}
ONLY_MLP_KERAS_3 = {
    "XLA, float32": {"jit_compile": True},
    "XLA, Keras mixed_bfloat16": {"own": "mixed_bfloat16", "jit_compile": True},
    "XLA, keras_mp mixed_bfloat16": {"keras_mp": "mixed_bfloat16", "jit_compile": True},
}


def variants(model: str, keras: str) -> dict[str, dict]:
    """Those that are measured for a model."""
    if model != "MLP":
        return VARIANTS
    return {**VARIANTS, **ONLY_MLP, **(ONLY_MLP_KERAS_3 if keras == "Keras 3" else {})}


def make_fit(name: str, own=None, keras_mp=None, rewrite=False, autocast=None, jit_compile=False):
    """A function that calls `fit` for some steps and returns the seconds of each but the first."""
    import tensorflow as tf

    if keras_mp:
        import keras_mp as package

        package.set_global_policy(keras_mp)
    else:
        tf.keras.mixed_precision.set_global_policy(own or "float32")
    model, inputs, labels = models.make(name)
    with warnings.catch_warnings():
        # Where keras_mp is imported too, it says that it does nothing for Keras's own policy.
        warnings.filterwarnings("ignore", "The global policy")
        model.compile(
            "adam",
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=jit_compile,
        )
    if keras_mp:
        package.set_global_policy(None)

    class Clock(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.ends.append(time.perf_counter())

    clock = Clock()
    batches = tf.data.Dataset.from_tensors((inputs, labels)).repeat()

    def fit(steps):
        clock.ends = []
        with _rewriting(rewrite), _autocasting(autocast):
            model.fit(
                batches, steps_per_epoch=1 + steps, shuffle=False, verbose=0, callbacks=[clock]
            )
        return [b - a for a, b in zip(clock.ends, clock.ends[1:])]

    return fit


@contextlib.contextmanager
def _rewriting(on):
    import tensorflow as tf

    if on:  # The option is part of how a function is called: it holds where it was set.
        tf.config.optimizer.set_experimental_options({REWRITE: True})
    yield
    if on:
        tf.config.optimizer.set_experimental_options({REWRITE: False})


def _autocasting(dtype):
    if dtype is None:
        return contextlib.nullcontext()
    import keras_mp

    return keras_mp.autocast(dtype)


def measure(name: str, keras: str) -> dict[str, list[float]]:
    """Seconds a step for each variant of a model; beside the MLP, of matrix products too."""
    fits = {variant: make_fit(name, **how) for variant, how in variants(name, keras).items()}
    if name == "MLP":  # little else than matrix products
        fits.update(_matrix_products())
    return take_turns(fits)


def take_turns(fits: dict[str, Callable[[int], list[float]]]) -> dict[str, list[float]]:
    """Seconds a step of each, which take turns at being first."""
    for fit in fits.values():
        fit(1)
    seconds: dict[str, list[float]] = {variant: [] for variant in fits}
    order = list(fits)
    for _ in range(TURNS):
        for variant in order:
            seconds[variant].append(statistics.median(fits[variant](STEPS)))
        order.append(order.pop(0))  # What comes after a slow one has the caches against it.
    return seconds


def _matrix_products():
    import tensorflow as tf

    def make(dtype):
        a = tf.cast(tf.random.normal([MATMUL, MATMUL]), dtype)

        def fit(steps):
            result = []
            for _ in range(steps):
                start = time.perf_counter()
                tf.matmul(a, a)
                result.append(time.perf_counter() - start)
            return result

        return fit

    return {f"matmul {dtype}": make(dtype) for dtype in ("float32", "bfloat16")}


def run() -> dict:
    """Measures both Kerases, and PyTorch if it is installed, and prints a table."""
    results, rows = {}, []
    for keras in common.KERASES:
        for name in models.MODELS:
            seconds = common.in_own_process("benchmarks.fit", name, keras, keras=keras)
            results.setdefault(keras, {})[name] = seconds
            rows += [[keras, name, *_columns(seconds, variant)] for variant in seconds]
    if importlib.util.find_spec("torch"):
        for name in models.MODELS:
            seconds = common.in_own_process("benchmarks.torch_models", name)
            results.setdefault("PyTorch", {})[name] = seconds
            rows += [["PyTorch", name, *_columns(seconds, variant)] for variant in seconds]
    else:
        print("\nPyTorch was not measured: it is not installed.")
    common.print_table(
        "A step of fit (times faster than float32 in the same process; ratios of medians, "
        "quartiles)",
        ["", "", "", "step", "times faster", "keras_mp / this"],
        rows,
    )
    return results


def reference(variant: str) -> str:
    """The float32 variant that another is compared with."""
    if variant.startswith("matmul "):
        return "matmul float32"
    return "XLA, float32" if variant.startswith("XLA, ") else "float32"


def _columns(seconds, variant):
    against = ""
    if variant.endswith(("float32", "bfloat16", "rewrite")) and not variant.startswith("matmul "):
        ours = reference(variant).replace("float32", "keras_mp mixed_bfloat16")
        against = common.ratio(seconds, ours, variant) if ours in seconds else ""
    return [
        variant,
        f"{statistics.median(seconds[variant]) * 1e3:.1f} ms",
        common.ratio(seconds, reference(variant), variant),
        against,
    ]


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
