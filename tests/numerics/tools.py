"""Models for the tools, and the parts of the tools, each by itself.

What other tests take of the inside of the tools, they take from here.
"""
# ruff: noqa: F401

import functools

import numpy as np
import tensorflow as tf

import keras_mp
from keras_mp.__main__ import main
from keras_mp.models.layer_paths import layers_by_path
from keras_mp.numerics import batches, commands, hazards, origins, own_thread
from keras_mp.numerics import compare as comparing
from keras_mp.numerics.check import Check
from keras_mp.numerics.check import audit as audited
from keras_mp.numerics.counting import ExponentHistograms
from keras_mp.numerics.histogram import EVERYWHERE, FORMATS, Histogram, Window, count_exponents
from keras_mp.numerics.profile import StepTimes, census, class_of, step_times
from keras_mp.numerics.records import Quantity, underflow
from keras_mp.numerics.report import Row, advise
from keras_mp.numerics.run import compiled
from keras_mp.numerics.run import runners as made
from keras_mp.numerics.traced_step import trace

# What makes a `Dense`, in the policy that is in force then.
dense = functools.partial(functools.partial, tf.keras.layers.Dense)


def sequential(
    *layers, shape=(8,), policy=None, optimizer="sgd", loss="mse", name=None, **compiled
):
    """A model of layers, or of what makes them, under a policy; compiled if there is a loss.

    XLA does not compile its step unless that is asked for: it takes longest.
    """
    compiled.setdefault("jit_compile", False)
    with keras_mp.policy_scope(policy or keras_mp.global_policy()):
        of_keras = tf.keras.layers.Layer
        made = [layer if isinstance(layer, of_keras) else layer() for layer in layers]
        model = tf.keras.Sequential([tf.keras.Input(shape), *made], name=name)
        if loss is not None:
            model.compile(optimizer, loss, **compiled)
    return model


@tf.keras.utils.register_keras_serializable("tests")
class Norm(tf.keras.layers.Layer):
    """Divides each row by its length, whose square overflows in float16, and not in bfloat16."""

    def call(self, x):
        return x / tf.sqrt(tf.matmul(x[:, None], x[:, :, None])[:, 0])


def audit(model, batch):
    """Returns a `Check` with the hazards of the step alone."""
    made = batches.listed(model, batch)
    return Check(model.name, comparing.policy_of(model), audited(model, made), model=model)


def operations(model, batch, layer=""):
    """Returns a line for each operation of the forward pass: of a layer, or of all."""
    [made], lines = batches.listed(model, batch), []

    def inspect(step):
        for each in step.forward:
            takes, gives = (
                ", ".join(f"{tensor.dtype.name}{tensor.shape}" for tensor in of)
                for of in (each.inputs, each.outputs)
            )
            if layer in step.where(each):
                lines.append(f"{step.where(each)}: {each.type}({takes}) -> {gives}")
        return step.result

    trace(model, made, origins.Layers(model), inspect)
    return "\n".join(lines)


def runners(model, x, y=None, sample_weight=None, reference="float32", **how):
    """Returns what runs a model, and what runs its reference."""
    batch = batches.as_fit_takes_it(model, (x, y, sample_weight))
    if how.get("step") is None and not model.built:
        model(batch.x, training=False)
    return made(model, batch, reference, **how)


@own_thread.random_numbers()
def both(model, *batch, policy=None, **how):
    """Returns a `Comparison` and a `Report`, on a copy of the model if there is a policy."""
    narrow = model if policy is None else compiled(model, policy)
    return comparing.compare(*runners(narrow, *batch, **how))


def compare(model, *batch, **how):
    """Returns a `Comparison`, on a copy of the model if there is a policy."""
    return both(model, *batch, **how)[0]


def dtypes(model):
    """Returns {path of a layer: the dtype that it computes in}."""
    return {path: layer.compute_dtype for path, layer in layers_by_path(model).items()}


def saved(folder, model, **batch):
    """Returns the paths of a saved model and of a batch, as the commands take them."""
    files = [str(folder / name) for name in ("model.keras", "batch.npz")]
    model.save(files[0])
    np.savez(files[1], **batch)
    return files


def histogram_of(values):
    """Returns the histogram of an array, rounded to float32, which the device counts."""
    with np.errstate(over="ignore"):
        return Histogram.count(tf.constant(np.asarray(values).astype(np.float32)))


def of_keras(dtype="float16"):
    """Returns Keras's own mixed policy: in its layers all operations compute in 16 bits."""
    return tf.keras.mixed_precision.Policy(f"mixed_{dtype}")
