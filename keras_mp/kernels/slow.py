"""Convolutions whose float16 kernels are many times slower than float32's with casts around them.

TensorFlow has no fast float16 kernels for most of these on CPUs. On one with AVX512-FP16 the
gradient of a filter takes hundreds of times as long as in float32, on one without it twelve times.
Computed in float32 inside, and rounded once, they are faster and no less exact.

A kernel is timed once in a process, when it is needed first. What is a little slower stays as it
is: what a program computes must not depend on what else the machine is doing. With
`KERAS_MP_MEASURE=0` in the environment nothing is timed, and the kernels count as slow in float16
that were so on each CPU that was measured. This module needs TensorFlow only.
"""

import functools
import math
import os
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.kernels.replaced import Kernel, Table, last_value
from keras_mp.support import regions

# Noise does not make a kernel as slow as this, compared with float32.
_MANY_TIMES = 3
_TURNS = 2


def _convolution(
    *image: int, wants: str, depthwise: bool = False
) -> Callable[..., tuple[dict[str, Any], float]]:
    """Returns an example: a filter of 3 over ones, as many channels in as out.

    Args:
        *image: ints. Batch, sizes, channels.
        wants: str. "output", or what the gradient is of: "input" or "filter".
        depthwise: bool. Whether each channel has a filter of its own. Defaults to False.
    """

    def example(dtype: tf.DType, _: None) -> tuple[dict[str, Any], float]:
        channels = image[-1]
        inner = 1 if depthwise else channels
        window = [3] * (len(image) - 2) + [channels, inner]
        x, filters = tf.ones(image, dtype), tf.ones(window, dtype)
        arguments = {"strides": [1] * len(image), "padding": "SAME"}
        if wants == "output":
            arguments |= {"input": x, "filter": filters}
        elif wants == "input":
            arguments |= {"input_sizes": image, "filter": filters, "out_backprop": x}
        else:
            arguments |= {"input": x, "filter_sizes": window, "out_backprop": x}
        # The last value is that of a corner, where part of the window is outside.
        corner = (1 if depthwise else channels) * 2 ** (len(image) - 2)
        inside = math.prod(size - 1 for size in image[1:-1]) * image[0]
        return arguments, float(inside if wants == "filter" else corner)

    return example


_2D, _3D = (4, 16, 16, 64), (2, 8, 8, 8, 32)

KERNELS = {
    "Conv2DBackpropFilter": Kernel(
        "gen_nn_ops", ("conv2d_backprop_filter",), _convolution(*_2D, wants="filter")
    ),
    "Conv2DBackpropInput": Kernel(
        "gen_nn_ops", ("conv2d_backprop_input",), _convolution(*_2D, wants="input")
    ),
    "Conv3D": Kernel("gen_nn_ops", ("conv3d",), _convolution(*_3D, wants="output")),
    "Conv3DBackpropFilterV2": Kernel(
        "gen_nn_ops", ("conv3d_backprop_filter_v2",), _convolution(*_3D, wants="filter")
    ),
    "Conv3DBackpropInputV2": Kernel(
        "gen_nn_ops", ("conv3d_backprop_input_v2",), _convolution(*_3D, wants="input")
    ),
    "DepthwiseConv2dNative": Kernel(
        "gen_nn_ops",
        ("depthwise_conv2d_native",),
        _convolution(*_2D, wants="output", depthwise=True),
    ),
    "DepthwiseConv2dNativeBackpropFilter": Kernel(
        "gen_nn_ops",
        ("depthwise_conv2d_native_backprop_filter",),
        _convolution(*_2D, wants="filter", depthwise=True),
    ),
    "DepthwiseConv2dNativeBackpropInput": Kernel(
        "gen_nn_ops",
        ("depthwise_conv2d_native_backprop_input",),
        _convolution(*_2D, wants="input", depthwise=True),
    ),
}


@functools.cache
def _is_slow(op: str, example: Callable[..., Any], dtype: tf.DType, case: Any, device: str) -> bool:
    """Whether a kernel takes many times as long as float32's with casts around it."""
    if device != "CPU":
        return False
    with tf.init_scope(), regions.none():
        if not tf.executing_eagerly() or os.environ.get("KERAS_MP_MEASURE") == "0":
            # As on each CPU that was measured; depthwise ones were fast on some.
            return dtype == tf.float16 and not op.startswith("Depthwise")
        compute = getattr(tf.raw_ops, op)
        with tf.device("CPU:0"):
            own, _ = example(dtype, case)

            def in_float32() -> tf.Tensor:
                cast = {
                    name: tf.cast(value, tf.float32) if tf.is_tensor(value) else value
                    for name, value in own.items()
                }
                return tf.cast(compute(**cast), dtype)

            try:
                return _seconds(lambda: compute(**own)) > _MANY_TIMES * _seconds(in_float32)
            except (tf.errors.OpError, ValueError):
                return False


def _seconds(compute: Callable[[], tf.Tensor]) -> float:
    """The time of the fastest turn: other programs only make it slower."""
    seconds = []
    for _ in range(1 + _TURNS):
        start = time.perf_counter()
        last_value(compute()).numpy()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


_TABLE = Table(KERNELS, "and may be slow in float16", asks=_is_slow)
install, is_slow = _TABLE.install, _TABLE.is_wrong
