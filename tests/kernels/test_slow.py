"""Convolutions are computed in float32 inside where float16 is many times slower."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import kernels
from keras_mp.kernels import replaced, slow

K = tf.keras
LAYERS = {
    "Conv1D": (lambda **kw: K.layers.Conv1D(4, 3, **kw), [2, 8, 3]),
    "Conv2D": (lambda **kw: K.layers.Conv2D(4, 3, **kw), [2, 8, 8, 3]),
    "Conv2DTranspose": (lambda **kw: K.layers.Conv2DTranspose(4, 3, **kw), [2, 8, 8, 3]),
    "Conv3D": (lambda **kw: K.layers.Conv3D(4, 2, **kw), [2, 4, 4, 4, 3]),
    "DepthwiseConv2D": (lambda **kw: K.layers.DepthwiseConv2D(3, **kw), [2, 8, 8, 3]),
}


@pytest.fixture(autouse=True)
def installed():
    kernels.install()


@pytest.fixture(params=[True, False], ids=["slow", "fast"])
def answer(request, monkeypatch):
    """What the clock says of each kernel."""
    monkeypatch.setattr(slow._TABLE, "_asks", lambda *_: request.param)
    return request.param


def values_and_gradients(layer, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x)
        loss = tf.reduce_sum(tf.cast(y, "float32") ** 2)
    return [y, *tape.gradient(loss, [x, *layer.trainable_variables])]


@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_as_in_float32(name, mode, answer):
    make, shape = LAYERS[name]
    x = tf.random.stateless_uniform(shape, [1, 2])
    exact = make(dtype="float32")
    expected = values_and_gradients(exact, x)
    layer = make(dtype=keras_mp.Policy("mixed_float16"))
    layer(x)
    layer.set_weights(exact.get_weights())
    step = values_and_gradients
    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "compiled")
    for found, right in zip(step(layer, x), expected):
        assert found.dtype == ("float16" if found.shape == layer(x).shape else "float32")
        scale = float(tf.reduce_max(tf.abs(right)))
        np.testing.assert_allclose(tf.cast(found, "float32"), right, atol=0.005 * scale)


def test_what_is_slow_computes_in_float32(answer):
    function = tf.function(lambda x, w: tf.gradients(tf.nn.conv2d(x, w, 1, "SAME"), [x, w]))
    spec = [tf.TensorSpec([1, 4, 4, 2], "float16"), tf.TensorSpec([3, 3, 2, 2], "float16")]
    graph = function.get_concrete_function(*spec).graph
    found = {
        op.get_attr("T") for op in graph.get_operations() if op.type.startswith("Conv2DBackprop")
    }
    assert found == {tf.float32 if answer else tf.float16}


@pytest.mark.parametrize("op", slow.KERNELS)
def test_the_examples_have_right_answers(op):
    arguments, expected = slow.KERNELS[op].example(tf.float32, None)
    assert float(replaced.last_value(getattr(tf.raw_ops, op)(**arguments))) == expected


def test_depthwise_convolutions_that_are_slow_compute_in_float32(answer):
    function = tf.function(
        lambda x, w: tf.gradients(tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"), [x, w])
    )
    spec = [tf.TensorSpec([1, 4, 4, 2], "float16"), tf.TensorSpec([3, 3, 2, 1], "float16")]
    graph = function.get_concrete_function(*spec).graph
    found = {
        op.type: op.get_attr("T")
        for op in graph.get_operations()
        if op.type.startswith("DepthwiseConv2dNative")
    }
    if not answer:  # The gradient of a filter may be wrong in float16, and is float32 for that.
        found.pop("DepthwiseConv2dNativeBackpropFilter")
    assert set(found.values()) == {tf.float32 if answer else tf.float16}


def test_nothing_is_timed_where_nothing_is_to_be_measured(monkeypatch):
    def fail(compute):
        raise AssertionError

    monkeypatch.setenv("KERAS_MP_MEASURE", "0")
    monkeypatch.setattr(slow, "_seconds", fail)
    slow._is_slow.cache_clear()
    assert slow.is_slow("Conv2DBackpropFilter", "float16")
    assert not slow.is_slow("DepthwiseConv2dNative", "float16")
    assert not slow.is_slow("Conv2DBackpropFilter", "bfloat16")
    slow._is_slow.cache_clear()


def test_only_what_is_many_times_slower_counts(monkeypatch):
    monkeypatch.setenv("KERAS_MP_MEASURE", "1")
    kernel = slow.KERNELS["Conv3D"]
    for seconds, expected in (([1.0, 0.4], False), ([1.0, 0.3], True)):
        slow._is_slow.cache_clear()
        clock = iter(seconds)
        monkeypatch.setattr(slow, "_seconds", lambda compute, clock=clock: next(clock))
        assert slow._is_slow("Conv3D", kernel.example, tf.float16, None, "CPU") == expected
    slow._is_slow.cache_clear()
    assert not slow._is_slow("Conv3D", kernel.example, tf.float16, None, "GPU")


def test_float32_is_not_timed(monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(slow._TABLE, "_asks", fail)
    values_and_gradients(K.layers.Conv2D(2, 3), tf.ones([1, 4, 4, 1]))
