"""cuDNN's recurrent layers, whose gradients in bfloat16 TensorFlow loses on GPUs.

Seen with TensorFlow 2.21 on an H200: what a layer returns is right, and training learns nothing.
The bfloat16 kernel casts to float32 for cuDNN, so nothing is slower if the operation is one of
float32 with casts around it, which has float32's gradients. The question is asked by a gradient:
where TensorFlow's own is right, it stays.

This module needs TensorFlow only.
"""

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.kernels.trials import Kernel, Table, is_result_wrong

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_STEPS, _BATCH, _SIZE = 4, 4, 16
_RIGHT = 1.0
_FLOATS = ("input", "input_h", "input_c", "params")
_SOURCES = ("input", "input_h", "params")


def _kernel(op: str) -> Kernel:
    def parameters() -> tuple[str, ...]:
        return tuple(inspect.signature(getattr(tf.raw_ops, op)).parameters)

    def mode_of(*args: Any, **kwargs: Any) -> str:
        given = {**dict(zip(parameters(), args)), **kwargs}
        return tf.compat.as_str(given.get("rnn_mode", "lstm"))

    def example(dtype: tf.DType, mode: str) -> dict[str, Any]:
        weights = _GATES[mode] * (2 * _SIZE * _SIZE + 2 * _SIZE)
        state = 0.1 * _numbers(1, _BATCH, _SIZE)
        arguments = {
            "input": _numbers(_STEPS, _BATCH, _SIZE),
            "input_h": state,
            "input_c": state if mode == "lstm" else tf.zeros([]),
            "params": 0.2 * _numbers(weights),
        }
        given = {name: tf.cast(value, dtype) for name, value in arguments.items()}
        if "sequence_lengths" in parameters():
            given["sequence_lengths"] = tf.fill([_BATCH], _STEPS)
        return {**given, "rnn_mode": mode}

    return Kernel(example, _RIGHT, mode_of, ("lstm", "gru"), result=_distance_of_gradients)


def _numbers(*shape: int) -> tf.Tensor:
    return tf.random.stateless_normal(shape, seed=(0, 0))


def _distance_of_gradients(original: Callable[..., Any], **arguments: Any) -> tf.Tensor:
    """Returns how far gradients are from those of float32.

    It is 1 where they are the same, and more where they differ.
    """

    def gradients(dtype: tf.DType) -> list[tf.Tensor]:
        given = {
            name: tf.cast(value, dtype) if name in _FLOATS else value
            for name, value in arguments.items()
        }
        sources = [given[name] for name in _SOURCES]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            results = original(**given)
        outputs = [results.output, results.output_h]
        zero = tf.UnconnectedGradients.ZERO
        found: Any = tape.gradient(outputs, sources, unconnected_gradients=zero)
        return [tf.cast(gradient, tf.float32) for gradient in found]

    pairs = zip(gradients(arguments["input"].dtype), gradients(tf.float32), strict=True)
    return _RIGHT + tf.add_n([tf.norm(found - right) / tf.norm(right) for found, right in pairs])


def _is_wrong(op: str, kernel: Kernel, dtype: tf.DType, case: Any, device: str) -> bool:
    # No other device runs it.
    return device != "CPU" and is_result_wrong(op, kernel, dtype, case, device)


KERNELS = {op: _kernel(op) for op in ("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3")}

TABLE = Table(KERNELS, asks=_is_wrong)
