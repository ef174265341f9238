"""What models with weights in 16 bits learn, by how digits are kept: final losses. On Keras 3."""

import json
import math
import pydoc_data.topics
import statistics
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import common, master_weights

SEEDS = 10
REFERENCE = "mixed_bfloat16"
# XLA rounds the last digit elsewhere, which is of no matter here.
VARIANTS = [name for name in master_weights.VARIANTS if not name.endswith("compiled")]
_CHARACTERS, _WINDOW = 20_480, 32


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
        variant: one of VARIANTS.
        seed: of weights, and of the order of batches.
        **fit: arguments of `fit`.
    """
    import tensorflow as tf

    import keras_mp

    tf.keras.utils.set_random_seed(seed)
    initial = [tf.cast(weight, tf.bfloat16) for weight in make("float32").get_weights()]
    model = make(master_weights.policy(variant))
    model.set_weights([tf.cast(weight, tf.float32).numpy() for weight in initial])
    loss = keras_mp.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = master_weights.wrapped(optimizer, variant, seed)
    model.compile(optimizer, loss, jit_compile=False)
    tf.keras.utils.set_random_seed(seed)
    model.fit(*data, batch_size=32, verbose=0, **fit)
    return float(model.evaluate(*data, batch_size=256, verbose=0))


def digits(variant: str, seed: int) -> float:
    """An MLP on scikit-learn's digits."""
    import sklearn.datasets
    import tensorflow as tf

    def make(policy: str) -> Any:
        layers = [
            tf.keras.layers.Dense(128, activation="relu", dtype=policy),
            tf.keras.layers.Dense(128, activation="relu", dtype=policy),
            tf.keras.layers.Dense(10, dtype=policy),
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

    def make(policy: str) -> Any:
        layers, width = tf.keras.layers, 48
        inputs = tf.keras.Input([_WINDOW - 1], dtype="int32")
        x = layers.Embedding(128, width, dtype=policy)(inputs)
        for _ in range(2):
            normal = layers.LayerNormalization(dtype=policy)(x)
            attention = layers.MultiHeadAttention(2, 24, dtype=policy)
            x = layers.Add(dtype=policy)([x, attention(normal, normal, use_causal_mask=True)])
            normal = layers.LayerNormalization(dtype=policy)(x)
            hidden = layers.Dense(2 * width, activation="gelu", dtype=policy)(normal)
            x = layers.Add(dtype=policy)([x, layers.Dense(width, dtype=policy)(hidden)])
        x = layers.LayerNormalization(dtype=policy)(x)
        return tf.keras.Model(inputs, layers.Dense(128, dtype=policy)(x))

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
    dtype, in_bfloat16, _ = master_weights.VARIANTS[variant]
    v = tf.Variable(tf.ones([8, 64], dtype))
    optimizer = master_weights.wrapped(tf.keras.optimizers.SGD(0.002, momentum=0.5), variant, seed)
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


def measure(task: str, variant: str) -> list[float]:
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


def run() -> dict:
    """Trains all variants, each in a process of its own, and prints a table."""
    results: dict[str, dict[str, list[float]]] = {
        task: {
            variant: common.in_own_process("benchmarks.losses", task, variant)
            for variant in VARIANTS
        }
        for task in TASKS
    }
    rows = [
        [variant, *(cell(by[variant], by[REFERENCE]) for by in results.values())]
        for variant in VARIANTS
    ]
    common.print_table(
        f"Final losses, mean of {SEEDS} seeds, on Keras 3 (mean difference from {REFERENCE} with "
        "the same seed, ± two standard errors)",
        ["", *TASKS],
        rows,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
