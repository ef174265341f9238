"""Training steps of every kind that keras_mp makes, for `benchmarks.gpu_kernels` to look at."""

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import keras_mp

X = tf.TensorSpec([8, 16])


def _network(dtype: str = "float32") -> list[tf.Variable]:
    return [tf.Variable(tf.ones(shape, dtype)) for shape in ([16, 16], [16], [16, 4])]


def _loss(variables: list[tf.Variable], x: tf.Tensor) -> tf.Tensor:
    kernel, bias, head = variables
    x = tf.cast(x, kernel.dtype)
    return tf.reduce_mean(tf.nn.relu(x @ kernel + bias) @ head)


def _tape_step(
    optimizer: Any,
    scales: bool,
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
            if scales:
                scale = getattr(optimizer, "get_scaled_loss", None) or optimizer.scale_loss
                loss = scale(loss)
        gradients = tape.gradient(loss, variables)
        if scales and hasattr(optimizer, "get_unscaled_gradients"):
            gradients = optimizer.get_unscaled_gradients(gradients)
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


def _fit_step(policy: Any) -> Any:
    with keras_mp.policy_scope(policy):
        model = _model()
        model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return _train_step(model)


def _fit_of_keras(name: str) -> Any:
    before = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy(name)
    try:
        model = _model()
        with warnings.catch_warnings():
            # Keras's own mixed precision is what it is compared with.
            warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
            model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    finally:
        tf.keras.mixed_precision.set_global_policy(before)
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


# By name, what makes a step, and the name of the step that it is compared with.
STEPS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "float32, no wrapper": (lambda: _tape_step(_adam(), False), None),
    "Keras's LossScaleOptimizer": (
        lambda: _tape_step(tf.keras.mixed_precision.LossScaleOptimizer(_adam()), True),
        None,
    ),
    "LossScaleOptimizer, dynamic": (
        lambda: _tape_step(keras_mp.LossScaleOptimizer(_adam()), True),
        "Keras's LossScaleOptimizer",
    ),
    "LossScaleOptimizer, fixed": (
        lambda: _tape_step(keras_mp.LossScaleOptimizer(_adam(), 1024), True),
        "float32, no wrapper",
    ),
    "GradScaler": (_scaler_step, "Keras's LossScaleOptimizer"),
    "LossScaleGradientTape": (_scaling_tape_step, "Keras's LossScaleOptimizer"),
    "AllReduceOptimizer": (
        lambda: _tape_step(keras_mp.AllReduceOptimizer(_adam()), False),
        "float32, no wrapper",
    ),
    "MasterWeightOptimizer": (
        lambda: _tape_step(keras_mp.MasterWeightOptimizer(_adam()), False, dtype="bfloat16"),
        "float32, no wrapper",
    ),
    "autocast, float16": (
        lambda: _tape_step(
            keras_mp.LossScaleOptimizer(_adam()), True, lambda: keras_mp.autocast("float16")
        ),
        "Keras's LossScaleOptimizer",
    ),
    "autocast, bfloat16": (
        lambda: _tape_step(_adam(), False, lambda: keras_mp.autocast("bfloat16")),
        "float32, no wrapper",
    ),
    "fit, Keras's mixed_float16": (lambda: _fit_of_keras("mixed_float16"), None),
    "fit, mixed_float16": (lambda: _fit_step("mixed_float16"), "fit, Keras's mixed_float16"),
    "fit, Keras's mixed_bfloat16": (lambda: _fit_of_keras("mixed_bfloat16"), None),
    "fit, mixed_bfloat16": (lambda: _fit_step("mixed_bfloat16"), "fit, Keras's mixed_bfloat16"),
}
