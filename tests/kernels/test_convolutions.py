"""A window that fits in only once has the same result whatever its stride."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.kernels import convolutions, trials
from tests import inside
from tests.common import differentiated, needs_onednn, once

K = tf.keras
VALID, SAME = "VALID", "SAME"
# Of the image, of the filter, strides, padding, dilations.
PLACES = {
    "whole image": ([8, 8], [8, 8], [8, 8], VALID, 1),
    "part of it": ([8, 8], [4, 4], [8, 8], VALID, 1),
    "several rows": ([9, 8], [4, 4], [1, 8], VALID, 1),
    "padded rows": ([9, 8], [4, 8], [2, 8], SAME, 1),
    "padded columns": ([8, 6], [3, 11], [2, 6], SAME, 1),
    "by hand": ([8, 6], [8, 8], [8, 8], [[0, 0], [1, 0], [0, 2], [0, 0]], 1),
    "dilated": ([8, 8], [4, 4], [3, 8], VALID, 2),
    "line": ([16], [16], [16], VALID, 1),
    "cube": ([4, 4, 4], [4, 4, 4], [4, 4, 4], VALID, 1),
    "padded cube": ([4, 3, 4], [2, 2, 4], [2, 2, 4], SAME, 1),
}
# What is left alone: the window moves, or has no stride.
MOVES = {
    "patches": ([16, 16], [8, 8], [8, 8], VALID, 1),
    "no stride": ([8, 8], [8, 8], [1, 1], VALID, 1),
}
CONVOLUTIONS = {1: tf.nn.conv1d, 2: tf.nn.conv2d, 3: tf.nn.conv3d}


@pytest.fixture
def wrong(monkeypatch):
    """Not every CPU has bfloat16 units; here each is taken to be wrong."""
    inside.set_wrong(monkeypatch, convolutions.TABLE, lambda op, _, dtype, *__: dtype == "bfloat16")


def case(name, dtype="bfloat16"):
    image, window, strides, padding, dilation = {**PLACES, **MOVES}[name]
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, [2, *image, 16]).astype("float32")
    filters = rng.integers(-3, 4, [*window, 16, 4]).astype("float32")
    convolve = CONVOLUTIONS[len(image)]
    if len(image) == 3:
        strides = [1, *strides, 1]
    dilations = dilation if len(image) < 3 else None

    def function(x, filters):
        return convolve(x, filters, strides, padding, dilations=dilations)

    return function, tf.constant(x), tf.constant(filters)


def with_gradients(function, *arguments):
    y, gradients = differentiated(lambda: function(*arguments), arguments)
    return [y, *gradients]


def expect_equal(found, exact, rtol=0.01):
    for one, other in zip(found, exact):
        np.testing.assert_allclose(tf.cast(one, tf.float32), other, rtol=rtol, atol=0.5)


@once
@pytest.mark.parametrize(
    "name",
    # Without oneDNN, TensorFlow has no gradients of dilated convolutions in any dtype.
    [pytest.param(each, marks=needs_onednn if each == "dilated" else ()) for each in PLACES],
)
def test_as_in_float32(name, wrong):
    function, *arguments = case(name)
    exact = with_gradients(function, *arguments)
    half = [tf.cast(each, tf.bfloat16) for each in arguments]
    in_graph = tf.function(lambda *a: with_gradients(function, *a))
    for run in (lambda *a: with_gradients(function, *a), in_graph):
        expect_equal(run(*half), exact)
    strides = {
        op.inputs[0].dtype.name: op.get_attr("strides")[-2]
        for op in in_graph.get_concrete_function(*half).graph.get_operations()
        if op.type in ("Conv2D", "Conv3D")
    }
    assert strides.keys() == {"float32"}


@once
@pytest.mark.parametrize("name", ["whole image", "line", "cube"])
def test_this_cpu_wrong_or_not_and_xla(name, monkeypatch):
    function, *arguments = case(name)
    half = [tf.cast(each, tf.bfloat16) for each in arguments]
    # TensorFlow's own kernels, which compute where oneDNN does not, round what they add up.
    expect_equal(with_gradients(function, *half), with_gradients(function, *arguments), 0.02)
    with keras_mp.autocast("bfloat16"):
        found = with_gradients(function, *arguments)
    expect_equal(found, with_gradients(function, *arguments), 0.02)
    compiled = tf.function(lambda *a: with_gradients(function, *a), jit_compile=True)
    for enabled in (False, True):
        monkeypatch.setattr(convolutions.TABLE, "enabled", enabled)
        expect_equal(compiled(*half), with_gradients(function, *arguments))


def operations(function, *arguments):
    graph = tf.function(function).get_concrete_function(*arguments).graph
    return [(op.type, op.node_def.attr["strides"].list.i[:]) for op in graph.get_operations()]


@once
@pytest.mark.parametrize("name", MOVES)
def test_what_moves_is_left_alone(name, wrong):
    function, *arguments = case(name)
    half = [tf.cast(each, tf.bfloat16) for each in arguments]
    left_out = "Conv2D", "Cast"  # A CPU without units computes it in float32.
    assert [op for op in operations(function, *half) if op[0] not in left_out] == [
        op for op in operations(function, *arguments) if op[0] not in left_out
    ]


@once
def test_sizes_that_are_not_known(wrong):
    function, x, filters = case("whole image")
    spec = tf.TensorSpec([None, None, None, 16], tf.bfloat16)
    traced = tf.function(lambda x: function(x, tf.cast(filters, x.dtype)), input_signature=[spec])
    assert traced(tf.cast(x, tf.bfloat16)).shape == [2, 1, 1, 4]


@pytest.mark.parametrize("dilation", [1, 2, 4])
@pytest.mark.parametrize("padding", ["causal", "same", "valid"])
def test_a_dilated_layer_of_one_dimension(padding, dilation, wrong):
    """TensorFlow makes another convolution of it, whose strides are numbers of NumPy."""
    x = np.random.default_rng(0).integers(-3, 4, [3, 9, 2]).astype("float32")
    found = []
    for dtype in ("mixed_bfloat16", "float32"):
        options = {"kernel_initializer": "ones", "padding": padding, "dilation_rate": dilation}
        found.append(K.layers.Conv1D(4, 2, dtype=dtype, **options)(x))
    np.testing.assert_array_equal(tf.cast(found[0], tf.float32), found[1])


@once
@pytest.mark.parametrize("op", convolutions.KERNELS)
def test_the_question_has_a_right_answer(op):
    # Kernels of float32 are right.
    kernel = convolutions.KERNELS[op]
    result = getattr(tf.raw_ops, op)(**kernel.example(tf.float32, True))
    assert float(trials.last_value(result)) == kernel.expected
    assert not convolutions.TABLE.is_wrong(op, "float32", True)
    assert not convolutions.TABLE.is_wrong(op, "bfloat16", False)
