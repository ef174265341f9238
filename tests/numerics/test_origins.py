"""Where operations come from: lines of a program, layers, and what is seen of these."""

import pytest
import tensorflow as tf

import keras_mp
from tests.numerics.tools import ExponentHistograms, audit, of_keras, origins, sequential

L = tf.keras.layers


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


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_layer_for_raw_data_is_seen_in_float32_and_passes_on_what_was_not_rounded(in_graph):
    keras_mp.set_global_policy("mixed_float16")
    first, second = L.Rescaling(1e6, name="first"), L.Rescaling(1e-6, name="second")
    model = sequential(first, second, L.ReLU(), shape=[2])  # The last one rounds nothing.
    paths = ["first", "second"]
    counted = ExponentHistograms(model, every=1, gradients=False, output_gradients=paths)

    def step(x):
        with counted.step():
            return model(x)

    x = tf.constant([[1.0, 3.0]])
    assert (tf.function(step) if in_graph else step)(x).numpy().tolist() == x.numpy().tolist()
    report = counted.read()
    assert [report["output", path].dtype for path in paths] == ["float32"] * 2


def test_a_layer_of_two_models_has_its_path_in_the_first():
    named = []

    class Named(L.Layer):
        def call(self, x):
            named.append(origins.running_layer())
            return x

    shared = Named(name="shared")
    inner = tf.keras.Sequential([tf.keras.Input([2]), shared], name="inner")
    outer = tf.keras.Sequential([tf.keras.Input([2]), inner], name="outer")
    for models, path in (([inner, outer], "shared"), ([outer, inner], "inner/shared")):
        with origins.naming(models):
            named.clear()
            outer(tf.ones([1, 2]))
        assert named == [path]
    with origins.naming([outer]), origins.naming([inner]):
        named.clear()
        inner(tf.ones([1, 2]))
    assert named == ["inner/shared"]
    assert "call" not in vars(shared)
