"""What is not ours: its bits before `import keras_mp`, after each call of ours, and beside ours.

A program: it prints the names of the calls after which bits of a control had changed, with the
control. Controls are layers of Keras with Keras's own policies, and operations of TensorFlow in 16
bits, with their gradients, in eager and in functions that are traced anew.
"""

import hashlib
import itertools
import json
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.kernels.programs_of_others import OWN_POLICY, PROGRAMS, ROWS

K = tf.keras
L = K.layers
DTYPES = ("bfloat16", "float16")
# Those in which most is replaced.
OFTEN = ("Dense", "Conv2D", "Bidirectional", "bias", "broadcast", "gelu")
Control = Callable[[], list[Any]]


def noise(*shape: int) -> tf.Tensor:
    return tf.random.stateless_uniform(shape, [1, 2], -1, 1)


def rows(*shape: int) -> tf.Tensor:
    return tf.random.stateless_uniform(shape, [1, 2], 0.5, 1.5)


LAYERS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "Dense": (lambda **kw: L.Dense(2, "gelu", **kw), (ROWS, 2)),
    "Dense of a sequence": (lambda **kw: L.Dense(4, "silu", **kw), (2, 300, 4)),
    "Conv1D": (lambda **kw: L.Conv1D(4, 3, activation="elu", **kw), (2, 600, 3)),
    "Conv2D": (lambda **kw: L.Conv2D(4, 3, activation="selu", **kw), (2, 24, 24, 3)),
    "Conv2D of one place": (lambda **kw: L.Conv2D(4, 8, 8, **kw), (2, 8, 8, 16)),
    "Conv2DTranspose": (lambda **kw: L.Conv2DTranspose(4, 3, **kw), (2, 8, 8, 3)),
    "Conv3D": (lambda **kw: L.Conv3D(4, 2, activation="tanh", **kw), (2, 6, 6, 6, 3)),
    "DepthwiseConv2D": (lambda **kw: L.DepthwiseConv2D(2, **kw), (ROWS // 4, 3, 3, 2)),
    "EinsumDense": (
        lambda **kw: L.EinsumDense("abc,cd->abd", [None, 2], bias_axes="d", **kw),
        (20, 200, 2),
    ),
    "Embedding": (lambda **kw: L.Embedding(2, 3, **kw), (40, 100)),
    "LSTM": (lambda **kw: L.LSTM(3, **kw), (4, 6, 2)),
    "GRU": (lambda **kw: L.GRU(3, **kw), (4, 6, 2)),
    "Bidirectional": (lambda **kw: L.Bidirectional(L.LSTM(3, **kw), **kw), (4, 6, 2)),
    "BatchNormalization": (L.BatchNormalization, (64, 8, 8, 4)),
    "LayerNormalization": (L.LayerNormalization, (64, 16)),
    "MultiHeadAttention": (lambda **kw: L.MultiHeadAttention(2, 4, **kw), (2, 30, 8)),
    "UpSampling2D": (lambda **kw: L.UpSampling2D(2, interpolation="bilinear", **kw), (1, 8, 8, 2)),
    "AveragePooling2D": (lambda **kw: L.AveragePooling2D(8, **kw), (2, 16, 16, 4)),
    "MaxPooling2D": (lambda **kw: L.MaxPooling2D(2, **kw), (2, 16, 16, 4)),
    "Softmax": (L.Softmax, (16, 40)),
}

# Looked up when they are called.
OPERATIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "bias": (lambda x, b: tf.nn.bias_add(x, b), [(ROWS, 2), (2,)]),
    "broadcast": (lambda x, b: x * b + b, [(ROWS, 2), (2,)]),
    "sums": (lambda x: tf.reduce_sum(x, 0), [(ROWS, 2)]),
    "means": (lambda x: tf.reduce_mean(x, 0), [(ROWS, 2)]),
    "norm": (lambda x: tf.raw_ops.EuclideanNorm(input=x, axis=0), [(ROWS, 2)]),
    "running sum": (lambda x: tf.cumsum(x, 0), [(ROWS, 2)]),
    "segments": (
        lambda x: tf.math.unsorted_segment_sum(x, tf.zeros([ROWS], tf.int32), 1),
        [(ROWS, 2)],
    ),
    "rows of a table": (
        lambda x: tf.gather_nd(x, tf.zeros([ROWS, 1], tf.int32)),
        [(2, 3)],
    ),
    "resize": (
        lambda x: tf.compat.v1.image.resize_nearest_neighbor(x, [60, 60]),
        [(1, 1, 1, 2)],
    ),
    "softmax": (lambda x: tf.nn.softmax(x), [(16, 300)]),
    "log softmax": (lambda x: tf.nn.log_softmax(x), [(16, 300)]),
    "tanh": (lambda x: tf.tanh(x), [(64, 64)]),
    "sigmoid": (lambda x: tf.nn.sigmoid(x), [(64, 64)]),
    "erf": (lambda x: tf.math.erf(x), [(64, 64)]),
    "exp": (lambda x: tf.exp(x), [(64, 64)]),
    "elu": (lambda x: tf.nn.elu(x), [(64, 64)]),
    "selu": (lambda x: tf.nn.selu(x), [(64, 64)]),
    "leaky relu": (lambda x: tf.nn.leaky_relu(x), [(64, 64)]),
    "softplus": (lambda x: tf.nn.softplus(x), [(64, 64)]),
    "gelu": (lambda x: tf.nn.gelu(x), [(64, 512)]),
    "gelu by tanh": (lambda x: tf.nn.gelu(x, approximate=True), [(64, 512)]),
    "silu": (lambda x: tf.nn.silu(x), [(64, 512)]),
    "einsum": (lambda x, y: tf.einsum("abc,acd->abd", x, y), [(2, 60, 8), (2, 8, 60)]),
    "batch of products": (lambda x, y: tf.matmul(x, y), [(2, 60, 8), (2, 8, 60)]),
    "max pooling": (lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"), [(2, 8, 8, 4)]),
    "average pooling": (lambda x: tf.nn.avg_pool2d(x, 8, 8, "VALID"), [(2, 16, 16, 4)]),
}


def with_gradients(function: Callable[..., Any], inputs: list[Any], weights: list[Any]) -> list:
    floating = [each for each in inputs if each.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(floating)
        y = function(*inputs)
        total = tf.reduce_sum(tf.cast(y, tf.float32))
    found = tape.gradient(total, [*floating, *weights])
    return [y, *(tf.convert_to_tensor(each) for each in found if each is not None)]


def controls() -> dict[str, Control]:
    """The controls by name; each computes the same numbers whenever it is called."""
    K.utils.set_random_seed(0)
    results: dict[str, Control] = {}
    # One after the other in either dtype: all of them in both take too long.
    dtypes = itertools.cycle(DTYPES)
    for (name, (make, shape)), dtype in zip(LAYERS.items(), dtypes):
        layer = make(dtype=OWN_POLICY(f"mixed_{dtype}"))
        x = tf.zeros(shape, tf.int32) if name == "Embedding" else rows(*shape)
        inputs = [x, x] if name == "MultiHeadAttention" else [x]
        layer(*inputs)
        results[name] = control_of_layer(layer, inputs)
    # One Keras is enough for operations of TensorFlow, but for those that are looked at often.
    is_keras_3 = hasattr(K, "DTypePolicy")
    for (name, (function, shapes)), dtype in zip(OPERATIONS.items(), dtypes):
        if name not in OFTEN and not is_keras_3:
            continue
        inputs = [tf.cast(rows(*shape), dtype) for shape in shapes]
        results[f"{name}, of TensorFlow"] = in_both_modes(function, inputs, [])
    return {**results, **{name: make() for name, make in PROGRAMS.items()}}


def control_of_layer(layer: Any, inputs: list[tf.Tensor]) -> Control:
    def call(*inputs: tf.Tensor) -> tf.Tensor:
        options = {"training": True} if isinstance(layer, L.BatchNormalization) else {}
        return layer(*inputs, **options)

    start = layer.get_weights()
    compute = in_both_modes(call, inputs, layer.trainable_variables)

    def control() -> list[Any]:
        layer.set_weights(start)
        return compute()

    return control


def in_both_modes(function: Callable[..., Any], inputs: list[Any], weights: list[Any]) -> Control:
    variables = [getattr(each, "value", each) for each in weights]
    variables = [
        each if isinstance(each, tf.Variable) else w for each, w in zip(variables, weights)
    ]

    def control() -> list[Any]:
        traced = tf.function(lambda *x: with_gradients(function, list(x), variables))
        return [*with_gradients(function, inputs, variables), *traced(*inputs)]

    return control


def digest(control: Control) -> str:
    values = (np.asarray(each).tobytes() for each in control())
    return hashlib.sha256(b"".join(values)).hexdigest()


def model_of_ours(dtype: str) -> Any:
    import keras_mp

    with keras_mp.policy_scope(f"mixed_{dtype}"):
        return K.Sequential(
            [
                K.Input([12, 12, 2]),
                L.Conv2D(4, 3, activation="gelu"),
                L.BatchNormalization(),
                L.MaxPooling2D(2),
                L.Reshape([5, 20]),
                L.LSTM(4),
                L.Dense(2, dtype="float32"),
            ]
        )


def train(model: Any, steps: int = 1) -> None:
    import keras_mp

    model.compile(keras_mp.LossScaleOptimizer(K.optimizers.SGD(0.01)), "mse")
    model.fit(noise(8, 12, 12, 2), noise(8, 2), epochs=steps, verbose=0)


def own_loop(dtype: str) -> None:
    import keras_mp

    layer = L.Dense(2, "gelu", dtype=keras_mp.Policy(f"mixed_{dtype}"))
    scaler = keras_mp.GradScaler()
    x = rows(ROWS, 2)
    for step in (lambda: layer(x), tf.function(lambda: layer(x))):
        with tf.GradientTape() as tape:
            loss = scaler.scale(keras_mp.losses.MeanSquaredError()(tf.zeros([ROWS, 2]), step()))
        scaler.unscale(tape.gradient(loss, layer.trainable_variables))


def in_a_region() -> None:
    import keras_mp

    with keras_mp.autocast("bfloat16"), tf.GradientTape() as tape:
        x = rows(ROWS, 2)
        tape.watch(x)
        y = tf.nn.gelu(x @ noise(2, 2))
    tape.gradient(y, x)


def in_a_scope() -> None:
    import keras_mp

    with keras_mp.autocast_scope("float16"), tf.GradientTape() as tape:
        x = tf.cast(rows(ROWS, 2), tf.float16)
        tape.watch(x)
        y = tf.reduce_sum(tf.nn.gelu(x), 0)
    tape.gradient(y, x)


def set_policy() -> None:
    import keras_mp

    keras_mp.set_global_policy("mixed_bfloat16")


def calls() -> dict[str, Callable[[], object]]:
    """The calls of ours, by name, in their order."""

    def ours(run: Callable[[Any], object]) -> Callable[[], object]:
        import keras_mp

        return lambda: run(keras_mp)

    return {
        "import": lambda: ours(lambda keras_mp: keras_mp),
        "Policy": ours(lambda keras_mp: keras_mp.Policy("mixed_bfloat16")),
        "set_global_policy": set_policy,
        "a layer": lambda: own_loop("bfloat16"),
        "another dtype": lambda: own_loop("float16"),
        "fit": lambda: train(model_of_ours("bfloat16")),
        "autocast": in_a_region,
        "autocast_scope": in_a_scope,
        "summary": ours(lambda keras_mp: keras_mp.summary(model_of_ours("float16"), len)),
        "numerics.check": ours(
            lambda keras_mp: keras_mp.numerics.check(
                model_of_ours("bfloat16"), noise(4, 12, 12, 2).numpy()
            )
        ),
        "enable_float32_sums": ours(lambda keras_mp: keras_mp.enable_float32_sums()),
    }


# After each of these, controls are looked at.
TOGETHER = (
    ("import", "Policy", "set_global_policy"),
    ("a layer",),
    ("another dtype", "fit"),
    ("autocast", "autocast_scope"),
    ("summary", "numerics.check", "enable_float32_sums"),
)


def changed(now: dict[str, Control], before: dict[str, str]) -> list[str]:
    return [name for name, control in now.items() if digest(control) != before[name]]


def main() -> None:
    """Prints the controls that changed, by the call before."""
    warnings.simplefilter("ignore")
    all_of_them = controls()
    before = {name: digest(control) for name, control in all_of_them.items()}
    unstable = set(changed(all_of_them, before))
    all_of_them = {name: each for name, each in all_of_them.items() if name not in unstable}
    often = {*OFTEN, *PROGRAMS}
    few = {name: each for name, each in all_of_them.items() if name.split(",")[0] in often}
    found = {"unstable without ours": sorted(unstable)}
    assert "keras_mp" not in sys.modules
    calls_of_ours = calls()
    for names in TOGETHER:
        for name in names:
            call = calls_of_ours.pop(name)
            call()
        found[", ".join(names)] = changed(few, before)
    assert not calls_of_ours
    found["all of these"] = changed(all_of_them, before)

    # In this thread while ours trains in another one.
    is_over = threading.Event()

    def keep_training() -> None:
        model = model_of_ours("bfloat16")
        while not is_over.is_set():
            train(model)
            own_loop("float16")
            in_a_region()

    thread = threading.Thread(target=keep_training)
    thread.start()
    try:
        found["beside ours"] = changed(few, before)
    finally:
        is_over.set()
        thread.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
