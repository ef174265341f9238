"""The promises of keras_mp, tried on the device that TensorFlow computes on.

Each function returns whether a promise is kept, and what was found. They use what programs use.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import keras_mp
from keras_mp import kernels
from keras_mp.hooks import reach
from keras_mp.kernels import convolutions, slow, sums, trials
from keras_mp.support.dtypes import LOW_PRECISION
from tests import steps
from tests.models import state

Found = tuple[bool, str]
_WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda function: function,
    "graph": functools.partial(tf.function, autograph=False),
    "XLA": functools.partial(tf.function, autograph=False, jit_compile=True),
}
# How far a result in 16 bits may be from that in float32, in terms of its own size.
_TOLERANCE = {"float16": 2**-9, "bfloat16": 2**-6}


class Promise(NamedTuple):
    """A promise on this machine.

    Attributes:
        name: str. What is promised.
        kept: bool.
        figure: str. What was found.
    """

    name: str
    kept: bool
    figure: str


def judge(name: str, find: Callable[[], Found]) -> Promise:
    """Tries a promise. It is not kept if it raises.

    Args:
        name: str. What is promised.
        find: returns whether it is kept, and what was found.
    """
    try:
        kept, figure = find()
    except Exception as error:  # The other promises are tried, whatever this one raises.
        return Promise(name, False, first_line(error))
    return Promise(name, bool(kept), figure)


def first_line(error: Exception) -> str:
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def measure_kernels() -> list[dict[str, Any]]:
    """Computes the examples of all kernels that keras_mp replaces if they are wrong.

    Returns:
        For each operation, dtype and case, which result is expected, that of TensorFlow's own
        kernel, and that after keras_mp has replaced it; None where there is no kernel.
    """
    kernels.install()
    return [
        _finding(op, kernel, dtype, case)
        for table in (sums, convolutions)
        for op, kernel in table.KERNELS.items()
        for dtype in LOW_PRECISION
        for case in kernel.cases
    ]


def _finding(op: str, kernel: trials.Kernel, dtype: tf.DType, case: Any) -> dict[str, Any]:
    arguments, expected = kernel.example(dtype, case), kernel.expected

    def result_of(compute: Callable[..., tf.Tensor]) -> float | None:
        try:
            return float(trials.last_value(compute(**arguments)))
        except (tf.errors.OpError, ValueError):
            return None

    def is_wrong(result: float | None) -> bool:
        return result is not None and not trials.is_right(result, expected)

    own = result_of(getattr(tf.raw_ops, op))
    with reach.entered(dtype):
        ours = result_of(trials.in_its_module(getattr(tf.raw_ops, op)))
    found = {"op": op, "dtype": dtype.name, "case": str(case), "expected": expected}
    found |= {"own": own, "ours": ours}
    return {**found, "own_is_wrong": is_wrong(own), "ours_is_wrong": is_wrong(ours)}


def sums_are_right(found: list[dict[str, Any]]) -> Found:
    """Whether all that was replaced is right, where TensorFlow has a kernel at all."""
    own, ours = (sum(not each[f"{who}_is_wrong"] for each in found) for who in ("own", "ours"))
    return ours == len(found), f"{ours} of {len(found)}; with TensorFlow's own kernels {own}"


def _scaled_step(
    optimizer: keras_mp.LossScaleOptimizer, weights: tf.Variable
) -> Callable[[tf.Tensor], None]:
    """Returns a step with known scaled gradients in float16.

    They are the loss scale times the factor.
    """

    def loss(factor: tf.Tensor) -> tf.Tensor:
        product = tf.cast(weights, tf.float16) * factor
        return tf.reduce_sum(tf.cast(product, tf.float32))

    return steps.rfc(optimizer, loss, [weights])


def _overflow_is_skipped(way: str) -> Found:
    weights = tf.Variable(tf.constant([1.0, 2.0, 3.0]))
    optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.Adam(0.1))
    optimizer.build([weights])
    step = _WAYS[way](_scaled_step(optimizer, weights))
    step(tf.constant(1.0, tf.float16))
    scale = float(optimizer.loss_scale())
    before = [weights.numpy(), *state(optimizer)]
    step(tf.constant(4.0, tf.float16))
    after = [weights.numpy(), *state(optimizer)]
    lowered = float(optimizer.loss_scale())
    changed = sum(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    figure = f"scale {scale:g} to {lowered:g}; {changed} of {len(before)} variables changed"
    return lowered == scale / 2 and not changed, figure


def _good_step_is_exact(way: str) -> Found:
    factor = tf.constant(0.5, tf.float16)
    wrapped, exact = (
        tf.Variable(tf.constant([1.0, 2.0, 3.0])),
        tf.Variable(tf.constant([1.0, 2.0, 3.0])),
    )
    optimizer, inner = (tf.keras.optimizers.Adam(0.1) for _ in range(2))
    optimizer = keras_mp.LossScaleOptimizer(optimizer)
    optimizer.build([wrapped])
    inner.build([exact])
    step = _WAYS[way](_scaled_step(optimizer, wrapped))
    apply = _WAYS[way](lambda gradient: inner.apply_gradients([(gradient, exact)]))
    for _ in range(3):
        step(factor)
        apply(tf.fill([3], 0.5))
    difference = float(tf.reduce_max(tf.abs(wrapped - exact)))
    return difference <= 1e-6, f"3 steps of Adam, largest difference {difference:.2g}"


def _scaler_skips() -> Found:
    weight, optimizer = tf.Variable(tf.constant(1.0)), tf.keras.optimizers.SGD(0.25)
    scaler = keras_mp.GradScaler()
    optimizer.build([weight])

    step = _WAYS["graph"](steps.scaler(scaler, optimizer, lambda factor: weight * factor, [weight]))
    values = []
    for factor in (1.0, float("inf"), 1.0):
        step(tf.constant(factor))
        values.append(float(weight))
    return values == [0.75, 0.75, 0.5], f"weight {values} in a good, an infinite, a good step"


def _tape_finds_a_scale() -> Found:
    weight = tf.Variable(tf.constant(1.0))
    loss_scale = keras_mp.DynamicLossScale(2.0**24)

    @_WAYS["graph"]
    def gradient() -> tf.Tensor:
        with keras_mp.LossScaleGradientTape(loss_scale) as tape:
            loss = tf.cast(tf.cast(weight, tf.float16) * 3, tf.float32)
        return tape.gradient(loss, weight)

    found, scale = float(gradient()), float(loss_scale())
    return found == 3 and scale < 2**16, f"gradient {found:g}; scale 2**24 to {scale:g}"


def _small_updates_are_kept() -> Found:
    weight = tf.Variable(tf.constant(1.0, tf.bfloat16))
    optimizer = keras_mp.MasterWeightOptimizer(tf.keras.optimizers.SGD(0.001))
    optimizer.build([weight])
    apply = _WAYS["graph"](
        lambda: optimizer.apply_gradients([(tf.constant(1.0, tf.bfloat16), weight)])
    )
    for _ in range(100):
        apply()
    found = float(weight)
    return abs(found - 0.9) <= 2**-8, f"100 steps of 0.001 from 1 in bfloat16: {found:g}"


def _losses_are_float32() -> Found:
    error = keras_mp.losses.MeanSquaredError()
    squared = float(error(tf.zeros([4], tf.float16), tf.fill([4], tf.constant(300, tf.float16))))
    cross_entropy = keras_mp.losses.SparseCategoricalCrossentropy()

    @_WAYS["graph"]
    def gradient(logits: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = cross_entropy(tf.constant([1]), tf.nn.softmax(logits))
        return tape.gradient(loss, logits)

    slope = float(gradient(tf.constant([[30.0, 0.0]], tf.float16))[0, 1])
    figure = f"(300 in float16) squared {squared:g}; slope of a lost class {slope:g}"
    return squared == 90000 and abs(slope + 1) < 0.01, figure


def _autocast(dtype: str) -> Found:
    # Products of about 1, so that rounding moves no probability by much.
    x = tf.random.stateless_normal([64, 64], seed=(1, 2)) / 4

    @_WAYS["graph"]
    def product() -> tf.Tensor:
        with keras_mp.autocast(dtype):
            return tf.nn.softmax(tf.matmul(x, x))

    # On a CPU without units for the dtype it would be computed in float32.
    with slow.switched_off():
        graph = product.get_concrete_function().graph
    found = {op.type: op.inputs[0].dtype.name for op in graph.get_operations() if op.inputs}
    result, exact = product(), tf.nn.softmax(tf.matmul(x, x))
    error = float(tf.reduce_max(tf.abs(tf.math.log(result / exact))))
    dtypes = found["MatMul"], found["Softmax"], result.dtype.name
    figure = f"MatMul in {found['MatMul']}, Softmax in {found['Softmax']}, error {error:.2g}"
    return dtypes == (dtype, "float32", "float32") and error < 4 * _TOLERANCE[dtype], figure


def _training(dtype: str) -> Found:
    rng = np.random.default_rng(0)
    x = rng.normal(size=[256, 16, 16, 3]).astype("float32")
    y = (x.mean((1, 2)).argmax(-1)).astype("int32")
    losses = {}
    for policy in ("float32", f"mixed_{dtype}"):
        tf.keras.utils.set_random_seed(0)
        with keras_mp.policy_scope(policy):
            model = _convolutional()
            loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(tf.keras.optimizers.Adam(0.003), loss)
        history = model.fit(x, y, batch_size=32, epochs=4, shuffle=False, verbose=0).history
        losses[policy] = history["loss"]
    weights = {tf.as_dtype(weight.dtype).name for weight in model.weights}
    is_mixed = weights == {"float32"} and model.layers[1].compute_dtype == dtype
    [right, *_, last], found = losses["float32"], losses[f"mixed_{dtype}"][-1]
    figure = f"loss {right:.3f} to {found:.3f}, in float32 to {last:.3f}"
    # Most of what float32 learns, however little that is.
    return is_mixed and right - found > 0.8 * (right - last) > 0, figure


# By name, the function that tries it.
PROMISES: dict[str, Callable[[], Found]] = {
    **{
        f"a step that overflows is skipped ({way})": functools.partial(_overflow_is_skipped, way)
        for way in _WAYS
    },
    **{
        f"a good step is the optimizer's own ({way})": functools.partial(_good_step_is_exact, way)
        for way in _WAYS
    },
    "a GradScaler skips an infinite gradient": _scaler_skips,
    "a LossScaleGradientTape finds a scale": _tape_finds_a_scale,
    "a MasterWeightOptimizer keeps small updates": _small_updates_are_kept,
    "losses of float16 outputs are right": _losses_are_float32,
    **{
        f"{name} {dtype}": functools.partial(find, dtype)
        for name, find in (
            ("autocast multiplies in", _autocast),
            ("layers compute, and fit trains, in", _training),
        )
        for dtype in ("float16", "bfloat16")
    },
}


def _convolutional() -> tf.keras.Model:
    """A small network with two convolutions for images of 16x16.

    Its outputs are float32.
    """
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input([16, 16, 3]),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Conv2D(8, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, dtype="float32"),
        ]
    )
