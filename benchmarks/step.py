"""A step of training: float32, Keras's own policy, ours, a region of `autocast`, and PyTorch.

All of them take turns in one process. Where the time of TensorFlow's goes is added up by class of
operation, from its profiler.
"""

import contextlib
import importlib.util
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks import common, step_models

REPEATS, PROFILED = 7, 3
POLICY, KERAS = "mixed_bfloat16", "Keras's own"
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    KERAS: {"keras": POLICY},
    "ours": {"policy": POLICY},
    "autocast": {"autocast": True},
}
TORCH = {"torch float32": False, "torch autocast": True}


def make_step(
    name: str,
    sizes: step_models.Sizes,
    keras: str = "float32",
    policy: str | None = None,
    autocast: bool = False,
) -> Callable[[], Any]:
    """A function that makes one step of training with Adam."""
    import tensorflow as tf

    import keras_mp
    from keras_mp.numerics.profile import UPDATE

    own = tf.keras.mixed_precision
    own.set_global_policy(keras)
    if policy:
        keras_mp.set_global_policy(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
        model, x, y = step_models.make(name, sizes)
    keras_mp.set_global_policy(None)
    own.set_global_policy("float32")
    optimizer = tf.keras.optimizers.Adam(1e-4)
    losses = keras_mp.losses if policy else tf.keras.losses
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        region = keras_mp.autocast("bfloat16") if autocast else contextlib.nullcontext()
        with region, tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        with tf.name_scope(UPDATE):
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return value

    return lambda: step(x, y).numpy()


def measure(name: str, size: str) -> dict[str, Any]:
    """Seconds a step of each variant, and where those of TensorFlow's go."""
    from keras_mp.numerics.profile import profiled

    sizes = step_models.SIZES[size][name]
    steps = {variant: make_step(name, sizes, **how) for variant, how in VARIANTS.items()}
    if importlib.util.find_spec("torch"):
        # Its threads would wait in a loop, on cores that TensorFlow needs.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from benchmarks import step_torch

        for variant, autocast in TORCH.items():
            steps[variant] = step_torch.make_step(name, sizes, autocast)
    seconds = common.interleaved(steps, REPEATS)
    classes = {}
    for variant in VARIANTS:
        with profiled() as found:
            for _ in range(PROFILED):
                steps[variant]()
        classes[variant] = {each: total / PROFILED for each, total in found.items()}
    return {"seconds": seconds, "classes": classes}


def run(small: bool = False) -> dict:
    """Measures each model on both Kerases, and prints two tables."""
    size = "small" if small else "full"
    results = {
        keras: {
            name: common.in_own_process("benchmarks.step", name, size, keras=keras)
            for name in step_models.SIZES[size]
        }
        for keras in common.KERASES
    }
    rows, parts, order = [], [], []
    for keras, models in results.items():
        for name, found in models.items():
            seconds = {v: statistics.median(each) * 1e3 for v, each in found["seconds"].items()}
            columns = [f"{seconds[v]:,.0f}" if v in seconds else "" for v in (*VARIANTS, *TORCH)]
            ours = seconds["ours"]
            against = ours / seconds["torch autocast"] if "torch autocast" in seconds else None
            ratios = [f"{ours / seconds[KERAS]:.2f}"]
            ratios.append("" if against is None else f"{against:.2f}")
            rows.append([keras, name, *columns, *ratios])
            for variant, classes in found["classes"].items():
                order = list(classes)
                milliseconds = [f"{classes[each] * 1e3:,.0f}" for each in order]
                parts.append([keras, name, variant, *milliseconds])
    common.print_table(
        f"Milliseconds a step ({size} sizes); ours against Keras's own, and against PyTorch",
        ["", "", *VARIANTS, *TORCH, "ours / Keras's own", "ours / torch"],
        rows,
    )
    common.print_table(
        "Milliseconds of operations a step, of all threads", ["", "", "", *order], parts
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
