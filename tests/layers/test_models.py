import copy

import numpy as np
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


@tf.keras.utils.register_keras_serializable("keras_mp_tests")
class Saved(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 3), name="w")

    def call(self, x):
        return x @ self.w


def test_models_are_saved_and_loaded(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input([4]), Saved(dtype="mixed_float16")])
    path = str(tmp_path / "m.keras")
    model.save(path)
    loaded = tf.keras.models.load_model(path)
    x = tf.random.stateless_normal([2, 4], [1, 2])
    assert isinstance(loaded.layers[-1], Saved)
    assert loaded.layers[-1].dtype_policy.name == "mixed_float16"
    np.testing.assert_array_equal(loaded(x), model(x))
    np.testing.assert_array_equal(tf.keras.models.clone_model(model)(x).dtype, tf.float16)
    copied = copy.deepcopy(model)
    np.testing.assert_array_equal(copied(x), model(x))
    model.export(str(tmp_path / "e"))
    exported = tf.saved_model.load(str(tmp_path / "e"))
    np.testing.assert_array_equal(exported.serve(x), model(x))
