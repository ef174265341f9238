"""The loss that a model is trained with: how it is computed, and what it is multiplied by."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp import keras_api
from keras_mp.loss_scale_optimizer import wrappers_among
from keras_mp.numerics import runs
from keras_mp.numerics.batches import Batch
from keras_mp.numerics.layer_calls import RandomNumbers
from keras_mp.numerics.runs import Run
from keras_mp.step.schedule import INITIAL_LOSS_SCALE

Loss = Callable[[Any, Batch, Any], tf.Tensor]


def loss_of(
    model: tf.keras.Model, compiled: Any, batch: Batch, loss: Any, is_a_copy: bool = False
) -> Loss:
    """Returns the loss of a model, for `runs.run`.

    Args:
        model: what will be run.
        compiled: the model of the user, which may be compiled.
        batch: Batch. Without labels, or without a loss, it is `signed_mean` of the outputs.
        loss: a loss of `tf.keras`, by name or not, or a function; None for that of `compiled`.
        is_a_copy: bool. Whether `model` has to be compiled as `compiled` is.
    """
    if loss is not None and batch.y is not None:
        return given_loss(tf.keras.losses.get(loss))
    if getattr(compiled, "loss", None) and batch.y is not None:
        return compiled_loss(model, compiled, is_a_copy)
    return signed_mean


def given_loss(function: Callable[..., Any]) -> Loss:
    """Returns the loss that a function computes, with those of layers, for `runs.run`.

    Args:
        function: called with labels, predictions, and weights if the batch has any.
    """

    def value(model: tf.keras.Model, batch: Batch, prediction: Any) -> tf.Tensor:
        weight = () if batch.sample_weight is None else (batch.sample_weight,)
        loss = tf.cast(tf.reduce_mean(function(batch.y, prediction, *weight)), tf.float32)
        return tf.add_n([loss, *(tf.cast(each, loss.dtype) for each in model.losses)])

    return value


def compiled_loss(model: tf.keras.Model, compiled: Any, is_a_copy: bool) -> Loss:
    """Returns the loss that a model is compiled with, for `runs.run`.

    Args:
        model: as for `loss_of`.
        compiled: as for `loss_of`.
        is_a_copy: as for `loss_of`.
    """
    if is_a_copy:
        weights = (compiled.get_compile_config() or {}).get("loss_weights")
        model.compile("sgd", loss=compiled.loss, loss_weights=weights)
    with_loss = model if getattr(model, "loss", None) else compiled

    def value(model: tf.keras.Model, batch: Batch, prediction: Any) -> Any:
        del model
        keras_api.build_loss(with_loss, prediction)
        with runs.without_metrics(with_loss):
            return with_loss.compute_loss(batch.x, batch.y, prediction, batch.sample_weight)

    return value


def signed_mean(model: tf.keras.Model, batch: Batch, prediction: Any) -> tf.Tensor:
    """A loss of outputs without labels, for `runs.run`."""
    del model, batch
    return runs.signed_mean(prediction)


# Records of it and of a real loss are told apart.
signed_mean.kind = "sum of the outputs"


def run_as_trained(
    model: tf.keras.Model,
    batch: Batch,
    loss: Loss,
    step: Any,
    numbers: RandomNumbers,
    training: bool,
    loss_scale: float | None,
) -> Run:
    """Runs a model at a loss scale, or at half of it and so on, until gradients do not overflow.

    Args:
        model: of `tf.keras`.
        batch: Batch.
        loss: as for `runs.run`.
        step: as for `runs.run`.
        numbers: as for `runs.run`.
        training: as for `runs.run`.
        loss_scale: the first one; None for that with which the model would begin to train.
    """

    def make(scale: float) -> Run:
        return runs.run(
            model,
            batch,
            loss,
            step=step,
            numbers=numbers,
            training=training,
            loss_scale=scale,
        )

    runs.check_loss_scale(loss_scale)
    first = _first_scale(model) if loss_scale is None else float(loss_scale)
    return runs.run_at_a_good_scale(make, first)


def scale_in_training(model: tf.keras.Model) -> float | None:
    """Returns the loss scale that a model is trained with, or begins with; None if none is known.

    It is the current one of its optimizer, else the first of its policy.
    """
    for optimizer in wrappers_among(getattr(model, "optimizer", None)):
        return float(optimizer.loss_scale())
    policy = model.dtype_policy
    return float(policy.loss_scale()) if getattr(policy, "scales_loss", False) else None


def _first_scale(model: tf.keras.Model) -> float:
    known = scale_in_training(model)
    if known is not None:
        return known
    dtypes = {layer.compute_dtype for layer in keras_api.flatten_layers(model)}
    return INITIAL_LOSS_SCALE if "float16" in dtypes else 1.0
