"""What tests of layers share: policies, modes, a layer, and a call in each."""

import tensorflow as tf

from keras_mp import layers

POLICIES = ["float32", "float64", "mixed_float16", "mixed_bfloat16"]
MODES = ["eager", "function", "jit"]


def run(layer, mode, *args, **kwargs):
    """Calls a layer in eager, in a function, or in one that XLA compiles."""
    if mode == "eager":
        return layer(*args, **kwargs)
    layer(*args, **kwargs)
    return tf.function(layer, jit_compile=mode == "jit")(*args, **kwargs)


class SimpleDense(layers.Layer):
    def build(self, _):
        self.kernel = self.add_weight("kernel", (10, 10))

    def call(self, inputs):
        return tf.linalg.matmul(inputs, self.kernel)
