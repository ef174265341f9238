"""The loss that a model is trained with, and its loss scale."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp import keras_api, losses
from keras_mp.hooks import wrapped
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.numerics import copies
from keras_mp.numerics.batches import Batch, Structure
from keras_mp.numerics.comparison.calls import Called, Variables, floating, shape_of
from keras_mp.step.schedule import INITIAL_LOSS_SCALE

# Called with a batch and the predictions of the model.
Loss = Callable[[Batch, Structure], tf.Tensor]

# A loss of `tf.keras`, by name or not, or a function of labels and predictions.
GivenLoss = str | tf.keras.losses.Loss | Callable[..., tf.Tensor]


def loss_of(
    model: tf.keras.Model,
    compiled: tf.keras.Model,
    batch: Batch,
    loss: GivenLoss | None,
    is_a_copy: bool,
) -> Loss:
    """Returns the loss of a model.

    Args:
        model: what will be run.
        compiled: the model of the user, which may be compiled.
        batch: Batch. Without labels, or without a loss, it is `signed_mean` of the outputs.
        loss: a loss of `tf.keras`, by name or not, or a function; None for that of `compiled`.
        is_a_copy: bool. Whether `model` has to be compiled in the same way as `compiled`.
    """
    if loss is not None and batch.y is not None:
        return given_loss(model, losses.get(loss))
    if getattr(compiled, "loss", None) and batch.y is not None:
        return compiled_loss(model, compiled, is_a_copy)
    return signed_mean


def given_loss(model: tf.keras.Model, function: Callable[..., tf.Tensor]) -> Loss:
    """Returns a loss that a function computes, plus the losses of layers.

    Args:
        model: what will be run.
        function: called with labels, predictions, and weights if the batch has any.
    """

    def value(batch: Batch, prediction: Structure) -> tf.Tensor:
        weight = () if batch.sample_weight is None else (batch.sample_weight,)
        loss = tf.cast(tf.reduce_mean(function(batch.y, prediction, *weight)), tf.float32)
        return tf.add_n([loss, *(tf.cast(each, loss.dtype) for each in model.losses)])

    return value


def compiled_loss(model: tf.keras.Model, compiled: tf.keras.Model, is_a_copy: bool) -> Loss:
    """Returns the loss that a model is compiled with.

    Args:
        model: as for `loss_of`.
        compiled: as for `loss_of`.
        is_a_copy: as for `loss_of`.
    """
    if is_a_copy:
        copies.compile_as(model, compiled, "sgd")
    with_loss: Any = model if getattr(model, "loss", None) else compiled

    def value(batch: Batch, prediction: Structure) -> tf.Tensor:
        keras_api.build_loss(with_loss, prediction)
        with without_metrics(with_loss):
            return with_loss.compute_loss(batch.x, batch.y, prediction, batch.sample_weight)

    return value


def signed_mean(batch: Batch | None, prediction: Structure) -> tf.Tensor:
    """Returns the mean of the outputs with random signs, so that they do not cancel."""
    del batch
    random = np.random.default_rng(0)
    parts = [
        tf.reduce_mean(tf.cast(output, tf.float32) * random.choice([-1.0, 1.0], shape_of(output)))
        for output in floating(prediction)
    ]
    return tf.add_n(parts)


@contextlib.contextmanager
def without_metrics(model: Called | Variables) -> Iterator[None]:
    """Keeps this thread from updating the metrics of a model or layer, inside of the block.

    Computing the loss that a model is compiled with updates some metrics. If they belong to a
    strategy with several replicas, that fails outside of a replica.
    """
    metrics = list(getattr(model, "metrics", ()))
    try:
        with contextlib.ExitStack() as stack:
            for metric in metrics:
                stack.enter_context(wrapped.here(metric, "update_state", _ignored))
            yield
    finally:
        # Metrics of a loss are made when it is first computed.
        known = {id(metric) for metric in metrics}
        for metric in getattr(model, "metrics", ()):
            if id(metric) not in known:
                metric.reset_state()


def _ignored(update_state: Callable[..., Any]) -> Callable[..., None]:
    del update_state
    return lambda *_, **__: None


def scale_in_training(model: tf.keras.Model) -> float | None:
    """Returns the current loss scale of the model's optimizer, else the first one of its policy."""
    for optimizer in wrappers_among(getattr(model, "optimizer", None)):
        return float(optimizer.loss_scale())
    policy = model.dtype_policy
    return float(policy.loss_scale()) if getattr(policy, "scales_loss", False) else None


def first_scale(model: tf.keras.Model) -> float:
    """Returns the loss scale with which a model would begin to train."""
    known = scale_in_training(model)
    if known is not None:
        return known
    dtypes = {layer.compute_dtype for layer in keras_api.flatten_layers(model)}
    return INITIAL_LOSS_SCALE if "float16" in dtypes else 1.0
