"""Measures how fast a device trains in each dtype.

It trains with a matrix product and a convolution. The forward pass and both gradients are timed: a
dtype can be as fast as float32 in the first and many times slower in the others. What keras_mp
computes in float32 inside, since that is faster, is timed so. This module needs TensorFlow only.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from keras_mp import kernels
from keras_mp.hardware import turns
from keras_mp.hooks import reach

DTYPES = ("float32", "bfloat16", "float16")

Speeds = dict[str, dict[str, float]]

# For each operation. It delays the training of a program.
_SECONDS = 0.15
_FEWEST_TURNS = 3
# A problem that takes float32 so long hides the overhead of a call.
_LARGE_ENOUGH = 0.002
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
    kernels.install()
    with tf.device(device):
        products = _speeds(_matrix_products())
        return {"matrix product": products, "convolution": _speeds(_convolutions())}


def _matrix_products() -> Iterator[Problem]:
    for size in (256, 512, 1024, 2048, 4096):
        a, b = random([size, size]), random([size, size])
        yield Problem(tf.matmul, (a, b), _PASSES * 2 * size**3)


def _convolutions() -> Iterator[Problem]:
    kernel = random([_KERNEL, _KERNEL, _CHANNELS, _CHANNELS])
    convolve = functools.partial(tf.nn.conv2d, strides=1, padding="SAME")
    for batch in (1, 4, 16, 64, 256):
        images = random([batch, _IMAGE, _IMAGE, _CHANNELS])
        count = _PASSES * 2 * batch * (_IMAGE * _KERNEL * _CHANNELS) ** 2
        yield Problem(convolve, (images, kernel), count)


def _trained(problem: Problem, arguments: list[tf.Tensor], dtype: str) -> list[Any]:
    """Returns the result of a problem and its gradients, as in a layer of the dtype."""
    with reach.entered(None if dtype == "float32" else tf.as_dtype(dtype)):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            result = problem.compute(*arguments)
        gradients: Any = tape.gradient(result, arguments, output_gradients=result)
    return [result, *gradients]


def random(shape: list[int]) -> tf.Tensor:
    """Returns random numbers, the same in each call."""
    # Stateless: a program draws the same numbers whether something was measured or not.
    return tf.random.stateless_normal(shape, seed=(0, 0))


def _speeds(problems: Iterator[Problem]) -> dict[str, float]:
    """Times the dtypes in turns, with one of some growing problems.

    Returns:
        dict from dtypes to floating-point operations a second. Other load only makes turns slower,
        so the fastest one counts.
    """
    problem = next(problems)
    taken = _take_turns(problem, _FEWEST_TURNS)  # The device wakes up.
    for problem in problems:
        _take_turns(problem, 1)  # Kernels are made when they are called first.
        taken = _take_turns(problem, _FEWEST_TURNS)
        if min(taken["float32"]) > _LARGE_ENOUGH:
            break
    seconds = sum(map(min, taken.values()))
    more = _take_turns(problem, max(_FEWEST_TURNS, int(_SECONDS / seconds)))
    return {dtype: problem.count / min(taken[dtype] + more[dtype]) for dtype in DTYPES}


def _take_turns(problem: Problem, count: int) -> dict[str, list[float]]:
    arguments = {dtype: [tf.cast(each, dtype) for each in problem.arguments] for dtype in DTYPES}

    def step(dtype: str) -> None:
        # A device may return before it has computed. A number that is read has been computed.
        for result in _trained(problem, arguments[dtype], dtype):
            result[0, 0].numpy()

    return turns.take({dtype: functools.partial(step, dtype) for dtype in DTYPES}, count)
