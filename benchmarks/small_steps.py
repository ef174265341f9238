"""Small training steps of every kind that keras_mp makes, to be compiled and looked at."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

import keras_mp
from benchmarks import common

X = tf.TensorSpec([8, 16])
# The ends of the names of steps that XLA compiles, and of those on two replicas.
XLA, REPLICAS = ", XLA", ", 2 replicas"


def _network(dtype: str = "float32") -> list[tf.Variable]:
    return [tf.Variable(tf.ones(shape, dtype)) for shape in ([16, 16], [16], [16, 4])]


def _loss(variables: list[tf.Variable], x: tf.Tensor) -> tf.Tensor:
    kernel, bias, head = variables
    x = tf.cast(x, kernel.dtype)
    return tf.reduce_mean(tf.nn.relu(x @ kernel + bias) @ head)


def _tape_step(
    optimizer: Any,
    inside: Callable[[], Any] | None = None,
    dtype: str = "float32",
) -> Any:
    """A step of a loop with a tape, as the README shows it."""
    variables = _network(dtype)
    if hasattr(optimizer, "build"):
        optimizer.build(variables)

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            if inside is None:
                loss = _loss(variables, x)
            else:
                with inside():
                    loss = _loss(variables, x)
            loss, unscale = common.scaled(optimizer, loss)
        gradients = unscale(tape.gradient(loss, variables))
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return tf.function(step, autograph=False)


def _adam() -> Any:
    return tf.keras.optimizers.Adam()


def _model() -> Any:
    return tf.keras.Sequential(
        [
            tf.keras.Input([16]),
            tf.keras.layers.Dense(16, activation="relu"),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.Dense(4),
        ]
    )


def _train_step(model: Any) -> Any:
    """A step of `fit`."""
    model.optimizer.build(model.trainable_variables)
    labels = tf.zeros([8], tf.int64)
    return tf.function(lambda x: model.train_step((x, labels)), autograph=False)


def _fit_step(whose: str, policy: str) -> Any:
    with common.policy(whose, policy):
        model = _model()
        model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return _train_step(model)


def _scaler_step() -> Any:
    variables, scaler = _network(), keras_mp.GradScaler()
    optimizer = _adam()
    optimizer.build(variables)

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            scaled_loss = scaler.scale(_loss(variables, x))
        gradients = tape.gradient(scaled_loss, variables)
        scaler.step(optimizer, zip(gradients, variables, strict=True))
        scaler.update()

    return tf.function(step, autograph=False)


def _scaling_tape_step() -> Any:
    variables, optimizer = _network(), _adam()
    optimizer.build(variables)
    loss_scale = keras_mp.DynamicLossScale()

    def step(x: tf.Tensor) -> None:
        with keras_mp.LossScaleGradientTape(loss_scale) as tape:
            loss = _loss(variables, x)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return tf.function(step, autograph=False)


def _compiled(make: Callable[[], Any]) -> Any:
    """A step that XLA compiles, called as `fit` of Keras 3 calls it."""
    step = tf.function(make().python_function, jit_compile=True, autograph=False)
    return tf.function(lambda x: step(x), autograph=False)


def _replicated(make: Callable[[], Any]) -> Any:
    """A step of two replicas."""
    strategy = tf.distribute.MirroredStrategy(["CPU:1", "CPU:2"])
    with strategy.scope():
        step = make().python_function
    return tf.function(lambda x: strategy.run(step, (x,)), autograph=False)


class Kind(NamedTuple):
    """A kind of step.

    Attributes:
        make: makes one.
        compared_with: the name of the step that it is compared with; None where it is no step of
            keras_mp.
        replicas: int. How many replicas it has.
    """

    make: Callable[[], Any]
    compared_with: str | None = None
    replicas: int = 1


_FLOAT32, _KERAS = "float32, no wrapper", "Keras's LossScaleOptimizer"


def _dynamic(**arguments: Any) -> Any:
    return _tape_step(keras_mp.LossScaleOptimizer(_adam(), **arguments))


def _master_weights(**arguments: Any) -> Any:
    return _tape_step(keras_mp.MasterWeightOptimizer(_adam(), **arguments), dtype="bfloat16")


def _autocast(dtype: str) -> Any:
    scales = dtype == "float16"
    optimizer = keras_mp.LossScaleOptimizer(_adam()) if scales else _adam()
    return _tape_step(optimizer, lambda: keras_mp.autocast(dtype))


# What is traced plainly, compiled by XLA, and on two replicas.
_EVERYWHERE = {
    _FLOAT32: Kind(lambda: _tape_step(_adam())),
    _KERAS: Kind(lambda: _tape_step(common.WRAPPERS["Keras"](_adam()))),
    "LossScaleOptimizer, dynamic": Kind(_dynamic, _KERAS),
    "LossScaleOptimizer, fixed": Kind(lambda: _dynamic(loss_scale=1024), _FLOAT32),
    "GradScaler": Kind(_scaler_step, _KERAS),
    "LossScaleGradientTape": Kind(_scaling_tape_step, _KERAS),
    "AllReduceOptimizer": Kind(lambda: _tape_step(keras_mp.AllReduceOptimizer(_adam())), _FLOAT32),
    "MasterWeightOptimizer, split": Kind(_master_weights, _FLOAT32),
    "autocast, float16": Kind(lambda: _autocast("float16"), _KERAS),
    "autocast, bfloat16": Kind(lambda: _autocast("bfloat16"), _FLOAT32),
    **{
        f"fit, {prefix}mixed_{dtype}": Kind(
            functools.partial(_fit_step, whose, f"mixed_{dtype}"),
            None if prefix else f"fit, Keras's mixed_{dtype}",
        )
        for dtype in ("float16", "bfloat16")
        for whose, prefix in (("Keras", "Keras's "), ("keras_mp", ""))
    },
}


def _all_through(wrap: Callable[..., Any], end: str, replicas: int = 1) -> dict[str, Kind]:
    return {
        f"{name}{end}": Kind(
            functools.partial(wrap, kind.make),
            kind.compared_with and f"{kind.compared_with}{end}",
            replicas,
        )
        for name, kind in _EVERYWHERE.items()
    }


STEPS: dict[str, Kind] = {
    **_EVERYWHERE,
    "LossScaleOptimizer, warn_after_skips=None": Kind(
        lambda: _dynamic(warn_after_skips=None), _KERAS
    ),
    "MasterWeightOptimizer, copy": Kind(lambda: _master_weights(method="copy"), _FLOAT32),
    "MasterWeightOptimizer, stochastic_rounding": Kind(
        lambda: _master_weights(method="stochastic_rounding", slot_dtype="bfloat16"), _FLOAT32
    ),
    **_all_through(_compiled, XLA),
    **_all_through(_replicated, REPLICAS, 2),
}
