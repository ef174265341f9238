"""Sums of 16-bit numbers in float32, where the kernel stops short of the sum.

A kernel that keeps its running sum in bfloat16 stops at 256, since 256 + 1 rounds to 256; in
float16 it stops at 2048. TensorFlow has several: the gradients of biases, embeddings and broadcast
tensors, and some reductions themselves. `KERNELS` is the table of them.

XLA adds up in float32, except in scatters and in the exponentials of a softmax.

This module needs TensorFlow only.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_mp.hooks import Everywhere, Replacement, faces, reach
from keras_mp.kernels.trials import (
    Kernel,
    Table,
    in_its_module,
    shape_of,
)
from keras_mp.support.dtypes import LOW_PRECISION

# Enough that 16 bits stop short of their sum, even shared out among dozens of lanes and threads.
_TERMS = 2**17
# Enough for kernels that add one term after the other.
_FEW_TERMS = 2**13
# The number of windows, each with all numbers.
_MANY = 2**12
# The number of channels up to which a GPU keeps float32 sums of gradients of biases: half of 48 KB.
# With more channels it adds up in 16 bits, one after the other. (`bias_op_gpu.cu.cc`)
_FIT_INTO_GPU = 6144
# A mean that float16 holds, of numbers whose sum it does not.
_MEAN = 30000.0
# The right sum in the example of a bias.
_BIAS = _TERMS / 32


def _reduction(input: object, axis: Any, **others: object) -> tuple[bool, ...] | bool:
    """The groups of neighbouring axes that are added up.

    (True, False) adds rows together.
    """
    del others
    shape, axes = shape_of(input), tf.get_static_value(axis)
    if shape.rank is None or axes is None:
        return True, False  # the layout for which most kernels are wrong
    return _groups(tuple(shape.as_list()), tuple(np.ravel(axes).tolist()))


@functools.lru_cache(1024)
def _groups(sizes: tuple[int | None, ...], axes: tuple[int, ...]) -> tuple[bool, ...] | bool:
    reduced = {axis % len(sizes) for axis in axes} if sizes else set()
    flags = [i in reduced for i, size in enumerate(sizes) if size != 1]
    return any(flags) and tuple(flag for flag, _ in itertools.groupby(flags))


def _terms(input: object, axis: Any, **others: object) -> int | None:
    """How many numbers a reduction adds up for each result."""
    del others
    shape, axes = shape_of(input), tf.get_static_value(axis)
    if shape.rank is None or axes is None:
        return None
    reduced = {each % shape.rank for each in np.ravel(axes).tolist()}
    sizes: list[Any] = [shape[each] for each in reduced]
    return None if None in sizes else math.prod(sizes)


def _reduced(dtype: tf.DType, case: tuple[bool, ...]) -> dict[str, Any]:
    axes = [i for i, reduced in enumerate(case) if reduced]
    sizes = [2] * len(case)  # so that many groups take no more memory than few
    if not case[-1]:
        sizes[-1] = 8
    sizes[axes[0]] = _TERMS // 2 ** (len(axes) - 1)
    return {"input": tf.fill(sizes, tf.constant(1 / 32, dtype)), "axis": axes}


def _ones(dtype: tf.DType, *shape: int) -> tf.Tensor:
    return tf.ones(shape or [_FEW_TERMS], dtype)


def _all_to_one(*shape: int) -> tf.Tensor:
    """The indices of terms that all belong to the same place."""
    return tf.zeros([_FEW_TERMS, *shape], tf.int32)


def _bias_layout(out_backprop: object, data_format: Any = None) -> str:
    """The data format, and whether the sums of all channels fit into shared memory.

    That is the shared memory of a GPU.
    """
    data_format = tf.compat.as_str(data_format or "NHWC")
    shape = shape_of(out_backprop)
    is_wide = data_format == "NHWC" and bool(shape.rank) and (shape[-1] or 0) > _FIT_INTO_GPU
    return "wide NHWC" if is_wide else data_format


def _terms_of_bias(out_backprop: object, data_format: Any = None) -> int | None:
    shape = shape_of(out_backprop)
    if shape.rank is None:
        return None
    sizes: list[Any] = shape.as_list()
    del sizes[1 if tf.compat.as_str(data_format or "NHWC") == "NCHW" else -1]
    return None if None in sizes else math.prod(sizes)


def _bias(dtype: tf.DType, layout: str) -> dict[str, Any]:
    shape = {
        "NHWC": [_TERMS, 4],
        "NCHW": [_TERMS // 64, 4, 8, 8],
        "wide NHWC": [_FEW_TERMS // 2, _FIT_INTO_GPU + 1],
    }[layout]
    terms = tf.fill(shape, tf.constant(_BIAS * shape[1] / math.prod(shape), dtype))
    return {"out_backprop": terms, "data_format": layout.split()[-1]}


def _has_many_classes(logits: object) -> bool:
    """Whether the sum of exponentials of that many classes may be beyond float16."""
    shape = shape_of(logits)
    return bool(shape.rank) and (shape[-1] or 0) > float(tf.float16.max)


def _many_classes(dtype: tf.DType, _: bool) -> dict[str, Any]:
    return {"logits": tf.zeros([1, _TERMS], dtype)}


def _window_size(ksize: Any, **others: object) -> str | bool:
    """How many numbers a window adds up before it divides.

    With many, float16 overflows or rounds.
    """
    del others
    size = int(np.prod(ksize))
    return size > 1 and ("large" if size >= 64 else "small")


def _window(dtype: tf.DType, size: str) -> dict[str, Any]:
    window = [1, 64, 64, 1] if size == "large" else [1, 2, 2, 1]
    terms = tf.fill(window, tf.constant(_MEAN, dtype))
    return {"value": terms, "ksize": window, "strides": window, "padding": "VALID"}


def _running_sum(dtype: tf.DType, _: None) -> dict[str, Any]:
    return {"x": _ones(dtype), "axis": 0}


def _segments(dtype: tf.DType, _: None) -> dict[str, Any]:
    return {"data": _ones(dtype), "segment_ids": _all_to_one()}


def _unsorted_segments(dtype: tf.DType, _: None) -> dict[str, Any]:
    return {**_segments(dtype, None), "num_segments": 1}


def _scattered(dtype: tf.DType, _: None) -> dict[str, Any]:
    return {"indices": _all_to_one(1), "updates": _ones(dtype), "shape": [1]}


def _scattered_into(dtype: tf.DType, _: None) -> dict[str, Any]:
    return {"tensor": tf.zeros([1], dtype), "indices": _all_to_one(1), "updates": _ones(dtype)}


def _sparse_row(dtype: tf.DType, _: None) -> dict[str, Any]:
    return {
        "a_indices": [[0, i] for i in range(_FEW_TERMS)],
        "a_values": _ones(dtype),
        "a_shape": [1, _FEW_TERMS],
        "b": _ones(dtype, _FEW_TERMS, 1),
    }


def _depthwise_filter(dtype: tf.DType, _: None) -> dict[str, Any]:
    return {
        "input": _ones(dtype, _FEW_TERMS, 3, 3, 1),
        "filter_sizes": [3, 3, 1, 1],
        "out_backprop": _ones(dtype, _FEW_TERMS, 1, 1, 1),
        "strides": [1, 1, 1, 1],
        "padding": "VALID",
    }


def _one_pixel(dtype: tf.DType, _: None) -> dict[str, Any]:
    return {"grads": _ones(dtype, 1, _FEW_TERMS // 64, 64, 1), "size": [1, 1]}


def _has_many_windows(ksize: Any, strides: Any, **others: object) -> bool:
    """Whether a number may be in too many windows for the sum of their gradients."""
    del others
    return math.prod(-(-size // stride) for size, stride in zip(ksize, strides)) >= 16


def _windows(dtype: tf.DType, _: bool) -> dict[str, Any]:
    """Arguments for windows with all numbers in each of them."""
    grad = _ones(dtype, 1, _MANY, 1, 2)
    return {"grad": grad, "ksize": [1, 2 * _MANY, 1, 1], "strides": [1, 1, 1, 1], "padding": "SAME"}


def _average_windows(dtype: tf.DType, case: bool) -> dict[str, Any]:
    return {"orig_input_shape": [1, _MANY, 1, 2], **_windows(dtype, case)}


def _largest_last(dtype: tf.DType, case: bool) -> dict[str, Any]:
    last = tf.one_hot([_MANY - 1] * 2, _MANY, axis=0, dtype=dtype)
    of_windows = {"orig_output": _ones(dtype, 1, _MANY, 1, 2), **_windows(dtype, case)}
    return {"orig_input": tf.reshape(last, [1, _MANY, 1, 2]), **of_windows}


def _one_by_one_dilation(dtype: tf.DType, _: None) -> dict[str, Any]:
    image = _ones(dtype, 1, _FEW_TERMS, 1, 1)
    return {
        **{"input": image, "filter": tf.zeros([1, 1, 1], dtype), "out_backprop": image},
        **{"strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1], "padding": "VALID"},
    }


_reduction_kernel = functools.partial(
    Kernel, _reduced, case=_reduction, cases=((True,), (True, False))
)
_softmax_kernel = functools.partial(
    Kernel, _many_classes, case=_has_many_classes, cases=(True,), wrong_in_xla=(tf.float16,)
)

# Most add up a vector of ones or of 1/32, so that right sums are powers of two.
KERNELS: dict[str, Kernel] = {
    "BiasAddGrad": Kernel(
        _bias,
        _BIAS,
        _bias_layout,
        ("NHWC", "NCHW", "wide NHWC"),
        terms=_terms_of_bias,
    ),
    "Sum": _reduction_kernel(_TERMS / 32, terms=_terms),
    "Mean": _reduction_kernel(1 / 32),
    "AvgPool": Kernel(_window, _MEAN, _window_size, ("small", "large")),
    "Softmax": _softmax_kernel(1 / _TERMS),
    "LogSoftmax": _softmax_kernel(-math.log(_TERMS)),
    "Cumsum": Kernel(_running_sum, _FEW_TERMS),
    "SegmentSum": Kernel(_segments, _FEW_TERMS),
    "SegmentMean": Kernel(_segments, 1),
    "UnsortedSegmentSum": Kernel(_unsorted_segments, _FEW_TERMS, wrong_in_xla=LOW_PRECISION),
    "ScatterNd": Kernel(_scattered, _FEW_TERMS, wrong_in_xla=LOW_PRECISION),
    "TensorScatterAdd": Kernel(_scattered_into, _FEW_TERMS, wrong_in_xla=LOW_PRECISION),
    "TensorScatterSub": Kernel(_scattered_into, -_FEW_TERMS, wrong_in_xla=LOW_PRECISION),
    "SparseTensorDenseMatMul": Kernel(_sparse_row, _FEW_TERMS),
    "DepthwiseConv2dNativeBackpropFilter": Kernel(_depthwise_filter, _FEW_TERMS),
    "ResizeNearestNeighborGrad": Kernel(_one_pixel, _FEW_TERMS),
    "AvgPoolGrad": Kernel(_average_windows, 1, _has_many_windows, (True,)),
    "MaxPoolGrad": Kernel(_largest_last, _MANY, _has_many_windows, (True,), LOW_PRECISION),
    "Dilation2DBackpropFilter": Kernel(_one_by_one_dilation, _FEW_TERMS),
}

TABLE = Table(KERNELS)


def replacements() -> tuple[Replacement, ...]:
    """Returns the row of the gradient of a bias."""
    return (Replacement(Everywhere(in_its_module(tf.raw_ops.BiasAddGrad)), _without_a_copy),)


def _without_a_copy(original: Callable[..., tf.Tensor]) -> Callable[..., Any]:
    """Returns the gradient of a bias, as a sum over axes where its kernel is wrong.

    The door would take a float32 copy of all that is added up, and most sums over axes are right.
    """

    def call(out_backprop: Any, data_format: Any = None, name: str | None = None) -> Any:
        rank = shape_of(out_backprop).rank
        given = {"out_backprop": out_backprop, "data_format": data_format}
        if (
            not faces.is_low_tensor(out_backprop)
            or rank is None
            or reach.thread.is_exact
            or not TABLE.is_wrong_for("BiasAddGrad", out_backprop.dtype, given)
        ):
            return original(**given, name=name)
        channels = 1 if tf.compat.as_str(data_format or "") == "NCHW" else rank - 1
        # Not `tf.reduce_sum`, which takes as long as such a sum.
        add_up = in_its_module(tf.raw_ops.Sum)
        axes = [i for i in range(rank) if i != channels]
        return add_up(out_backprop, axes, name=name)

    return call


def enable_float32_sums(enabled: bool = True) -> None:
    """Switches the float32 sums of 16-bit numbers on or off.

    It is on, in the whole process, for what keras_mp computes in 16 bits: layers with a policy of
    keras_mp, regions and scopes. A `tf.function` keeps what it was traced with.

    Args:
        enabled: bool. False gives TensorFlow's own sums.

    Example:

    >>> x = tf.zeros([10_000, 1], tf.bfloat16)
    >>> with keras_mp.autocast_scope("bfloat16"), tf.GradientTape() as tape:
    ...     bias = tf.zeros([1], tf.bfloat16)
    ...     tape.watch(bias)
    ...     y = tf.nn.bias_add(x, bias)
    >>> tape.gradient(y, bias).numpy().item()  # 10,000 in bfloat16
    9984.0

    TensorFlow's own answer on CPUs is 256.
    """
    TABLE.enabled = enabled


def are_enabled() -> bool:
    """Whether 16-bit numbers are added up in float32 where TensorFlow's sum is wrong."""
    return TABLE.enabled
