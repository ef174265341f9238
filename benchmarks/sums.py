"""How wrong are sums of 1e5 numbers in 16 bits? And what does a model learn with them?

`docs/sums.md` says what keras_mp does about it.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import common

TERMS = 100_000
# float16 ends at 65,504, so there it is halves that are added up.
EQUAL = {"bfloat16": 1.0, "float16": 0.5}
MODES, VARIANTS = ("eager", "graph", "XLA"), ("TensorFlow", "keras_mp")
BATCH, STEPS = 4096, 40


def rows(terms: Any, width: int = 4) -> Any:
    """The terms, in so many columns."""
    return tf.tile(terms[:, None], [1, width])


def ids(terms: Any) -> Any:
    """Where all are added up."""
    return tf.zeros([terms.shape[0]], tf.int32)


def gradient(function: Callable, shape: list, upstream: Any, start: float = 0.0) -> Any:
    """The gradient of an argument of this shape."""
    argument = tf.fill(shape, tf.constant(start, upstream.dtype))
    with tf.GradientTape() as tape:
        tape.watch(argument)
        y = function(argument)
    return tf.convert_to_tensor(tape.gradient(y, argument, upstream))


def of_rows(function: Callable, *shape: int, start: float = 0.0) -> Callable:
    """The gradient of what a function takes beside the terms."""
    return lambda v: gradient(lambda each: function(v, each), [*shape], rows(v), start)


def of_ones(function: Callable, start: float = 0.0) -> Callable:
    """That of the second argument, for the first of ones."""
    return of_rows(lambda v, each: function(tf.ones_like(rows(v)), each), 4, start=start)


def of_filter(side: int) -> Callable:
    """That of a depthwise filter, for so many results on a side."""

    def case(terms: Any) -> Any:
        upstream = tf.reshape(rows(terms), [-1, side, side, 4])
        x = tf.ones([upstream.shape[0], side + 2, side + 2, 4], terms.dtype)
        return gradient(
            lambda f: tf.nn.depthwise_conv2d(x, f, [1] * 4, "VALID"), [3, 3, 4, 1], upstream
        )

    return case


def image(terms: Any) -> Any:
    """The terms, as one image of four channels."""
    return tf.reshape(rows(terms), [1, -1, 100, 4])


def mean(function: Callable) -> Callable:
    """The sum, of a function that returns the mean."""
    return lambda v: tf.cast(function(v), "float32") * tf.cast(v.shape[0], "float32")


def loop_gradient(terms: Any) -> Any:
    """The gradient of what each turn of a loop reads, over a hundredth as many turns."""
    parts = tf.reduce_sum(tf.reshape(tf.cast(terms, "float32"), [-1, 100]), 1)
    parts = tf.cast(parts, terms.dtype)

    @tf.function
    def loop(weight: Any) -> Any:
        return tf.while_loop(
            lambda i, y: i < parts.shape[0],
            lambda i, y: (i + 1, tf.tensor_scatter_nd_update(y, [[i]], parts[i] * weight)),
            [0, tf.zeros_like(parts)],
            maximum_iterations=parts.shape[0],
        )[1]

    return gradient(loop, [1], tf.ones_like(parts), 1.0)


# What adds up, and is wrong in one of the dtypes: functions of a vector of terms, whose first
# element is their sum.
CASES: dict[str, Callable[[Any], Any]] = {
    "bias, `BiasAdd`": of_rows(lambda v, b: tf.nn.bias_add(rows(v) * 0, b), 4),
    "offset, `AddV2`": of_ones(tf.add),
    "offset, `Sub`": lambda v: -of_ones(tf.subtract)(v),
    "scale, `Mul`": of_ones(tf.multiply),
    "scale, `RealDiv`": lambda v: -of_ones(tf.divide, 1.0)(v),
    "`Maximum`": of_rows(lambda v, s: tf.maximum(rows(v) * 0, s), 4, start=1.0),
    "`SelectV2`": of_rows(lambda v, s: tf.where(rows(v) > 0, s, tf.zeros_like(s)), 4),
    "`BroadcastTo`": of_rows(lambda v, s: tf.broadcast_to(s, [v.shape[0], 4]), 4),
    "`Tile`": of_rows(lambda v, s: tf.tile(s, [v.shape[0], 1]), 1, 4),
    "embedding, `Gather`": of_rows(lambda v, table: tf.gather(table, ids(v)), 3, 4),
    "`GatherNd`": of_rows(lambda v, table: tf.gather_nd(table, ids(v)[:, None]), 3, 4),
    "`IndexedSlices` made dense": lambda v: tf.convert_to_tensor(
        tf.IndexedSlices(rows(v), ids(v), tf.constant([3, 4]))
    ),
    "kernel, broadcasting `BatchMatMul`": lambda v: gradient(
        lambda w: tf.matmul(tf.ones([v.shape[0], 1, 4], v.dtype), w), [4, 4], rows(v)[:, None]
    ),
    "filter, depthwise": of_filter(10),
    "filter, depthwise, images of 1x1": of_filter(1),
    "inputs of `Conv2D`, so many channels, images of 1x1": lambda v: gradient(
        lambda x: tf.nn.conv2d(x, tf.ones([1, 1, 1, v.shape[0]], v.dtype), 1, "SAME"),
        [1, 1, 1, 1],
        tf.reshape(v, [1, 1, 1, -1]),
    ),
    "upsampling, `ResizeNearestNeighbor`": lambda v: gradient(
        lambda x: tf.image.resize(x, [v.shape[0] // 100, 100], "nearest"), [1, 1, 1, 4], image(v)
    ),
    "`reduce_sum` of rows": lambda v: tf.reduce_sum(rows(v), 0),
    "`reduce_mean` of all": mean(tf.reduce_mean),
    "`reduce_mean` of an image": mean(lambda v: tf.reduce_mean(image(v), [1, 2])),
    "`avg_pool2d`": mean(
        lambda v: tf.nn.avg_pool2d(image(v), [v.shape[0] // 100, 100], 1, "VALID")
    ),
    "`reduce_euclidean_norm` of rows, squared": lambda v: (
        tf.cast(tf.math.reduce_euclidean_norm(tf.sqrt(rows(v)), 0), "float32") ** 2
    ),
    "softmax of equal logits, times terms": lambda v: tf.cast(
        tf.reduce_sum(v) * tf.reduce_sum(tf.nn.softmax(tf.zeros_like(v))), "float32"
    ),
    "`cumsum`": lambda v: tf.cumsum(v)[-1:],
    "`segment_sum`": lambda v: tf.math.segment_sum(rows(v), ids(v)),
    "`segment_mean`": mean(lambda v: tf.math.segment_mean(rows(v), ids(v))),
    "`unsorted_segment_sum`": lambda v: tf.math.unsorted_segment_sum(rows(v), ids(v), 3),
    "`scatter_nd`": lambda v: tf.scatter_nd(ids(v)[:, None], rows(v), [3, 4]),
    "`tensor_scatter_nd_add`": lambda v: tf.tensor_scatter_nd_add(
        tf.zeros([3, 4], v.dtype), ids(v)[:, None], rows(v)
    ),
    "`einsum` i,i->": lambda v: tf.einsum("i,i->", v, tf.ones_like(v)),
    "attention over so many keys, values": lambda v: tf.einsum(
        "bhqk,bkhd->bqhd", v[None, None, None], tf.ones([1, v.shape[0], 1, 4], v.dtype)
    ),
    "a loop that adds to a captured tensor's gradient": loop_gradient,
}


def errors(case: Callable[[Any], Any], dtype: str, mode: str) -> float | None:
    """The worse relative error, of equal and of random numbers; None: cannot be computed."""
    function = case if mode == "eager" else tf.function(case, jit_compile=mode == "XLA")
    random = np.random.default_rng(0).uniform(1e-3, 1, TERMS)
    worst = 0.0
    for terms in (np.full(TERMS, EQUAL[dtype]), random):
        terms = tf.cast(terms, dtype)
        exact = float(np.sum(terms.numpy().astype("float64")))
        try:
            found = np.asarray(tf.cast(function(terms), "float32")).ravel()[0]
        except (tf.errors.OpError, ValueError):
            return None
        error = abs(float(found) / exact - 1)
        worst = max(worst, error if np.isfinite(error) else float("inf"))
    return worst


def measure() -> dict[str, dict[str, dict[str, dict[str, float | None]]]]:
    """Errors by sum, dtype, variant and mode."""
    from keras_mp import kernels
    from keras_mp.hooks import reach

    kernels.install()
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        results[name] = {dtype: {} for dtype in EQUAL}
        for dtype in EQUAL:
            for variant in VARIANTS:
                with reach.entered(tf.as_dtype(dtype) if variant == "keras_mp" else None):
                    results[name][dtype][variant] = {m: errors(case, dtype, m) for m in MODES}
    return results


def train() -> dict[str, list[float]]:
    """Losses of a linear model whose biases have much to learn, by variant, step by step."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=[BATCH, 8]).astype("float32")
    weights = generator.normal(size=[8, 4])
    y = (x @ weights + [3, -2, 4, -3]).astype("float32")
    losses = {}
    for variant in ("float32", "Keras's mixed_bfloat16", "mixed_bfloat16"):
        tf.keras.utils.set_random_seed(0)
        with common.policy(*common.POLICIES[variant]):
            model = tf.keras.Sequential([tf.keras.Input([8]), tf.keras.layers.Dense(4)])
            # XLA adds up in float32, and Keras 3 compiles with it unless told otherwise.
            model.compile(tf.keras.optimizers.SGD(0.2), "mse", jit_compile=False)
            history = model.fit(x, y, BATCH, STEPS, shuffle=False, verbose=0)
        losses[variant] = history.history["loss"]
    return losses


def run() -> dict:
    """Measures the sums, trains on both Kerases, and prints tables."""
    errors_of = common.in_own_process("benchmarks.sums", "measure")
    common.print_table(
        f"Relative error of sums of {TERMS:,} numbers, against float64, in percent: "
        f"{' / '.join(MODES)}, or one for all",
        ["sum", *(f"{dtype}, {variant}" for dtype in EQUAL for variant in VARIANTS)],
        [
            [name, *(_percents(of[dtype][variant]) for dtype in EQUAL for variant in VARIANTS)]
            for name, of in errors_of.items()
        ],
    )
    losses = {
        keras: common.in_own_process("benchmarks.sums", "train", keras=keras)
        for keras in common.KERASES
    }
    common.print_table(
        f"Loss of a linear model, batch {BATCH}, after as many steps of SGD",
        ["", "1", str(STEPS // 4), str(STEPS)],
        [
            [f"{keras}, {variant}", *(f"{curve[i]:.4g}" for i in (0, STEPS // 4 - 1, STEPS - 1))]
            for keras, variants in losses.items()
            for variant, curve in variants.items()
        ],
    )
    return {"errors": errors_of, "losses": losses}


def _percents(errors: dict[str, float | None]) -> str:
    """One number where all modes agree."""
    percents = ["-" if e is None else f"{100 * e:.2f}" for e in errors.values()]
    return percents[0] if len({*percents}) == 1 else " / ".join(percents)


if __name__ == "__main__":
    print(json.dumps({"measure": measure, "train": train}[sys.argv[1]]()))
