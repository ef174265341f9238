"""Where TensorFlow refuses two dtypes in steps of Keras, the error says what to do.

That of a layer is in `test_type_errors.py`.
"""

import re

import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, Mixes, pairs, unscaled

L = tf.keras.layers
WIDE = tf.constant([[1.5, 2.5]])
X = tf.ones([1, 2])
NARROW = {name: tf.Variable(tf.cast(X, name)) for name in ("float16", "bfloat16")}


def assigned(x):
    NARROW[x.dtype.name].assign(WIDE)


def float64(x):
    return x * tf.cast(WIDE, tf.float64)


REFUSED = {each.__name__: each for each in (assigned, float64)}


def line_of(function):
    return rf"in line {function.__code__.co_firstlineno + 1} of {re.escape(__file__)}"


def check(message, function, dtype, name):
    other = "float64" if name == "float64" else "float32"
    assert re.search(line_of(function), message)
    assert f"({dtype} and {other})" in message or f"({other} and {dtype})" in message
    assert "tf.cast(x, tf.float32)" in message or name == "float64"
    assert message.count("TensorFlow said") == 1


@pytest.mark.parametrize(
    ("name", "is_eager", "dtype", "step"),
    pairs(
        REFUSED, [True, False], ["float16", "bfloat16"], ["train_step", "test_step", "predict_step"]
    ),
)
def test_a_step_is_named(name, is_eager, dtype, step):
    class Trained(tf.keras.Model):
        def __init__(self):
            super().__init__(name="trained")
            self.inside = L.Dense(2)

        def run(self, data):
            x = data[0] if isinstance(data, (tuple, list)) else data
            hidden = self.inside(x)  # a layer returns 16 bits
            REFUSED[name](hidden)
            return {"loss": tf.reduce_sum(x)}

        train_step = test_step = predict_step = run

    with keras_mp.policy_scope(unscaled(dtype)):
        model = Trained()
        model.compile("sgd", run_eagerly=is_eager, jit_compile=False)
        run = {"train_step": model.fit, "test_step": model.evaluate, "predict_step": model.predict}
        in_eager = tf.errors.InvalidArgumentError if name == "float64" else ValueError
        with pytest.raises(in_eager if is_eager else (TypeError, ValueError)) as caught:
            run[step](X, verbose=0)
    message = str(caught.value)
    assert f"The {step} of the model 'trained' (of type Trained) met two dtypes" in message
    check(message, REFUSED[name], dtype, name)


def test_layers_in_other_policies_and_steps_of_other_models_say_nothing():
    layer = Mixes(float64, dtype="mixed_bfloat16" if not IS_KERAS_3 else "float32")
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        layer(X)
    assert "TensorFlow said" not in str(caught.value)
