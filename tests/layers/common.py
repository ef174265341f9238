"""What tests of layers share: policies, a layer, and a call in each mode."""

import tensorflow as tf

from keras_mp import layers
from tests.common import placed

POLICIES = ["float32", "float64", "mixed_float16", "mixed_bfloat16"]


def run(layer, mode, *args, **kwargs):
    """Calls a layer that was built in eager."""
    layer(*args, **kwargs)
    return placed(mode, layer)(*args, **kwargs)


class SimpleDense(layers.Layer):
    def build(self, _):
        self.kernel = self.add_weight("kernel", (10, 10))

    def call(self, inputs):
        return tf.linalg.matmul(inputs, self.kernel)
