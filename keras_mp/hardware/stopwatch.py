"""Measures how fast a device trains in each dtype.

It trains with a matrix product and a convolution. The forward pass and both gradients are timed: a
dtype can be as fast as float32 in the first and many times slower in the others. What keras_mp
computes in float32 inside, since that is faster, is timed so. This module needs TensorFlow only.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp.hardware import turns as clock
from keras_mp.hardware.turns import fastest
from keras_mp.kernels import slow

DTYPES = ("float32", "bfloat16", "float16")

Speeds = dict[str, dict[str, float]]

# For each operation. It delays the training of a program.
_SECONDS = 0.15
_FEWEST_TURNS = 3
# A problem that takes float32 so long hides the overhead of a call.
_LARGE_ENOUGH = 0.002
# There are CPUs on which a dtype is 90 times slower. There a small problem is enough.
_MUCH_SLOWER = 16
# A gradient takes as many floating-point operations as the forward pass, and there are two.
_PASSES = 3

_IMAGE, _CHANNELS, _KERNEL = 32, 64, 3


class Problem(NamedTuple):
    """A computation to time.

    Attributes:
        compute: takes the arguments.
        arguments: float32 tensors.
        count: int. The number of floating-point operations.
    """

    compute: Callable[..., Any]
    arguments: tuple[tf.Tensor, ...]
    count: int


def measure(device: str) -> Speeds:
    """Times a matrix product and a convolution, forward and backward, in each dtype.

    To be called in eager.

    Args:
        device: str, such as "CPU:0".

    Returns:
        dict of dicts: by operation and dtype, how many floating-point operations a second.
    """
    speeds = {}
    with tf.device(device):
        problems = {"matrix product": _matrix_products(), "convolution": _convolutions()}
        for operation, growing in problems.items():
            count, turns = _race(growing)
            speeds[operation] = {dtype: count / best for dtype, best in fastest(turns).items()}
    return speeds


def _matrix_products() -> Iterator[Problem]:
    for size in (256, 512, 1024, 2048, 4096):
        a, b = random([size, size]), random([size, size])
        yield Problem(_multiply, (a, b), _PASSES * 2 * size**3)


def _multiply(a: tf.Tensor, b: tf.Tensor) -> list[tf.Tensor]:
    multiply = functools.partial(_compute, "MatMul")
    y = multiply(a=a, b=b)
    return [y, multiply(a=y, b=b, transpose_b=True), multiply(a=a, b=y, transpose_a=True)]


def _convolutions() -> Iterator[Problem]:
    kernel = random([_KERNEL, _KERNEL, _CHANNELS, _CHANNELS])
    for batch in (1, 4, 16, 64, 256):
        images = random([batch, _IMAGE, _IMAGE, _CHANNELS])
        count = _PASSES * 2 * batch * (_IMAGE * _KERNEL * _CHANNELS) ** 2
        yield Problem(_convolve, (images, kernel), count)


def _convolve(x: tf.Tensor, kernel: tf.Tensor) -> list[tf.Tensor]:
    how = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    y = _compute("Conv2D", input=x, filter=kernel, **how)
    gradient = functools.partial(_compute, out_backprop=y, **how)
    return [
        y,
        gradient("Conv2DBackpropInput", input_sizes=x.shape, filter=kernel),
        gradient("Conv2DBackpropFilter", input=x, filter_sizes=kernel.shape),
    ]


def _compute(op: str, **arguments: Any) -> tf.Tensor:
    """Computes an operation as keras_mp does in reach."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, tf.Tensor)}
    [dtype] = {value.dtype for value in tensors.values()}
    own = getattr(tf.raw_ops, op)
    if dtype == tf.float32 or not slow.is_slow_here(op, dtype, arguments):
        return own(**arguments)
    wide = {name: tf.cast(value, tf.float32) for name, value in tensors.items()}
    return tf.cast(own(**{**arguments, **wide}), dtype)


def random(shape: list[int]) -> tf.Tensor:
    """Returns random numbers, the same in each call."""
    # Stateless: a program draws the same numbers whether something was measured or not.
    return tf.random.stateless_normal(shape, seed=(0, 0))


def _race(problems: Iterator[Problem]) -> tuple[int, dict[str, list[float]]]:
    """Times the dtypes in turns, with one of some growing problems.

    Returns:
        The number of operations that it takes, and the turns of each dtype.
    """
    is_first, problem = True, next(problems)
    while True:
        arguments = {dtype: [tf.cast(a, dtype) for a in problem.arguments] for dtype in DTYPES}
        _take_turns(problem, arguments, 1)  # Kernels are made when they are called first.
        turns = _take_turns(problem, arguments, _FEWEST_TURNS)
        seconds = fastest(turns)
        is_large_enough = not is_first and seconds["float32"] > _LARGE_ENOUGH
        is_much_slower = max(seconds.values()) > _MUCH_SLOWER * seconds["float32"]
        larger = None if is_large_enough or is_much_slower else next(problems, None)
        if larger is None:
            break
        is_first, problem = False, larger
    count = max(_FEWEST_TURNS, int(_SECONDS / sum(seconds.values())))
    more = _take_turns(problem, arguments, count)
    return problem.count, {dtype: turns[dtype] + more[dtype] for dtype in DTYPES}


def _take_turns(
    problem: Problem, arguments: dict[str, list[tf.Tensor]], count: int
) -> dict[str, list[float]]:
    def step(dtype: str) -> None:
        # A device may return before it has computed. A number that is read has been computed.
        for result in problem.compute(*arguments[dtype]):
            result[0, 0].numpy()

    return clock.take({dtype: functools.partial(step, dtype) for dtype in DTYPES}, count)
