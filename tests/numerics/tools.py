"""The tools behind `check`, each by itself, on a model and a batch."""

import tensorflow as tf

from keras_mp.numerics import audit as auditing
from keras_mp.numerics import batches, origins, own_thread
from keras_mp.numerics import compare as comparing
from keras_mp.numerics.check import Check
from keras_mp.numerics.run import compiled
from keras_mp.numerics.run import runners as made
from keras_mp.numerics.traced_step import TracedStep
from keras_mp.support.autograph import do_not_convert


@tf.keras.utils.register_keras_serializable("tests")
class Norm(tf.keras.layers.Layer):
    """Divides each row by its length, whose square overflows in float16, and not in bfloat16."""

    def call(self, x):
        return x / tf.sqrt(tf.matmul(x[:, None], x[:, :, None])[:, 0])


def audit(model, batch):
    """Returns a `Check` with the hazards of the step alone."""
    made = batches.listed(model, batch)
    return Check(model.name, auditing.policy_of(model), auditing.audit(model, made), model=model)


def operations(model, batch, layer=""):
    """Returns a line for each operation of the forward pass: of a layer, or of all."""
    [made], scopes, lines = batches.listed(model, batch), {}, []

    @do_not_convert
    def inspect(result, batch):
        step = TracedStep(model, batch, result, scopes)
        for each in step.forward:
            takes, gives = (
                ", ".join(f"{tensor.dtype.name}{tensor.shape}" for tensor in of)
                for of in (each.inputs, each.outputs)
            )
            if layer in step.where(each):
                lines.append(f"{step.where(each)}: {each.type}({takes}) -> {gives}")
        return result

    origins.step_of(model, made, scopes, inspect)
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


def of_keras(dtype="float16"):
    """Returns Keras's own mixed policy: in its layers all operations compute in 16 bits."""
    return tf.keras.mixed_precision.Policy(f"mixed_{dtype}")
