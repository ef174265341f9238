"""Where operations come from: the line of a program, not that of who asks or who calls a layer."""

import tensorflow as tf

import keras_mp
from keras_mp.layer_calls import layer_observers
from keras_mp.numerics import run
from keras_mp.numerics.origins import of_stack
from tests.common import once
from tests.numerics.tools import audit, of_keras

L = tf.keras.layers
TAPE, TOOL = "tensorflow/python/eager/backprop.py", run.__file__


def origin(*files):
    return of_stack((file, i, "") for i, file in enumerate(files, 1))


@once
def test_the_line_of_a_gradient_is_not_that_of_who_asks_for_it():
    assert origin(TAPE, TOOL, __file__).line is None
    assert origin(__file__, TAPE, TOOL).line == (__file__, 1)
    assert origin(TOOL, __file__).line == (__file__, 2)


@once
def test_what_a_layer_computes_again_for_a_gradient_is_none():
    assert origin(__file__, TAPE).is_gradient
    assert not origin(__file__, layer_observers.__file__, TAPE).is_gradient


class Model(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.first = L.Dense(4, kernel_initializer="identity")
        self.probabilities = L.Softmax(name="probabilities", dtype=of_keras())

    def call(self, x):
        return self.probabilities(self.first(x))


def log_loss(y, p):
    return -tf.reduce_sum(y * tf.math.log(tf.maximum(tf.cast(p, tf.float32), 1e-7)), -1)


def test_the_line_of_what_keras_computes_is_not_that_which_calls_the_layer():
    with keras_mp.policy_scope(keras_mp.Policy("mixed_float16", model_outputs=None)):
        model = Model()
        model.compile("sgd", log_loss)
    x, y = tf.one_hot([1] * 8, 4) * 20, tf.one_hot([0] * 8, 4)
    [finding] = audit(model, (x, y)).findings
    assert (finding.where, finding.line) == ("probabilities", None)
