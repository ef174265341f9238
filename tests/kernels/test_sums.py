"""Sums of 16-bit numbers are what a float32 sum, rounded once, would be."""

import numpy as np
import pytest
import tensorflow as tf

from keras_mp.kernels import sums, trials
from tests import inside
from tests.common import differentiated, once, placed
from tests.kernels.stock_layers import ROWS, SUMS

pytestmark = once

DTYPES = ("bfloat16", "float16")
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-10}
KERNELS = [
    pytest.param(op, dtype, case, id=f"{op}-{dtype}-{case}")
    for op, kernel in sums.KERNELS.items()
    for dtype in DTYPES
    for case in kernel.cases
]
# XLA does not compile them.
NOT_IN_XLA = (
    *("SegmentSum", "SegmentMean", "SparseTensorDenseMatMul", "ResizeNearestNeighborGrad"),
    "Dilation2DBackpropFilter",
)


def bias_gradient(dtype, x=None):
    x = tf.ones([ROWS, 4], dtype) if x is None else x
    bias = tf.zeros([4], dtype)
    return differentiated(lambda: tf.nn.bias_add(x, bias), bias)[1]


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_the_switch(mode, request):
    assert placed(mode, lambda: bias_gradient("bfloat16"))()[0] == 9984
    request.getfixturevalue("sums_of_tensorflow")
    own = float(tf.raw_ops.BiasAddGrad(out_backprop=tf.ones([ROWS, 4], "bfloat16"))[0])
    assert placed(mode, lambda: bias_gradient("bfloat16"))()[0] == own


def last_value(op, dtype, case, mode, raw=False):
    """Computes the example of a kernel, of which nothing is known before it runs."""
    kernel = sums.KERNELS[op]
    arguments = kernel.example(tf.as_dtype(dtype), case)
    tensors = {name: value for name, value in arguments.items() if tf.is_tensor(value)}

    def run(tensors):
        compute = trials.in_its_module(getattr(tf.raw_ops, op))
        return trials.last_value(compute(**{**arguments, **tensors}))

    with inside.in_reach(None if raw else inside.dtype_in_reach()):
        return float(placed(mode, run)(tensors)), kernel.expected


def is_right(found, expected):
    return found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("op", "dtype", "case"), KERNELS)
def test_results_are_right_whatever_the_kernel_answers(op, dtype, case, monkeypatch):
    in_xla = [] if op in NOT_IN_XLA else ["jit"]
    for mode in ["eager", "function", *in_xla]:
        assert is_right(*last_value(op, dtype, case, mode))
    if tf.as_dtype(dtype) in sums.KERNELS[op].wrong_in_xla:
        return  # It is not asked.
    answer, modes = not sums.TABLE.is_wrong(op, dtype, case), in_xla
    # A machine whose kernel is right can only be imitated with a kernel that is.
    if answer or is_right(*last_value(op, dtype, case, "eager", raw=True)):
        modes = ["eager", "function", *in_xla]
    inside.set_wrong(monkeypatch, sums.TABLE, answer)
    for mode in modes:
        assert is_right(*last_value(op, dtype, case, mode))


@pytest.mark.parametrize(("op", "dtype", "case"), KERNELS)
def test_what_is_known_of_xla(op, dtype, case):
    if op in NOT_IN_XLA:
        with pytest.raises(tf.errors.InvalidArgumentError):
            last_value(op, dtype, case, "jit", raw=True)
        return
    known = tf.as_dtype(dtype) not in sums.KERNELS[op].wrong_in_xla
    assert is_right(*last_value(op, dtype, case, "jit", raw=True)) == known


def test_asking_takes_no_more_memory_for_many_axes(monkeypatch):
    asked = []

    def fill(sizes, value):
        asked.append(np.prod(sizes))
        return tf.ones([1] * len(sizes))

    monkeypatch.setattr(tf, "fill", fill)
    for pattern in ((True, False), (False, True) * 4, (True, False) * 5):
        sums.KERNELS["Sum"].example(tf.float16, pattern)
    assert max(asked) <= 2**24


@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
def test_softmax_over_more_classes_than_float16_counts(mode):
    def function(logits):
        log, gradient = differentiated(lambda: tf.nn.log_softmax(logits)[0, 0], logits)
        return tf.nn.softmax(logits)[0, 0], log, gradient[0, 0]

    logits = tf.zeros([1, 70_000], tf.float16)
    run = placed(mode, function)
    for found, expected in zip(run(logits), (1 / 70_000, -np.log(70_000), 1 - 1 / 70_000)):
        assert float(found) == pytest.approx(expected, rel=0.01)
    # Not counted where it cannot happen.
    few = tf.function(tf.nn.softmax).get_concrete_function(logits[:, :60_000])
    assert "Cast" not in {op.type for op in few.graph.get_operations()}


@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
def test_average_pooling_of_large_numbers(mode):
    x = tf.fill([1, 6, 6, 1], tf.constant(60000.0, tf.float16))
    for padding in ("VALID", "SAME"):
        pooled = placed(mode, lambda x: tf.nn.avg_pool2d(x, 3, 2, padding))(x)
        np.testing.assert_array_equal(pooled, tf.fill(pooled.shape, 60000.0))


def test_nothing_changes_where_tensorflow_is_right(request):
    def operations(dtype):
        step = tf.function(
            lambda: (bias_gradient(dtype), tf.reduce_mean(tf.ones([9, 4], dtype), 1))
        )
        return [op.type for op in step.get_concrete_function().graph.get_operations()]

    for dtype in DTYPES:
        is_wrong = sums.TABLE.is_wrong("BiasAddGrad", dtype, "NHWC")
        assert ("BiasAddGrad" in operations(dtype)) == (not is_wrong)
    ours = [operations(dtype) for dtype in ("float32", "float64")]
    request.getfixturevalue("sums_of_tensorflow")
    assert ours == [operations(dtype) for dtype in ("float32", "float64")]


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_random_numbers(name, dtype):
    x = tf.cast(tf.random.stateless_uniform([ROWS, 3], [1, 2]), dtype)
    exact = x.numpy().astype("float64")[:, 0]
    right = {"mean": 64 * exact.mean(), "segment_mean": 64 * exact.mean()}.get(name, exact.sum())
    if name == "euclidean norm":
        right = 32 * np.sqrt((exact**2).sum())
    for mode in ("eager", "function"):
        found = float(placed(mode, SUMS[name])(x))
        assert found == pytest.approx(right, rel=ROUNDING[dtype])


def test_shapes_that_are_not_known():
    for shape in ([None, None], None):
        signature = [tf.TensorSpec(shape, "bfloat16")]
        step = tf.function(lambda x: bias_gradient("bfloat16", x), input_signature=signature)
        assert step(tf.ones([ROWS, 4], "bfloat16"))[0] == 9984
        signature = [tf.TensorSpec(shape, "float16")]
        step = tf.function(lambda x: tf.reduce_sum(x, 0), input_signature=signature)
        assert step(tf.ones([ROWS, 4], "float16"))[0] == ROWS


def test_kernels_are_asked_in_a_graph_of_tensorflow_1_too():
    cases = [("BiasAddGrad", "bfloat16", "NHWC"), ("Sum", "bfloat16", (True, False))]
    trials.is_result_wrong.cache_clear()
    with tf.Graph().as_default():
        in_graph = [sums.TABLE.is_wrong(*case) for case in cases]
    trials.is_result_wrong.cache_clear()
    assert in_graph == [sums.TABLE.is_wrong(*case) for case in cases]
