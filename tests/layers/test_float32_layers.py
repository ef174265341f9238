"""Float32 layers behind 16-bit layers: what nobody has rounded, they read unrounded."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import MODES, differentiated, placed

layers = tf.keras.layers
# Neither dtype holds the differences of these numbers.
INPUTS = tf.constant([[30001.0, 29992.0, 30004.0]])


class InCall(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.normalization = layers.LayerNormalization(dtype="float32")

    def call(self, inputs):
        return self.normalization(inputs)


def behind_a_layer():
    last = layers.LayerNormalization(dtype=keras_mp.Policy("float32"))
    return tf.keras.Sequential([tf.keras.Input([3]), layers.Flatten(), last])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("make", [InCall, behind_a_layer])
def test_they_read_what_nobody_has_rounded(make, policy, mode):
    found = []
    for name in ("float32", policy):
        with keras_mp.policy_scope(name):
            model = make()
        model(INPUTS)
        compute = lambda: differentiated(lambda: model(INPUTS)[:, 0], INPUTS)  # noqa: E731
        found.append([*placed(mode, compute)(), model.predict(INPUTS, verbose=0)])
    for right, own in zip(*found, strict=True):
        np.testing.assert_allclose(np.asarray(own), np.asarray(right), rtol=1e-3, atol=1e-4)
