"""Models whose variables are in 16 bits, in `compile`, `convert` and `summary`.

RFC 293 keeps variables in float32. Where they are in 16 bits, an optimizer has to keep their
digits.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from keras_mp import keras_api
from keras_mp.master_weight_optimizer import OUTER_WRAPPERS, MasterWeightOptimizer
from keras_mp.support import messages
from keras_mp.support.dtypes import LOW_PRECISION_NAMES
from keras_mp.wrappers.inner_optimizers import chain

# Updates below this part of a weight are lost: half of its last digit.
_LOST = {"float16": "1/2048", "bfloat16": "1/256"}


def _keepers(optimizers: object) -> list[MasterWeightOptimizer]:
    """Returns every `MasterWeightOptimizer` among optimizers and those they wrap.

    Args:
        optimizers: An optimizer, None, or a structure of them, as a model is compiled with.
    """
    every = [each for optimizer in tf.nest.flatten(optimizers) for each in chain(optimizer)]
    return [each for each in every if isinstance(each, MasterWeightOptimizer)]


def keeps_digits(optimizer: object) -> bool:
    """Whether an optimizer, or one that it wraps, is a `MasterWeightOptimizer`.

    Args:
        optimizer: An optimizer of `tf.keras`, or None.
    """
    return bool(_keepers(optimizer))


def as_seen(optimizers: object, variables: Sequence[Any]) -> Sequence[Any]:
    """Returns variables as the optimizers that train them see them.

    Args:
        optimizers: An optimizer, None, or a structure of them, as a model is compiled with.
        variables: Variables.

    Returns:
        Float32 views where a `MasterWeightOptimizer` keeps the digits, else the variables
        themselves.
    """
    for keeper in _keepers(optimizers):
        variables = keeper.as_float32(variables)
    return variables


def keep_digits(model: tf.keras.Model, optimizer: Any) -> Any:
    """Wraps a model's optimizer if the policy keeps variables in 16 bits.

    It also logs that.

    Args:
        model: A model of `tf.keras`.
        optimizer: the argument of `compile`: an optimizer, a name, a config or None.

    Returns:
        The optimizer in a `MasterWeightOptimizer`. It is returned as it is if it is wrapped
        already, or is in a wrapper that goes around a `MasterWeightOptimizer`.
    """
    optimizer = keras_api.get_optimizer(optimizer)
    if optimizer is None or keeps_digits(optimizer) or isinstance(optimizer, OUTER_WRAPPERS):
        return optimizer
    logging.info(
        "The model %r has variables in %s. Its optimizer is wrapped by a "
        "keras_mp.MasterWeightOptimizer, which keeps the digits that they leave out.",
        model.name,
        model.dtype_policy.variable_dtype,
    )
    return MasterWeightOptimizer(optimizer)


def warn_if_updates_are_lost(model: tf.keras.Model) -> None:
    """Warns of a compiled model whose optimizer rounds its 16-bit variables.

    Args:
        model: A model of `tf.keras`.
    """
    every = filter(_may_have_weights, keras_api.flatten_layers(model))
    layers = [layer for layer in every if layer.variable_dtype in LOW_PRECISION_NAMES]
    optimizers = tf.nest.flatten(getattr(model, "optimizer", None))
    losing = [each for each in optimizers if each is not None and not keeps_digits(each)]
    if not layers or not losing:
        return
    dtype = layers[0].variable_dtype
    *_, innermost = chain(losing[0])
    constants = ", ".join(vanishing_constants(innermost, dtype))
    also = f" In {dtype}, {constants}." if constants else ""
    messages.warn(
        f"The model {model.name!r} has {len(layers)} layers whose variables are in {dtype} (the "
        f"first is {layers[0].name!r}). Its optimizer computes in {dtype} too: updates below "
        f"{_LOST[dtype]} of a weight are lost.{also} Compile it with "
        f"keras_mp.MasterWeightOptimizer(optimizer)."
    )


def _may_have_weights(layer: tf.keras.layers.Layer) -> bool:
    no_weights = (tf.keras.Model, tf.keras.layers.InputLayer, tf.keras.metrics.Metric)
    is_trained = layer.trainable and not isinstance(layer, no_weights)
    return is_trained and (not layer.built or bool(layer.trainable_weights))


def float32_values(model: tf.keras.Model) -> list[np.ndarray]:
    """Returns the values of a model's weights, including the digits that were kept.

    Variables in 16 bits have such digits.

    Args:
        model: A model of `tf.keras`, built.
    """
    weights = as_seen(getattr(model, "optimizer", None), keras_api.variables(model))
    values = iter(tf.convert_to_tensor(weight).numpy() for weight in weights)
    result = []
    for weight in model.weights:
        is_variable = keras_api.is_weight(weight)
        result += [next(values)] if is_variable else map(np.asarray, weight.get_tensors())
    return result


def bytes_of_weights(model: tf.keras.Model) -> Iterator[str]:
    """Yields a line for each optimizer that keeps the digits of a model's weights.

    Args:
        model: A model of `tf.keras`.

    Yields:
        The method, and the bytes that a trained weight takes, its slots included.
    """
    for keeper in _keepers(getattr(model, "optimizer", None)):
        name, size = type(keeper.inner_optimizer).__name__, keeper.bytes_a_weight()
        how = f"method {keeper.method!r}, slots in {keeper.slot_dtype}"
        end = "" if size is None else f", {size:.2f} bytes a weight"
        yield f"{name} sees float32 weights: {how}{end}."


def vanishing_constants(optimizer: Any, dtype: str) -> Iterator[str]:
    """Yields a text for each constant of an optimizer that a dtype rounds to 0 or 1.

    Args:
        optimizer: An optimizer of `tf.keras`.
        dtype: str. The dtype of its slots.

    Yields:
        Texts such as `"beta_2=0.999 is 1"`.
    """
    config: Mapping[str, Any] = optimizer.get_config()
    for name, value in config.items():
        # A factor makes up for a learning rate that is rounded.
        if isinstance(value, (float, np.floating)) and name != "learning_rate":
            rounded = float(tf.cast(tf.constant(value, tf.float32), dtype))
            if rounded in (0.0, 1.0) and rounded != float(value):
                yield f"{name}={float(value):g} is {rounded:g}"
