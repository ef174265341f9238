"""Optimizers, models and data that several tests train, and what is in them."""

import functools
from typing import Any

import numpy as np
import sklearn.datasets
import tensorflow as tf

import keras_mp

IS_KERAS_3 = tf.keras.Model.__module__.startswith("keras.")
# What Keras takes for an optimizer.
OPTIMIZER_BASES = (
    tf.keras.optimizers.Optimizer,
    *(() if IS_KERAS_3 else (tf.keras.optimizers.legacy.Optimizer,)),
)

# Every optimizer family of this Keras, with plain and with stateful optimizers.
NAMESPACES = ["new"] if IS_KERAS_3 else ["new", "legacy"]
OPTIMIZERS = [f"{family}.{name}" for family in NAMESPACES for name in ("SGD", "Adam", "RMSprop")]
FAMILIES = [f"{family}.SGD" for family in NAMESPACES]


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits: 1797 images as rows of 64 values in [0, 1], and their labels."""
    data = sklearn.datasets.load_digits()
    return (data.data / 16).astype("float32"), data.target.astype("int32")


def batches(*pairs):
    """A dataset of batches of inputs and labels, of any number of rows."""
    signature = tuple(tf.TensorSpec([None, pair.shape[1]]) for pair in pairs[0])
    dataset = tf.data.Dataset.from_generator(lambda: iter(pairs), output_signature=signature)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(pairs)))


def make_optimizer(name: str, learning_rate: float = 0.01, **kwargs: Any) -> Any:
    """Makes an optimizer from a name of OPTIMIZERS."""
    family, name = name.split(".")
    namespace = tf.keras.optimizers.legacy if family == "legacy" else tf.keras.optimizers
    if name == "SGD":
        kwargs = {"momentum": 0.9, **kwargs}
    return getattr(namespace, name)(learning_rate, **kwargs)


def sgd(name: str, learning_rate: float = 1.0, **kwargs: Any) -> Any:
    """Makes one of FAMILIES without momentum: a step moves a variable by the gradient."""
    return make_optimizer(name, learning_rate, momentum=0.0, **kwargs)


def variables_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer of any family."""
    variables = optimizer.variables
    return variables() if callable(variables) else variables


def state(optimizer: Any) -> list[np.ndarray]:
    """The values of an optimizer's variables."""
    return [value(v) for v in variables_of(optimizer)]


def slots(model: Any) -> list[np.ndarray]:
    """The slots of a model's optimizer, in an order that does not depend on how it was made."""
    optimizer, variables = model.optimizer, model.trainable_variables
    if hasattr(optimizer, "get_slot_names") and optimizer.get_slot_names():  # a legacy one
        names = optimizer.get_slot_names()
        return [value(optimizer.get_slot(v, name)) for v in variables for name in names]
    return state(optimizer)


def chain(optimizer: Any) -> list[Any]:
    """An optimizer and those inside of it."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer, *([] if inner is None else chain(inner))]


def training_state(model: Any) -> list[np.ndarray]:
    """Everything that a run has: weights, the optimizer's variables, the loss scale's state."""
    optimizer = model.optimizer
    scaling = next(o for o in chain(optimizer) if isinstance(o, keras_mp.LossScaleOptimizer))
    scale = scaling.loss_scale
    own = [scale.loss_scale, scale.num_good_steps, scale.num_bad_steps, scaling.steps_skipped]
    return [value(v) for v in (*model.weights, optimizer.iterations, *optimizer.variables, *own)]


def classifier(units: int = 16) -> Any:
    """A small model of the digits."""
    layers = [tf.keras.Input((64,)), tf.keras.layers.Dense(units, activation="relu")]
    return tf.keras.Sequential([*layers, tf.keras.layers.Dense(10)])


def compiled_model(*layers: Any, inputs: int = 2, optimizer: Any = "sgd", **how: Any) -> Any:
    """A sequential model of these layers, or of one unit, that is compiled."""
    inside = layers or (tf.keras.layers.Dense(1),)
    model = tf.keras.Sequential([tf.keras.Input([inputs]), *inside])
    model.compile(optimizer, **{"loss": "mse", **how})
    return model


def value(variable: Any) -> np.ndarray:
    """The value of a variable, mirrored or not."""
    return tf.convert_to_tensor(variable).numpy()
