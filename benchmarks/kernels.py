"""How long operations of layers take in 16 bits, forward and backward, against float32.

TensorFlow's own kernels are timed, those with casts around float32's, and what keras_mp puts in
their place: float32 inside, or a cluster that XLA compiles, where that is faster on this machine.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from benchmarks import common
from keras_mp import kernels
from keras_mp.hardware import tuning, turns
from keras_mp.hooks import reach

_TURNS = 9
# By name: the dtype, and whose kernels.
_VARIANTS = {
    "float32": ("float32", "own"),
    "bfloat16": ("bfloat16", "own"),
    "bfloat16, with casts": ("bfloat16", "casts"),
    "bfloat16, keras_mp": ("bfloat16", "keras_mp"),
    "float16": ("float16", "own"),
    "float16, with casts": ("float16", "casts"),
    "float16, keras_mp": ("float16", "keras_mp"),
}
_SEQUENCE, _IMAGE, _VOLUME = (16, 128, 512), (8, 32, 32, 64), (2, 8, 16, 16, 32)


class _Operation(NamedTuple):
    """An operation of layers.

    Attributes:
        compute: takes tensors of `shapes`.
        shapes: of what it takes; gradients are those of all of them.
    """

    compute: Callable[..., tf.Tensor]
    shapes: Sequence[Sequence[int]] = (_SEQUENCE,)


def _layer_normalization(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)


def _batch_normalization(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    scale, offset = tf.cast(scale, tf.float32), tf.cast(offset, tf.float32)
    return tf.compat.v1.nn.fused_batch_norm(x, scale, offset)[0]


def _dropout(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.experimental.stateless_dropout(x, 0.1, seed=[1, 2], rng_alg="philox")


# Functions that keras_mp replaces are looked up when they are called.
OPERATIONS = {
    "matrix product": _Operation(tf.linalg.matmul, [(1024, 512), (512, 512)]),
    "batch of products": _Operation(tf.linalg.matmul, [(64, 128, 64), (64, 64, 128)]),
    "attention": _Operation(
        lambda w, x: tf.einsum("acbe,aecd->abcd", w, x), [(8, 4, 128, 128), (8, 128, 4, 64)]
    ),
    "Conv1D": _Operation(lambda x, k: tf.nn.conv1d(x, k, 1, "SAME"), [(16, 128, 64), (3, 64, 64)]),
    "Conv2D": _Operation(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), [_IMAGE, (3, 3, 64, 64)]),
    "Conv2D, 1x1": _Operation(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), [_IMAGE, (1, 1, 64, 64)]),
    "Conv2D, stride 2": _Operation(
        lambda x, k: tf.nn.conv2d(x, k, 2, "SAME"), [_IMAGE, (3, 3, 64, 64)]
    ),
    "Conv2DTranspose": _Operation(
        lambda x, k: tf.nn.conv2d_transpose(x, k, (8, 32, 32, 64), 1, "SAME"),
        [_IMAGE, (3, 3, 64, 64)],
    ),
    "DepthwiseConv2D": _Operation(
        lambda x, k: tf.nn.depthwise_conv2d(x, k, [1, 1, 1, 1], "SAME"), [_IMAGE, (3, 3, 64, 1)]
    ),
    "Conv3D": _Operation(
        lambda x, k: tf.nn.conv3d(x, k, [1] * 5, "SAME"), [_VOLUME, (3, 3, 3, 32, 32)]
    ),
    "add": _Operation(tf.add, [_SEQUENCE] * 2),
    "multiply": _Operation(tf.multiply, [_SEQUENCE] * 2),
    "add_n of 3": _Operation(lambda *x: tf.add_n(x), [_SEQUENCE] * 3),
    "bias": _Operation(tf.nn.bias_add, [_SEQUENCE, (512,)]),
    "relu": _Operation(tf.nn.relu),
    "leaky relu": _Operation(lambda x: tf.nn.leaky_relu(x)),
    "elu": _Operation(lambda x: tf.nn.elu(x)),
    "selu": _Operation(lambda x: tf.nn.selu(x)),
    "gelu": _Operation(lambda x: tf.nn.gelu(x)),
    "gelu by tanh": _Operation(lambda x: tf.nn.gelu(x, approximate=True)),
    "silu": _Operation(lambda x: tf.nn.silu(x)),
    "softplus": _Operation(lambda x: tf.nn.softplus(x)),
    "sigmoid": _Operation(lambda x: tf.nn.sigmoid(x)),
    "tanh": _Operation(lambda x: tf.tanh(x)),
    "tanh times sigmoid": _Operation(lambda x: tf.tanh(x) * tf.nn.sigmoid(x)),
    "erf": _Operation(lambda x: tf.math.erf(x)),
    "exp": _Operation(lambda x: tf.exp(x)),
    "softmax": _Operation(lambda x: tf.nn.softmax(x)),
    "log of softmax": _Operation(lambda x: tf.nn.log_softmax(x)),
    "dropout": _Operation(_dropout),
    "layer normalization": _Operation(_layer_normalization, [_SEQUENCE, (512,), (512,)]),
    "batch normalization": _Operation(_batch_normalization, [_IMAGE, (64,), (64,)]),
    "sum of rows": _Operation(lambda x: tf.reduce_sum(x, [0, 1])),
    "mean": _Operation(lambda x: tf.reduce_mean(x, -1)),
    "maximum": _Operation(lambda x: tf.reduce_max(x, 1)),
    "cumsum": _Operation(lambda x: tf.cumsum(x, 1)),
    "average pooling": _Operation(lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID"), [_IMAGE]),
    "max pooling": _Operation(lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"), [_IMAGE]),
    "resize": _Operation(
        lambda x: tf.raw_ops.ResizeNearestNeighbor(images=x, size=[64, 64]), [_IMAGE]
    ),
    "transpose": _Operation(lambda x: tf.transpose(x, [0, 2, 1])),
    "concatenation": _Operation(lambda *x: tf.concat(x, -1), [_SEQUENCE] * 2),
    "embedding": _Operation(
        lambda table: tf.gather(table, tf.range(2048) * 7 % 1000), [(1000, 512)]
    ),
}


def run() -> dict:
    """Times all operations; prints tables, and returns the milliseconds.

    The last table is this machine's column of `keras_mp/kernels/measured.py`.
    """
    kernels.install()
    times = tuning.measure()
    found = {name: _measure(operation) for name, operation in OPERATIONS.items()}
    for part in ("forward", "forward and backward"):
        rows = [[name, *_cells(by_part[part])] for name, by_part in found.items()]
        common.print_table(
            f"{part.capitalize()}: milliseconds in float32, and multiples of them",
            ["", *_VARIANTS],
            rows,
        )
    print(f"\n{tuning.machine()}\n{tuning.column(times)}")
    return found


def _cells(milliseconds: dict[str, float]) -> list[str]:
    reference, *others = milliseconds.values()
    return [f"{reference:.1f}", *(f"{each / reference:.2f}" for each in others)]


def _measure(operation: _Operation) -> dict[str, dict[str, float]]:
    inputs = [
        tf.random.stateless_normal(shape, seed=[1, i]) for i, shape in enumerate(operation.shapes)
    ]
    found = {}
    for part, backward in (("forward", False), ("forward and backward", True)):
        steps = {
            variant: _step(operation, inputs, dtype, whose, backward)
            for variant, (dtype, whose) in _VARIANTS.items()
        }
        turns.take(steps, 2)
        seconds = turns.undisturbed(turns.take(steps, _TURNS))
        found[part] = {name: 1000 * each for name, each in seconds.items()}
    return found


def _step(
    operation: _Operation, inputs: list[tf.Tensor], dtype: str, whose: str, backward: bool
) -> Callable[[], Any]:
    def compute(*x: tf.Tensor) -> tf.Tensor:
        if whose != "casts":
            return operation.compute(*x)
        return tf.cast(operation.compute(*(tf.cast(each, tf.float32) for each in x)), dtype)

    @tf.function
    def step(*x: tf.Tensor) -> Any:
        # What is traced keeps it.
        with reach.entered(tf.as_dtype(dtype) if whose == "keras_mp" else None):
            if not backward:
                return compute(*x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = compute(*x)
        # A gradient that depends on the output, as in a model, so that nothing is left out.
        return tape.gradient(y, x, output_gradients=y)

    cast = [tf.cast(each, dtype) for each in inputs]
    return lambda: tf.nest.map_structure(_wait, step(*cast))


def _wait(result: Any) -> None:
    values = result.values if isinstance(result, tf.IndexedSlices) else result
    tf.reshape(values, [-1])[-1].numpy()
