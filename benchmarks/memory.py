"""Memory: statistics that are put back, and weights in 16 bits.

Of the last, what they learn too: by how digits are kept, on Keras 3. What is measured for a row has
a process of its own.
"""

import json
import math
import pydoc_data.topics
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import common

STEPS = 5
# float32 statistics of 16 MiB each, of which batch normalization has two.
CHANNELS, BATCH = 2**22, 16
MATRICES, SHAPE = 10, (2500, 4000)
# The dtype of variables, whether the forward pass is in bfloat16, and how digits are kept.
_METHODS: dict[str, dict[str, str]] = {
    "copy": {"method": "copy"},
    "split": {"method": "split"},
    "split, bfloat16 slots": {"method": "split", "slot_dtype": "bfloat16"},
    "stochastic_rounding": {"method": "stochastic_rounding"},
    "stochastic_rounding, bfloat16 slots": {
        "method": "stochastic_rounding",
        "slot_dtype": "bfloat16",
    },
}
WEIGHTS: dict[str, tuple[str, bool, dict[str, Any] | None]] = {
    "float32": ("float32", False, None),
    "mixed_bfloat16": ("float32", True, None),
    "bfloat16, Keras's own": ("bfloat16", True, None),
    **{name: ("bfloat16", True, how) for name, how in _METHODS.items()},
}
SEEDS = 10
REFERENCE = "mixed_bfloat16"
_CHARACTERS, _WINDOW = 20_480, 32


def peak() -> int:
    """Bytes that were resident when most were."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def measure_statistics(package: str, outcome: str) -> dict[str, int]:
    """Peaks before and after `fit` of little more than batch normalization of many channels.

    Args:
        package: "Keras" or "keras_mp", whose `mixed_float16` and loss scaling are used.
        outcome: "skipped" if the gradients of every step overflow, or "made".
    """
    import numpy as np
    import tensorflow as tf

    if package == "keras_mp":
        import keras_mp

        keras_mp.set_global_policy("mixed_float16")
        # The first skipped steps are told, which is not what is measured.
        optimizer = keras_mp.LossScaleOptimizer("sgd", warn_after_skips=None)
    else:
        optimizer = "sgd"
        tf.keras.mixed_precision.set_global_policy("mixed_float16")
    width = 8
    layers = [
        tf.keras.layers.Dense(width),
        tf.keras.layers.Lambda(
            lambda x: tf.tile(x, [1, CHANNELS // width]), output_shape=(CHANNELS,)
        ),
        tf.keras.layers.BatchNormalization(center=False, scale=False),
        tf.keras.layers.Lambda(lambda x: x[:, :width], output_shape=(width,)),
    ]
    model = tf.keras.Sequential([tf.keras.Input([width]), *layers])
    model.compile(optimizer, "mse")
    inputs = np.random.default_rng(0).normal(size=[STEPS * BATCH, width]).astype("float32")
    labels = np.full_like(inputs, np.inf if outcome == "skipped" else 1.0)
    before = peak()
    model.fit(inputs, labels, batch_size=BATCH, verbose=0)
    return {"before": before, "peak": peak()}


def policy(variant: str) -> str:
    """The policy of Keras's own under which layers have the variables of a variant."""
    dtype, in_bfloat16, _ = WEIGHTS[variant]
    return "mixed_bfloat16" if dtype == "float32" and in_bfloat16 else dtype


def wrapped(optimizer: Any, variant: str, seed: int = 0) -> Any:
    """Wraps an optimizer as a variant has it."""
    import keras_mp

    *_, how = WEIGHTS[variant]
    if how is None:
        return optimizer
    return keras_mp.MasterWeightOptimizer(optimizer, seed=seed + 1, **how)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure_weights(variant: str) -> dict[str, float]:
    """Memory and time of steps of Adam with 100 million weights."""
    import tensorflow as tf

    dtype, in_bfloat16, _ = WEIGHTS[variant]
    tf.zeros([1]) + 1
    before = _resident()
    weights = [tf.Variable(tf.zeros(SHAPE, dtype)) for _ in range(MATRICES)]
    optimizer = wrapped(tf.keras.optimizers.Adam(1e-3), variant)
    optimizer.build(weights)
    inputs = tf.ones([8, SHAPE[0]], "bfloat16" if in_bfloat16 else "float32")

    @tf.function
    def forward_and_backward() -> list[Any]:
        with tf.GradientTape() as tape:
            outputs = [tf.matmul(inputs, tf.cast(weight, inputs.dtype)) for weight in weights]
            loss = tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32) ** 2) for each in outputs])
        return tape.gradient(loss, weights)

    @tf.function
    def step() -> None:
        optimizer.apply_gradients(zip(forward_and_backward(), weights))

    @tf.function
    def update(gradients: list[Any]) -> None:
        optimizer.apply_gradients(zip(gradients, weights))

    variables = sum(v.shape.num_elements() * _size(v) for v in [*weights, *optimizer.variables])
    seconds = _median_seconds(step)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gradients = forward_and_backward()
    return {
        "bytes": variables / (MATRICES * SHAPE[0] * SHAPE[1]),
        "peak": (peak - before) / (MATRICES * SHAPE[0] * SHAPE[1]),
        "step": seconds,
        "update": _median_seconds(lambda: update(gradients)),
    }


def _size(variable: Any) -> int:
    from keras_mp.master_weights.adapter import size_in_bytes

    return size_in_bytes(variable) // max(variable.shape.num_elements(), 1)


def _median_seconds(step: Any) -> float:
    step()
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _loss_of_fit(
    make: Callable[[str], Any],
    data: tuple[Any, Any],
    optimizer: Any,
    variant: str,
    seed: int,
    **fit: Any,
) -> float:
    """The loss after `fit`. All variants begin with the same weights, and see the same batches.

    Args:
        make: makes the model under a policy of Keras.
        data: inputs and labels.
        optimizer: of Keras.
        variant: one of WEIGHTS.
        seed: of weights, and of the order of batches.
        **fit: arguments of `fit`.
    """
    import tensorflow as tf

    import keras_mp

    tf.keras.utils.set_random_seed(seed)
    initial = [tf.cast(weight, tf.bfloat16) for weight in make("float32").get_weights()]
    model = make(policy(variant))
    model.set_weights([tf.cast(weight, tf.float32).numpy() for weight in initial])
    loss = keras_mp.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = wrapped(optimizer, variant, seed)
    model.compile(optimizer, loss, jit_compile=False)
    tf.keras.utils.set_random_seed(seed)
    model.fit(*data, batch_size=32, verbose=0, **fit)
    return float(model.evaluate(*data, batch_size=256, verbose=0))


def digits(variant: str, seed: int) -> float:
    """An MLP on scikit-learn's digits."""
    import sklearn.datasets
    import tensorflow as tf

    def make(dtype: str) -> Any:
        layers = [
            tf.keras.layers.Dense(128, activation="relu", dtype=dtype),
            tf.keras.layers.Dense(128, activation="relu", dtype=dtype),
            tf.keras.layers.Dense(10, dtype=dtype),
        ]
        return tf.keras.Sequential([tf.keras.Input((64,)), *layers])

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    optimizer = tf.keras.optimizers.AdamW(3e-4)
    return _loss_of_fit(make, (images / 16, labels), optimizer, variant, seed, epochs=25)


def language_model(variant: str, seed: int) -> float:
    """A causal transformer on the characters of Python's help."""
    import numpy as np
    import tensorflow as tf

    text = "".join(pydoc_data.topics.topics.values())[:_CHARACTERS].encode("ascii", "replace")
    tokens = np.frombuffer(text, np.uint8).reshape(-1, _WINDOW).astype("int32")

    def make(dtype: str) -> Any:
        layers, width = tf.keras.layers, 48
        inputs = tf.keras.Input([_WINDOW - 1], dtype="int32")
        x = layers.Embedding(128, width, dtype=dtype)(inputs)
        for _ in range(2):
            normal = layers.LayerNormalization(dtype=dtype)(x)
            attention = layers.MultiHeadAttention(2, 24, dtype=dtype)
            x = layers.Add(dtype=dtype)([x, attention(normal, normal, use_causal_mask=True)])
            normal = layers.LayerNormalization(dtype=dtype)(x)
            hidden = layers.Dense(2 * width, activation="gelu", dtype=dtype)(normal)
            x = layers.Add(dtype=dtype)([x, layers.Dense(width, dtype=dtype)(hidden)])
        x = layers.LayerNormalization(dtype=dtype)(x)
        return tf.keras.Model(inputs, layers.Dense(128, dtype=dtype)(x))

    optimizer = tf.keras.optimizers.Adam(2e-3)
    return _loss_of_fit(make, (tokens[:, :-1], tokens[:, 1:]), optimizer, variant, seed, epochs=6)


def regression(variant: str, seed: int) -> float:
    """A linear regression, the best weights of which have 12 bits; mean of the last 200 losses."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(seed)
    solution = np.round(generator.uniform(1, 2, [8, 64]) * 2**11) / 2**11
    x = tf.constant(generator.normal(size=[256, 8]), tf.float32)
    y = tf.matmul(x, tf.constant(solution, tf.float32))
    dtype, in_bfloat16, _ = WEIGHTS[variant]
    v = tf.Variable(tf.ones([8, 64], dtype))
    optimizer = wrapped(tf.keras.optimizers.SGD(0.002, momentum=0.5), variant, seed)
    optimizer.build([v])

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            operand = tf.cast(v, tf.bfloat16) if in_bfloat16 else v
            error = tf.matmul(x, tf.cast(operand, tf.float32)) - y
            loss = tf.reduce_mean(tf.reduce_sum(error**2, 1))
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])
        return loss

    return statistics.mean([float(step()) for _ in range(2000)][-200:])


TASKS = {"digits": digits, "language model": language_model, "regression": regression}


def measure_losses(task: str, variant: str) -> list[float]:
    """Final losses, one for each seed."""
    return [TASKS[task](variant=variant, seed=seed) for seed in range(SEEDS)]


def difference(losses: list[float], reference: list[float]) -> tuple[float, float]:
    """The mean of the differences between losses of the same seeds, and its standard error."""
    differences = [ours - theirs for ours, theirs in zip(losses, reference, strict=True)]
    spread = statistics.stdev(differences) if len(differences) > 1 else math.nan
    return statistics.mean(differences), spread / math.sqrt(len(differences))


def cell(losses: list[float], reference: list[float]) -> str:
    """The mean loss, its difference from the reference's, and whether that is more than noise."""
    mean, error = difference(losses, reference)
    if mean == error == 0:
        return f"{statistics.mean(losses):.3g} (equal)"
    is_far = " **differs**" if abs(mean) > 2 * error else ""
    return f"{statistics.mean(losses):.3g} ({mean:+.1g} ± {2 * error:.1g}){is_far}"


def _run_statistics() -> dict:
    found: dict[str, dict] = {}
    rows = []
    for keras in common.KERASES:
        for outcome in ("made", "skipped"):
            found[f"{keras}, {outcome}"] = of_package = {
                package: common.in_own_process(
                    "benchmarks.memory", "statistics", package, outcome, keras=keras, on_cpu=True
                )
                for package in ("Keras", "keras_mp")
            }
            own, ours = (each["peak"] - each["before"] for each in of_package.values())
            megabytes = (f"{each / 1e6:.0f} MB" for each in (own, ours))
            rows.append([keras, outcome, *megabytes, f"{ours / own:.2f}"])
    common.print_table(
        f"What fit adds at its peak: batch normalization of {CHANNELS} channels, batches of "
        f"{BATCH}, mixed_float16 (one run each)",
        ["", "steps are", "Keras's own", "keras_mp", "ratio"],
        rows,
    )
    return found


def _run_weights() -> dict:
    found = {
        variant: common.in_own_process("benchmarks.memory", "weights", variant, on_cpu=True)
        for variant in WEIGHTS
    }
    reference = found[REFERENCE]
    common.print_table(
        f"Adam, {MATRICES * SHAPE[0] * SHAPE[1]:,} weights, on Keras 3 (in terms of {REFERENCE})",
        ["", "bytes a weight", "peak of a step, a weight", "step", "update alone"],
        [
            [
                variant,
                f"{each['bytes']:.2f}",
                f"{each['peak']:.1f}",
                *(f"{each[k]:.2f} s ({each[k] / reference[k]:.2f})" for k in ("step", "update")),
            ]
            for variant, each in found.items()
        ],
    )
    return found


def _run_losses() -> dict:
    found = {
        task: {
            variant: common.in_own_process("benchmarks.memory", "losses", task, variant)
            for variant in WEIGHTS
        }
        for task in TASKS
    }
    common.print_table(
        f"Final losses, mean of {SEEDS} seeds, on Keras 3 (mean difference from {REFERENCE} with "
        "the same seed, ± two standard errors)",
        ["", *TASKS],
        [
            [variant, *(cell(by[variant], by[REFERENCE]) for by in found.values())]
            for variant in WEIGHTS
        ],
    )
    return found


MEASURES: dict[str, Callable[..., Any]] = {
    "statistics": measure_statistics,
    "weights": measure_weights,
    "losses": measure_losses,
}


def run() -> dict:
    """Measures everything, and prints three tables."""
    return {
        "statistics": _run_statistics(),
        "weights": _run_weights(),
        "losses": _run_losses(),
    }


if __name__ == "__main__":
    print(json.dumps(MEASURES[sys.argv[1]](*sys.argv[2:])))
