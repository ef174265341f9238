"""Observers of layers' calls: what they see, and what they may change."""

import pytest
import tensorflow as tf

from keras_mp.layer_calls import layer_observers
from tests.common import IS_KERAS_3

K = tf.keras


class Notes(layer_observers.LayerObserver):
    def __init__(self):
        self.seen = []

    def inputs(self, call):
        self.seen.append(("inputs", call.path, call.args[0].dtype.name, call.kwargs))

    def outputs(self, call, outputs):
        self.seen.append(("outputs", call.path, outputs.dtype.name))
        return outputs + 1

    def failed(self, call):
        self.seen.append(("failed", call.path, call.layer.name))


class Positive(K.layers.Layer):
    def call(self, x, limit=0):
        # Keras 3 lets AutoGraph convert no layer.
        if IS_KERAS_3 or tf.reduce_sum(x) > limit:
            return x
        return tf.zeros_like(x)


@pytest.mark.parametrize("in_graph", [False, True])
def test_an_observer_sees_cast_inputs_and_may_replace_outputs(in_graph):
    layer, notes = Positive(dtype="mixed_float16"), Notes()
    layer.build([2])

    def call(x):
        with layer_observers.attached(notes, [("some/path", layer)]):
            return layer(x, limit=1)

    returned = (tf.function(call) if in_graph else call)(tf.constant([1.0, 2.0]))
    assert returned.numpy().tolist() == [2, 3]
    assert notes.seen == [
        ("inputs", "some/path", "float16", {"limit": 1}),
        ("outputs", "some/path", "float16"),
    ]
    layer(tf.ones([2]))
    assert len(notes.seen) == 2
    assert "call" not in vars(layer)


def test_an_observer_is_told_of_a_layer_that_fails():
    class Failing(K.layers.Layer):
        def call(self, x):
            raise ValueError("it fails")

    layer, notes = Failing(name="failing"), Notes()
    with (
        pytest.raises(ValueError, match="it fails"),
        layer_observers.attached(notes, [("path", layer)]),
    ):
        layer(tf.ones([2]))
    assert [each[0] for each in notes.seen] == ["inputs", "failed"]
