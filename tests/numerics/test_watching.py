"""The observer of layers: several that look at the same layer."""

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.numerics import origins


@pytest.mark.parametrize("in_graph", [False, True])
def test_each_watcher_gets_the_paths_that_it_gave(in_graph):
    inner = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1, name="dense")])
    dense = inner.layers[-1]
    seen = []

    def watcher(name):
        def watch(path, output, arguments):
            del arguments
            seen.append((name, path, origins.running_layer()))
            return output + 1

        return watch

    def step(x):
        with (
            origins.watching_outputs({"outer/dense": dense}, watcher("first")),
            origins.watching_outputs({"dense": dense}, watcher("second")),
        ):
            return inner(x)

    x = tf.ones([3, 2])
    expected = inner(x).numpy() + 2
    with origins.naming([inner]):
        outputs = (tf.function(step) if in_graph else step)(x)
    assert seen == [("first", "outer/dense", inner.name), ("second", "dense", inner.name)]
    assert outputs.numpy().tolist() == expected.tolist()
    assert "call" not in vars(dense)
    assert origins.running_layer() == ""


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_layer_for_raw_data_is_seen_in_float32_and_passes_on_what_was_not_rounded(in_graph):
    layers = tf.keras.layers
    with keras_mp.policy_scope("mixed_float16"):
        first = layers.Rescaling(1e6, name="first")
        second = layers.Rescaling(1e-6, name="second")
        # The last layer rounds nothing.
        model = tf.keras.Sequential([tf.keras.Input([2]), first, second, layers.ReLU()])
    seen = []

    def watch(path, output, arguments):
        seen.append((path, output.dtype.name, arguments[0].dtype.name))
        return tf.identity(output)

    def step(x):
        with origins.watching_outputs({"first": first, "second": second}, watch):
            return model(x)

    x = tf.constant([[1.0, 3.0]])
    assert (tf.function(step) if in_graph else step)(x).numpy().tolist() == x.numpy().tolist()
    assert seen == [("first", "float32", "float32"), ("second", "float32", "float32")]


def test_the_innermost_layer_is_named_while_it_runs():
    named = []

    class Named(tf.keras.layers.Layer):
        def call(self, x):
            named.append(origins.running_layer())
            return x

    model = tf.keras.Sequential([tf.keras.Input([2]), Named(name="one"), Named(name="two")])
    with origins.naming([model]):
        named.clear()
        model(tf.ones([1, 2]))
        assert named == ["one", "two"]
    named.clear()
    model(tf.ones([1, 2]))
    assert named == ["", ""]


def test_a_layer_of_two_models_has_its_path_in_the_first():
    named = []

    class Named(tf.keras.layers.Layer):
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
