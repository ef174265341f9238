"""Measures how fast operations are, forward and backward, in each dtype."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import kernels
from keras_mp.hardware import devices, turns
from keras_mp.hardware.stopwatch import DTYPES, Problem, random
from keras_mp.hooks import reach

_TURNS = 5
_LONG_ENOUGH = 0.02  # seconds of a turn

# The operations of which numbers that are read and written are counted.
_OF_MEMORY = ("multiply, add, ReLU", "softmax", "sum of rows")

# Sizes: of a square matrix; batch, image and channels; how many numbers.
_QUICK = (64, (1, 8, 8), 2**10)
_OF_CPUS = (1024, (8, 32, 64), 2**22)
_OF_GPUS = (8192, (128, 56, 128), 2**26)


def measure(quick: bool) -> dict[str, dict[str, Any]]:
    """Times operations as a program that uses keras_mp computes them.

    Args:
        quick: bool. Takes small sizes, and one turn.

    Returns:
        dict of names and dicts: "unit" and, by dtype, how many a second.
    """
    kernels.install()
    sizes = _QUICK if quick else _OF_GPUS if devices.gpus() else _OF_CPUS
    # Operations without a dtype of 16 bits are TensorFlow's own in reach, too.
    with reach.entered(tf.bfloat16):
        return {
            name: _speeds(problem, "GB/s" if name in _OF_MEMORY else "GF/s", quick)
            for name, problem in _problems(*sizes).items()
        }


def _problems(size: int, image: tuple[int, int, int], numbers: int) -> dict[str, Problem]:
    batch, width, channels = image
    matrix = random([size, size])
    images = random([batch, width, width, channels])
    filters = random([3, 3, channels, channels])
    each = random([3, 3, channels, 1])
    rows = random([numbers // 256, 256])
    product, convolution = 2 * size**3, 18 * batch * (width * channels) ** 2
    depthwise = convolution // channels
    problems = {
        "matrix product": Problem(tf.matmul, (matrix, matrix), product),
        "convolution": Problem(_convolve, (images, filters), convolution),
        "depthwise convolution": Problem(_convolve_each, (images, each), depthwise),
    }
    backward = {
        f"{name}, backward": problem._replace(
            compute=_gradients(problem.compute), count=2 * problem.count
        )
        for name, problem in problems.items()
    }
    return {
        **problems,
        **backward,
        "multiply, add, ReLU": Problem(
            lambda x, y: tf.nn.relu(x * y + x), (rows, rows), 3 * numbers
        ),
        "softmax": Problem(tf.nn.softmax, (rows,), 2 * numbers),
        "sum of rows": Problem(lambda x: tf.reduce_sum(x, 0), (rows,), numbers),
    }


def _convolve(x: tf.Tensor, filters: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv2d(x, filters, 1, "SAME")


def _convolve_each(x: tf.Tensor, filters: tf.Tensor) -> tf.Tensor:
    return tf.nn.depthwise_conv2d(x, filters, [1] * 4, "SAME")


def _gradients(compute: Callable[..., tf.Tensor]) -> Callable[..., Any]:
    """Returns a function that computes the gradients of all arguments."""

    def backward(*arguments: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            result = compute(*arguments)
        return tape.gradient(result, arguments)

    return backward


def _speeds(problem: Problem, unit: str, quick: bool) -> dict[str, Any]:
    """Returns how many a second in each dtype, or None where TensorFlow has no kernel."""
    function = tf.function(problem.compute, autograph=False)
    steps, repeats = {}, {}
    for dtype in DTYPES:
        once = functools.partial(_run, function, [tf.cast(v, dtype) for v in problem.arguments])
        try:
            turns.take({dtype: once}, 1)  # Kernels are chosen and made when they first run.
            seconds = turns.fastest(turns.take({dtype: once}, 1))[dtype]
        except (tf.errors.OpError, ValueError):
            continue
        repeats[dtype] = 1 if quick else max(1, int(_LONG_ENOUGH / seconds))
        steps[dtype] = functools.partial(once, repeats[dtype])
    speeds: dict[str, Any] = {"unit": unit, **dict.fromkeys(DTYPES)}
    for dtype, seconds in turns.medians(turns.take(steps, 1 if quick else _TURNS)).items():
        size = tf.as_dtype(dtype).size if unit == "GB/s" else 1
        speeds[dtype] = problem.count * size * repeats[dtype] / seconds
    return speeds


def _run(function: Callable[..., Any], arguments: list[tf.Tensor], repeats: int = 1) -> None:
    for _ in range(repeats - 1):
        function(*arguments)
    result = function(*arguments)
    # A device may return before it has computed. A number that is read has been computed.
    tf.reshape(tf.nest.flatten(result)[-1], [-1])[0].numpy()
