"""How wrong are sums of 1e5 numbers in 16 bits? And what does a model learn with them?

`docs/sums.md` says what keras_mp does about it.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import common

TERMS = 100_000
# float16 ends at 65,504, so there it is halves that are added up.
EQUAL = {"bfloat16": 1.0, "float16": 0.5}
MODES = ("eager", "graph", "XLA")
# More than rounding can do to a sum that is accumulated in float32: a sum has stopped.
SATURATED = 0.05
BATCH, STEPS = 4096, 40


def cases() -> dict[str, Callable[[Any], Any]]:
    """What adds up: functions of a vector of terms, whose first element is their sum."""
    import tensorflow as tf

    def rows(terms, width=4):
        return tf.tile(terms[:, None], [1, width])

    def images(terms, channels=4):
        return tf.reshape(rows(terms, channels), [-1, 10, 10, channels])

    def gradient(function, shape, upstream, start=0.0):
        argument = tf.fill(shape, tf.constant(start, upstream.dtype))
        with tf.GradientTape() as tape:
            tape.watch(argument)
            y = function(argument)
        return tf.convert_to_tensor(tape.gradient(y, argument, upstream))

    def broadcast(function, start=0.0):
        def case(terms):
            upstream = rows(terms)
            one = tf.ones_like(upstream)
            return gradient(lambda small: function(one, small), [4], upstream, start)

        return case

    def ids(terms):
        return tf.zeros([terms.shape[0]], tf.int32)

    def float32(function):
        return lambda terms: function(terms) * tf.cast(terms.shape[0], "float32")

    def conv_filter(convolve, *shape):
        def case(terms):
            upstream = images(terms)
            x = tf.ones([upstream.shape[0], 12, 12, shape[2]], terms.dtype)
            return gradient(lambda filters: convolve(x, filters), shape, upstream)

        return case

    return {
        "bias, `BiasAdd`": lambda v: gradient(
            lambda b: tf.nn.bias_add(rows(v) * 0, b), [4], rows(v)
        ),
        "offset, `AddV2`": broadcast(tf.add),
        "offset, `Sub`": lambda v: -broadcast(tf.subtract)(v),
        "scale, `Mul`": broadcast(tf.multiply),
        "scale, `RealDiv`": lambda v: -broadcast(tf.divide, 1.0)(v),
        "one scalar, `AddV2`": lambda v: gradient(lambda s: v + s, [], v),
        "`Maximum`": lambda v: gradient(lambda s: tf.maximum(rows(v) * 0, s), [4], rows(v), 1.0),
        "`SelectV2`": lambda v: gradient(
            lambda s: tf.where(rows(v) > 0, s, tf.zeros_like(s)), [4], rows(v)
        ),
        "`BroadcastTo`": lambda v: gradient(
            lambda s: tf.broadcast_to(s, [v.shape[0], 4]), [4], rows(v)
        ),
        "`Tile`": lambda v: gradient(lambda s: tf.tile(s, [v.shape[0], 1]), [1, 4], rows(v)),
        "embedding, `Gather`": lambda v: gradient(
            lambda table: tf.gather(table, ids(v)), [3, 4], rows(v)
        ),
        "`GatherNd`": lambda v: gradient(
            lambda table: tf.gather_nd(table, ids(v)[:, None]), [3, 4], rows(v)
        ),
        "`IndexedSlices` made dense": lambda v: tf.convert_to_tensor(
            tf.IndexedSlices(rows(v), ids(v), tf.constant([3, 4]))
        ),
        "kernel, `MatMul`": lambda v: gradient(
            lambda w: tf.matmul(tf.ones_like(rows(v)), w), [4, 4], rows(v)
        ),
        "kernel, broadcasting `BatchMatMul`": lambda v: gradient(
            lambda w: tf.matmul(tf.ones([v.shape[0], 1, 4], v.dtype), w),
            [4, 4],
            rows(v)[:, None],
        ),
        "kernel, `Einsum` abc,cd->abd": lambda v: gradient(
            lambda w: tf.einsum("abc,cd->abd", tf.ones([v.shape[0] // 10, 10, 4], v.dtype), w),
            [4, 4],
            tf.reshape(rows(v), [-1, 10, 4]),
        ),
        "filter, `Conv2D`": conv_filter(lambda x, f: tf.nn.conv2d(x, f, 1, "VALID"), 3, 3, 2, 4),
        "filter, depthwise": conv_filter(
            lambda x, f: tf.nn.depthwise_conv2d(x, f, [1] * 4, "VALID"), 3, 3, 4, 1
        ),
        "filter, depthwise, images of 1x1": lambda v: gradient(
            lambda f: tf.nn.depthwise_conv2d(
                tf.ones([v.shape[0], 3, 3, 4], v.dtype), f, [1] * 4, "VALID"
            ),
            [3, 3, 4, 1],
            rows(v)[:, None, None],
        ),
        "inputs of `Conv2D`, so many channels, images of 1x1": lambda v: gradient(
            lambda x: tf.nn.conv2d(x, tf.ones([1, 1, 1, v.shape[0]], v.dtype), 1, "SAME"),
            [1, 1, 1, 1],
            tf.reshape(v, [1, 1, 1, -1]),
        ),
        "upsampling, `ResizeNearestNeighbor`": lambda v: gradient(
            lambda x: tf.image.resize(x, [v.shape[0] // 100, 100], "nearest"),
            [1, 1, 1, 4],
            tf.reshape(rows(v), [1, -1, 100, 4]),
        ),
        "`reduce_sum` of all": tf.reduce_sum,
        "`reduce_sum` of rows": lambda v: tf.reduce_sum(rows(v), 0),
        "`reduce_sum` of columns": lambda v: tf.reduce_sum(tf.transpose(rows(v)), 1),
        "`reduce_mean` of all": float32(lambda v: tf.cast(tf.reduce_mean(v), "float32")),
        "`reduce_mean` of an image": float32(
            lambda v: tf.cast(
                tf.reduce_mean(tf.reshape(rows(v), [1, -1, 100, 4]), [1, 2]), "float32"
            )
        ),
        "`avg_pool2d`": float32(
            lambda v: tf.cast(
                tf.nn.avg_pool2d(
                    tf.reshape(rows(v), [1, -1, 100, 4]), [v.shape[0] // 100, 100], 1, "VALID"
                ),
                "float32",
            )
        ),
        "`l2_loss`": lambda v: 2 * tf.nn.l2_loss(tf.sqrt(v)),
        "`reduce_euclidean_norm` of rows, squared": lambda v: (
            tf.cast(tf.math.reduce_euclidean_norm(tf.sqrt(rows(v)), 0), "float32") ** 2
        ),
        "softmax of equal logits, times terms": lambda v: tf.cast(
            tf.reduce_sum(v) * tf.reduce_sum(tf.nn.softmax(tf.zeros_like(v))), "float32"
        ),
        "`fused_batch_norm`, mean": float32(
            lambda v: tf.compat.v1.nn.fused_batch_norm(
                tf.reshape(rows(v), [1, -1, 1, 4]), tf.ones([4]), tf.zeros([4])
            )[1]
        ),
        "`fused_batch_norm`, offset": lambda v: gradient_of_batch_norm(tf, rows(v)),
        "`cumsum`": lambda v: tf.cumsum(v)[-1:],
        "`segment_sum`": lambda v: tf.math.segment_sum(rows(v), ids(v)),
        "`segment_mean`": float32(
            lambda v: tf.cast(tf.math.segment_mean(rows(v), ids(v)), "float32")
        ),
        "`unsorted_segment_sum`": lambda v: tf.math.unsorted_segment_sum(rows(v), ids(v), 3),
        "`sparse.segment_sum`": lambda v: tf.sparse.segment_sum(
            rows(v), tf.range(v.shape[0]), ids(v)
        ),
        "`scatter_nd`": lambda v: tf.scatter_nd(ids(v)[:, None], rows(v), [3, 4]),
        "`tensor_scatter_nd_add`": lambda v: tf.tensor_scatter_nd_add(
            tf.zeros([3, 4], v.dtype), ids(v)[:, None], rows(v)
        ),
        "`matmul` along so many": lambda v: v[None] @ tf.ones([v.shape[0], 4], v.dtype),
        "`einsum` i,i->": lambda v: tf.einsum("i,i->", v, tf.ones_like(v)),
        "attention over so many keys, values": lambda v: tf.einsum(
            "bhqk,bkhd->bqhd", v[None, None, None], tf.ones([1, v.shape[0], 1, 4], v.dtype)
        ),
        "`conv2d` over so many channels": lambda v: tf.nn.conv2d(
            tf.reshape(v, [1, 1, 1, -1]), tf.ones([1, 1, v.shape[0], 4], v.dtype), 1, "SAME"
        ),
        "a loop that adds to a captured tensor's gradient": lambda v: loop_gradient(tf, v),
    }


def gradient_of_batch_norm(tf: Any, terms: Any) -> Any:
    """The gradient of a batch normalization's offset."""
    terms = tf.reshape(terms, [1, -1, 1, 4])
    offset = tf.zeros([4])
    with tf.GradientTape() as tape:
        tape.watch(offset)
        y = tf.compat.v1.nn.fused_batch_norm(terms, tf.ones([4]), offset)[0]
    return tape.gradient(y, offset, terms)


def loop_gradient(tf: Any, terms: Any) -> Any:
    """The gradient of what each turn of a loop reads, over a hundredth as many turns."""
    weight = tf.ones([1], terms.dtype)
    parts = tf.reduce_sum(tf.reshape(tf.cast(terms, "float32"), [-1, 100]), 1)
    parts = tf.cast(parts, terms.dtype)

    @tf.function
    def loop(weight):
        return tf.while_loop(
            lambda i, y: i < parts.shape[0],
            lambda i, y: (i + 1, tf.tensor_scatter_nd_update(y, [[i]], parts[i] * weight)),
            [0, tf.zeros_like(parts)],
            maximum_iterations=parts.shape[0],
        )[1]

    with tf.GradientTape() as tape:
        tape.watch(weight)
        y = loop(weight)
    return tape.gradient(y, weight)


def errors(case: Callable[[Any], Any], dtype: str, mode: str) -> float | None:
    """The worse relative error, of equal and of random numbers; None: cannot be computed."""
    import numpy as np
    import tensorflow as tf

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
    import tensorflow as tf

    from keras_mp import kernels
    from keras_mp.hooks import reach

    kernels.install()
    results: dict[str, Any] = {}
    for name, case in cases().items():
        results[name] = {dtype: {} for dtype in EQUAL}
        for dtype in EQUAL:
            for variant in ("TensorFlow", "keras_mp"):
                with reach.entered(tf.as_dtype(dtype) if variant == "keras_mp" else None):
                    results[name][dtype][variant] = {m: errors(case, dtype, m) for m in MODES}
    return results


def train() -> dict[str, list[float]]:
    """Losses of a linear model whose biases have much to learn, by variant, step by step."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(0)
    x = generator.normal(size=[BATCH, 8]).astype("float32")
    weights = generator.normal(size=[8, 4])
    y = (x @ weights + [3, -2, 4, -3]).astype("float32")
    losses = {}
    for variant in ("float32", "Keras mixed_bfloat16", "keras_mp mixed_bfloat16"):
        tf.keras.utils.set_random_seed(0)
        whose, _, policy = variant.rpartition(" ")
        with common.policy(whose, policy):
            model = tf.keras.Sequential([tf.keras.Input([8]), tf.keras.layers.Dense(4)])
            # XLA adds up in float32, and Keras 3 compiles with it unless told otherwise.
            model.compile(tf.keras.optimizers.SGD(0.2), "mse", jit_compile=False)
            history = model.fit(x, y, BATCH, STEPS, shuffle=False, verbose=0)
        losses[variant] = history.history["loss"]
    return losses


def run() -> dict:
    """Measures the sums, trains on both Kerases, and prints tables."""
    errors_of = common.in_own_process("benchmarks.sums", "measure")

    def percent(errors):
        known = [e for e in errors.values() if e is not None]
        return [*(_percent(errors[mode]) for mode in MODES), max(known, default=0.0) > SATURATED]

    rows = []
    for name, by_dtype in errors_of.items():
        for dtype, by_variant in by_dtype.items():
            *theirs, saturates = percent(by_variant["TensorFlow"])
            *ours, still = percent(by_variant["keras_mp"])
            verdict = "no" if not saturates else "**yes**" if still else "fixed"
            rows.append([name, dtype, *theirs, " / ".join(ours), verdict])
    common.print_table(
        f"Relative error of sums of {TERMS:,} numbers, against float64",
        ["sum", "dtype", *(f"TensorFlow, {m}" for m in MODES), "keras_mp", "saturates"],
        rows,
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


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:.2f} %"


if __name__ == "__main__":
    print(json.dumps({"measure": measure, "train": train}[sys.argv[1]]()))
