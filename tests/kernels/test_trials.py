"""A kernel is asked about on the device that will run it."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from keras_mp.hooks import reach
from keras_mp.kernels import slow, sums, trials
from tests import inside
from tests.common import mirrored, once

pytestmark = once
X = tf.ones([8, 4], "bfloat16")


@pytest.fixture
def asked(monkeypatch):
    """A machine with a GPU, whose CPU is wrong and whose GPU is right; what it was asked."""
    devices = []

    def ask(op, kernel, dtype, case, device):
        devices.append(device)
        return device == "CPU"

    inside.set_device(monkeypatch, "GPU")
    inside.set_wrong(monkeypatch, sums.TABLE, ask)
    return devices


@pytest.fixture
def right_gpu(monkeypatch):
    """A machine with a GPU, whose kernels are right in each example."""
    inside.set_device(monkeypatch, "GPU")
    inside.set_wrong(monkeypatch, sums.TABLE, False)


def casts(function, *arguments):
    graph = tf.function(function).get_concrete_function(*arguments).graph
    return sum(op.type == "Cast" for op in graph.get_operations())


def on_cpu(function):
    def call(*arguments):
        with tf.device("CPU:0"):
            return function(*arguments)

    return call


def in_gradient(function):
    """There the dtypes of the forward pass decide, and kernels that are wrong; a sum of the
    forward pass is in float32 anyway."""

    return mock.patch.object(reach.thread, "in_gradient", True)(function)


@in_gradient
def column_sums(x):
    return tf.reduce_sum(x, 0)


def test_what_a_gpu_adds_up_right_stays_in_16_bits(asked):
    assert casts(column_sums, X) == 0
    assert asked == ["GPU"]


def test_what_the_program_places_on_the_cpu_is_asked_there(asked):
    assert casts(on_cpu(column_sums), X) == 2
    assert asked == ["CPU"]


def test_a_device_around_a_call_does_not_count(asked):
    """The function may be called again, elsewhere, and is not traced for that."""
    function = tf.function(column_sums)
    on_cpu(lambda: function.get_concrete_function(X))()
    assert asked == ["GPU"]


def test_in_eager_the_inputs_do_not_say_where(asked):
    assert X.device.endswith("CPU:0")
    column_sums(X)
    assert asked == ["GPU"]
    on_cpu(column_sums)(X)
    assert asked == ["GPU", "CPU"]


def test_replicas_ask_their_own_devices(asked):
    strategy = mirrored(2)
    tf.function(lambda: strategy.run(lambda: column_sums(X))).get_concrete_function()
    assert asked == ["CPU", "CPU"]


def test_only_a_cpu_is_slow(monkeypatch):
    inside.set_slow(monkeypatch)
    assert casts(lambda x: tf.matmul(x, tf.ones_like(x), transpose_b=True), X) == 3
    monkeypatch.setattr(slow, "device_type", lambda: "GPU")
    assert casts(lambda x: tf.matmul(x, tf.ones_like(x), transpose_b=True), X) == 0


def test_without_a_gpu_nothing_is_added_to_a_graph():
    function = tf.function(column_sums).get_concrete_function(X)
    assert "NoOp" not in {op.type for op in function.graph.get_operations()}


def sum_over(axis):
    return in_gradient(lambda x: tf.reduce_sum(x, axis))


def gradient_of_bias(data_format):
    def gradient(x):
        channels = x.shape[1] if data_format == "NCHW" else x.shape[-1]
        bias = tf.zeros([channels], x.dtype)
        return tf.gradients(tf.nn.bias_add(tf.zeros_like(x), bias, data_format), bias, x)[0]

    return gradient


@pytest.mark.parametrize(
    ("function", "shape", "dtype", "is_long"),
    [
        (sum_over(0), [2048, 3], "float16", False),
        (sum_over(0), [2049, 3], "float16", True),
        (sum_over(0), [2049, 3], "bfloat16", False),
        (sum_over(-1), [2049, 3], "float16", False),
        (sum_over([0, -1]), [1024, 3, 2], "float16", False),
        (sum_over([0, -1]), [1024, 3, 3], "float16", True),
        (sum_over(None), [50, 50], "float16", True),
        (sum_over(0), [None, 3], "float16", True),
        (sum_over(1), [None, 3], "float16", False),
        (gradient_of_bias("NHWC"), [64, 32, 8], "float16", False),
        (gradient_of_bias("NHWC"), [64, 33, 8], "float16", True),
        (gradient_of_bias("NHWC"), [64, 33, 8], "bfloat16", False),
        (gradient_of_bias("NHWC"), [None, 7000], "float16", True),
        (gradient_of_bias("NCHW"), [2, 8, 32, 32], "float16", False),
        (gradient_of_bias("NCHW"), [2, 8, 32, 33], "float16", True),
    ],
)
def test_a_gpu_adds_up_more_than_float16_counts_in_float32(
    right_gpu, function, shape, dtype, is_long
):
    """Which of its sums stop short depends on the shape: an example does not tell."""
    x = tf.TensorSpec(shape, dtype)
    assert casts(function, x) == 2 * is_long
    assert casts(on_cpu(function), x) == 0


def test_long_sums_on_a_gpu_are_right(right_gpu):
    for rows, channels in ((4096, 8), (4096, 6145)):
        x = tf.ones([rows, channels], "float16")
        function = tf.function(gradient_of_bias("NHWC"))
        np.testing.assert_array_equal(function(x), tf.fill([channels], rows))


@pytest.mark.parametrize(
    ("shape", "data_format", "layout"),
    [
        ([2, 6144], "NHWC", "NHWC"),
        ([2, 6145], "NHWC", "wide NHWC"),
        ([2, 6145, 1, 1], "NCHW", "NCHW"),
        ([None, None], "NHWC", "NHWC"),
    ],
)
def test_biases_whose_sums_do_not_fit_into_a_gpu(shape, data_format, layout):
    gradient = tf.TensorSpec(shape, "float16")
    assert sums.KERNELS["BiasAddGrad"].case(gradient, data_format) == layout


def test_a_session_on_a_gpu_takes_float32():
    """To ask would take memory of the GPU in another way than the program's own session."""
    kernel = sums.KERNELS["Sum"]
    with tf.Graph().as_default():
        assert trials.is_result_wrong.__wrapped__("Sum", kernel, tf.float16, (True, False), "GPU")
