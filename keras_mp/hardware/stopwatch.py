"""How fast a device computes a matrix product and a convolution, in each dtype. TensorFlow only."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf

DTYPES = ("float32", "bfloat16", "float16")
MATRIX_PRODUCT, CONVOLUTION = OPERATIONS = ("matrix product", "convolution")

Speeds = dict[str, dict[str, float]]

# For each operation. A program that wants to train does not wait long.
_SECONDS = 0.15
_FEWEST_TURNS = 3
# float32 takes so long with a problem that is large enough to hide what a call costs in itself.
_LARGE_ENOUGH = 0.002
# There are CPUs on which a dtype is 90 times slower. Of that a small problem is enough.
_MUCH_SLOWER = 16
# On a busy machine the median of the turns takes longer than the fastest by more than that.
_CALM = 1.25

_IMAGE, _CHANNELS, _KERNEL = 32, 64, 3


class _Problem(NamedTuple):
    """Something to compute.

    Attributes:
        operation: what computes it.
        arguments: float32 tensors.
        count: number of floating-point operations that it takes.
    """

    operation: Callable[..., tf.Tensor]
    arguments: tuple[tf.Tensor, ...]
    count: int


class Turn(NamedTuple):
    """How long a call took.

    Attributes:
        wall: seconds on the clock.
        cpu: seconds that all threads of this process computed.
    """

    wall: float
    cpu: float


def measure(device: str) -> Speeds:
    """Times a matrix product and a convolution in float32, bfloat16 and float16.

    To be called in eager.

    Args:
        device: str, such as "CPU:0".

    Returns:
        dict of dicts: by operation and dtype, how many floating-point operations a second.
    """
    problems = {MATRIX_PRODUCT: _matrix_products, CONVOLUTION: _convolutions}
    speeds = {}
    with tf.device(device):
        for operation in OPERATIONS:
            count, turns = _race(problems[operation]())
            seconds = fastest(turns) if device.startswith("GPU") else undisturbed(turns)
            speeds[operation] = {dtype: count / seconds[dtype] for dtype in DTYPES}
    return speeds


def fastest(turns: dict[str, list[Turn]]) -> dict[str, float]:
    """Seconds of each dtype's fastest turn. Other load can only make a turn slower."""
    return {dtype: min(turn.wall for turn in of_dtype) for dtype, of_dtype in turns.items()}


def undisturbed(turns: dict[str, list[Turn]]) -> dict[str, float]:
    """Seconds that each dtype would take on a CPU that has nothing else to do.

    Threads that wait for a core do not compute, so while others use the cores, it is the time in
    which this process computes that tells how the dtypes compare.

    Args:
        turns: by dtype, what took turns with the others.
    """
    seconds = fastest(turns)
    medians = {d: statistics.median(turn.wall for turn in turns[d]) for d in turns}
    computed = {d: statistics.median(turn.cpu for turn in turns[d]) for d in turns}
    is_calm = all(medians[d] < _CALM * seconds[d] for d in turns)
    # Some systems count CPU time in steps that are longer than a turn.
    if is_calm or min(computed.values()) == 0:
        return seconds
    threads = max(turn.cpu / turn.wall for of_dtype in turns.values() for turn in of_dtype)
    return {dtype: computed[dtype] / threads for dtype in turns}


def _matrix_products() -> Iterator[_Problem]:
    for size in (256, 512, 1024, 2048, 4096):
        a, b = _random([size, size]), _random([size, size])
        yield _Problem(tf.linalg.matmul, (a, b), 2 * size**3)


def _convolutions() -> Iterator[_Problem]:
    kernel = _random([_KERNEL, _KERNEL, _CHANNELS, _CHANNELS])
    for batch in (1, 4, 16, 64, 256):
        images = _random([batch, _IMAGE, _IMAGE, _CHANNELS])
        count = 2 * batch * (_IMAGE * _KERNEL * _CHANNELS) ** 2
        yield _Problem(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), (images, kernel), count)


def _random(shape: list[int]) -> tf.Tensor:
    # Stateless: a program draws the same numbers whether something was measured or not.
    return tf.random.stateless_normal(shape, seed=(0, 0))


def _race(problems: Iterator[_Problem]) -> tuple[int, dict[str, list[Turn]]]:
    """Lets the dtypes take turns with one of some growing problems.

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
    problem: _Problem, arguments: dict[str, list[tf.Tensor]], count: int
) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {dtype: [] for dtype in DTYPES}
    order = list(DTYPES)
    for _ in range(count):
        for dtype in order:
            start = time.perf_counter(), time.process_time()
            # A device may return before it has computed; of a number that is read it has.
            problem.operation(*arguments[dtype])[0, 0].numpy()
            end = time.perf_counter(), time.process_time()
            turns[dtype].append(Turn(end[0] - start[0], end[1] - start[1]))
        order.append(order.pop(0))  # What comes after a slow one has the caches against it.
    return turns
