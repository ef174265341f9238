import pytest
import tensorflow as tf

from keras_mp import layers
from tests.common import MODES, pairs
from tests.layers.common import POLICIES, SimpleDense, run


class TwoArguments(layers.Layer):
    def call(self, a, b):
        return a + 1.0, b + 1.0


@pytest.mark.parametrize(
    ("make", "policy", "mode"),
    pairs([SimpleDense, TwoArguments], POLICIES, MODES),
)
def test_the_layers_of_the_rfc(make, policy, mode):
    layer = make(dtype=policy)
    x = tf.ones([10, 10])
    outputs = run(layer, mode, *([x, x] if make is TwoArguments else [x]))
    policy = tf.keras.mixed_precision.Policy(policy)
    for output in tf.nest.flatten(outputs):
        assert output.dtype == policy.compute_dtype
    for weight in layer.weights:
        assert weight.dtype == policy.variable_dtype
    assert layer.compute_dtype == policy.compute_dtype
    assert layer.variable_dtype == layer.dtype == policy.variable_dtype
    assert layer.dtype_policy.name == policy.name
