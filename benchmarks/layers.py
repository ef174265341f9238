"""How long a layer takes in 16-bit policies of keras_mp, forward and backward, against float32."""

import json
from collections.abc import Callable
from typing import Any

from benchmarks import common

_REPEATS = 9
_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
# Of inputs, the size of the batch first.
_ROWS, _SEQUENCE, _WIDE = (1024, 512), (16, 128, 512), (16, 128, 1024)
_IMAGE, _VOLUME = (8, 32, 32, 64), (2, 8, 16, 16, 32)
# By name: the class, its arguments, and the shape of its input.
LAYERS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "Dense": ("Dense", {"units": 512}, _ROWS),
    "Conv1D": ("Conv1D", {"filters": 64, "kernel_size": 3}, (16, 128, 64)),
    "Conv2D": ("Conv2D", {"filters": 64, "kernel_size": 3}, _IMAGE),
    "Conv2DTranspose": ("Conv2DTranspose", {"filters": 64, "kernel_size": 3}, _IMAGE),
    "Conv3D": ("Conv3D", {"filters": 32, "kernel_size": 3}, _VOLUME),
    "DepthwiseConv2D": ("DepthwiseConv2D", {"kernel_size": 3}, _IMAGE),
    "SeparableConv2D": ("SeparableConv2D", {"filters": 64, "kernel_size": 3}, _IMAGE),
    "MaxPooling2D": ("MaxPooling2D", {"pool_size": 2}, _IMAGE),
    "AveragePooling2D": ("AveragePooling2D", {"pool_size": 2}, _IMAGE),
    "BatchNormalization": ("BatchNormalization", {}, _IMAGE),
    "LayerNormalization": ("LayerNormalization", {}, _SEQUENCE),
    "elu": ("Activation", {"activation": "elu"}, _SEQUENCE),
    "leaky ReLU": ("LeakyReLU", {}, _SEQUENCE),
    "gelu, 1,024 features": ("Activation", {"activation": "gelu"}, _WIDE),
    "swish, 1,024 features": ("Activation", {"activation": "swish"}, _WIDE),
    "softplus": ("Activation", {"activation": "softplus"}, _SEQUENCE),
    "sigmoid": ("Activation", {"activation": "sigmoid"}, _SEQUENCE),
    "tanh": ("Activation", {"activation": "tanh"}, _SEQUENCE),
    "softmax": ("Activation", {"activation": "softmax"}, _SEQUENCE),
    "selu": ("Activation", {"activation": "selu"}, _SEQUENCE),
    "Dropout": ("Dropout", {"rate": 0.1}, _SEQUENCE),
    "UpSampling2D, bilinear": ("UpSampling2D", {"interpolation": "bilinear"}, _IMAGE),
    "LSTM": ("LSTM", {"units": 128, "return_sequences": True}, (16, 32, 128)),
    "GRU": ("GRU", {"units": 128, "return_sequences": True}, (16, 32, 128)),
    "MultiHeadAttention": ("MultiHeadAttention", {"num_heads": 8, "key_dim": 64}, _SEQUENCE),
}


def measure() -> dict[str, dict[str, list[float]]]:
    """Seconds by layer and policy."""
    import tensorflow as tf

    import keras_mp

    policies = {name: keras_mp.Policy(name) for name in _POLICIES}

    def step_of(name: str, policy: Any) -> Callable[[], Any]:
        kind, kwargs, shape = LAYERS[name]
        layer = getattr(tf.keras.layers, kind)(**kwargs, dtype=policy)
        # What a layer before it would return: its gradient is needed, and nothing is cast.
        x = tf.cast(tf.random.stateless_normal(shape, [1, 2]), layer.compute_dtype)
        inputs = (x, x) if kind == "MultiHeadAttention" else (x,)
        layer(*inputs)
        weights = [getattr(each, "_value", each) for each in layer.trainable_variables]

        @tf.function(autograph=False)
        def step() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(*inputs, training=True)
            # A gradient that depends on the output, as in a model, so that nothing is left out.
            return tape.gradient(y, [x, *weights], output_gradients=y)

        return lambda: tf.reshape(step()[0], [-1])[-1].numpy()

    def seconds(name: str) -> dict[str, list[float]]:
        steps = {policy: step_of(name, policies[policy]) for policy in _POLICIES}
        for step in steps.values():
            step()
        return common.interleaved(steps, _REPEATS)

    return {name: seconds(name) for name in LAYERS}


def run() -> dict:
    """Measures both Kerases, and prints a table for each."""
    results = {}
    for keras in common.KERASES:
        results[keras] = common.in_own_process("benchmarks.layers", keras=keras)
        rows = [
            [name, *(common.ratio(seconds, policy, "float32") for policy in _POLICIES[1:])]
            for name, seconds in results[keras].items()
        ]
        common.print_table(
            f"{keras}: forward and backward, against float32 (quartiles)",
            ["", *_POLICIES[1:]],
            rows,
        )
    return results


if __name__ == "__main__":
    print(json.dumps(measure()))
