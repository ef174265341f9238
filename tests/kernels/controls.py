"""What is not ours: its bits before `import keras_mp`, after each call of ours, and beside ours.

A program: it prints the names of the calls after which bits of a control had changed, with the
control. Controls are layers of Keras with Keras's own policies, and operations of TensorFlow in 16
bits, with their gradients, in eager and in functions that are traced anew.
"""

import functools
import hashlib
import importlib
import itertools
import json
import operator
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.kernels.programs_of_others import OWN_POLICY, PROGRAMS
from tests.kernels.stock_layers import LAYERS, ROWS, SUMS, inputs_of, results_and_gradients

K = tf.keras
L = K.layers
DTYPES = ("bfloat16", "float16")
# Those in which most is replaced.
OFTEN = ("Dense", "Conv2D", "LSTM", "bias", "broadcast", "nn.gelu")
Control = Callable[[], list[Any]]


def rows(*shape: int) -> tf.Tensor:
    return tf.random.stateless_uniform(shape, [1, 2], 0.5, 1.5)


ELEMENTWISE = (
    *("nn.softmax", "nn.log_softmax", "math.tanh", "math.sigmoid", "math.erf", "math.exp"),
    *("nn.elu", "nn.selu", "nn.leaky_relu", "math.softplus", "nn.gelu", "nn.silu"),
)
# Looked up when they are called.
OPERATIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    # TensorFlow does not differentiate the gradients of resized and cropped images.
    **{name: (SUMS[name], [(ROWS, 3)]) for name in SUMS if name not in ("upsampling", "crop")},
    "resize": (lambda x: tf.image.resize(x, [60, 60], "nearest"), [(1, 1, 1, 2)]),
    **{
        name: (lambda x, name=name: operator.attrgetter(name)(tf)(x), [(64, 512)])
        for name in ELEMENTWISE
    },
    "bias": (lambda x, b: tf.nn.bias_add(x, b), [(ROWS, 2), (2,)]),
    "gelu by tanh": (lambda x: tf.nn.gelu(x, approximate=True), [(64, 512)]),
    "einsum": (lambda x, y: tf.einsum("abc,acd->abd", x, y), [(2, 60, 8), (2, 8, 60)]),
    "batch of products": (lambda x, y: tf.matmul(x, y), [(2, 60, 8), (2, 8, 60)]),
    "max pooling": (lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"), [(2, 8, 8, 4)]),
    "average pooling": (lambda x: tf.nn.avg_pool2d(x, 8, 8, "VALID"), [(2, 16, 16, 4)]),
}


def controls() -> dict[str, Control]:
    """The controls by name; each computes the same numbers whenever it is called."""
    K.utils.set_random_seed(0)
    results: dict[str, Control] = {}
    # One after the other in either dtype: all of them in both take too long.
    dtypes = itertools.cycle(DTYPES)
    for (name, (make, _)), dtype in zip(LAYERS.items(), dtypes):
        layer, inputs = make(dtype=OWN_POLICY(f"mixed_{dtype}")), inputs_of(name)
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
    def control() -> list[Any]:
        compute = functools.partial(results_and_gradients, function, *inputs, weights=weights)
        return [*compute(), *compute(wrap=tf.function)]

    return control


def digest(control: Control) -> str:
    values = (np.asarray(each).tobytes() for each in control())
    return hashlib.sha256(b"".join(values)).hexdigest()


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
    ours = importlib.import_module("tests.kernels.calls_of_ours")
    for calls in ours.CALLS:
        for call in calls:
            call()
        found[", ".join(call.__name__ for call in calls)] = changed(few, before)
    found["all of these"] = changed(all_of_them, before)

    # In this thread while ours trains in another one.
    is_over = threading.Event()
    thread = threading.Thread(target=ours.keep_training, args=[is_over])
    thread.start()
    try:
        found["beside ours"] = changed(few, before)
    finally:
        is_over.set()
        thread.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
