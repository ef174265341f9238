"""Batch normalization of Keras 3 in 16 bits: one kernel, as exact as Keras's operations."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.common import IS_KERAS_3, differentiated, distances, pairs, unscaled, value
from tests.kernels.stock_layers import results_and_gradients

pytestmark = pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 has one kernel itself.")
K = tf.keras


@pytest.fixture(autouse=True)
def in_reach():
    """Only layers are in reach here, not what they are compared with."""


@pytest.fixture
def calls(monkeypatch):
    """How often the kernel was taken."""
    ops = []
    compute = tf.raw_ops.FusedBatchNormV3

    @functools.wraps(compute)
    def counted(**arguments):
        ops.append("FusedBatchNormV3")
        return compute(**arguments)

    monkeypatch.setattr(tf.raw_ops, "FusedBatchNormV3", counted)
    return ops


def data(shape):
    return tf.random.stateless_normal(shape, [1, 2]) * 3 + 1


def layer_of(dtype, shape, **kwargs):
    policy = unscaled(dtype) if dtype in ("bfloat16", "float16") else dtype
    layer = K.layers.BatchNormalization(dtype=policy, **kwargs)
    layer.build(shape)
    random = np.random.default_rng(0)
    layer.set_weights([random.uniform(0.5, 1.5, w.shape) for w in layer.weights])
    return layer


def of_step(layer, x, mode):
    """The output, gradients of input and weights, and the statistics after a step."""
    options = {"input_signature": [tf.TensorSpec([None, *x.shape[1:]], x.dtype)]}

    def wrap(step):
        return step if mode == "eager" else tf.function(step, jit_compile=mode == "jit", **options)

    call, weights = functools.partial(layer, training=True), layer.trainable_variables
    found = results_and_gradients(call, x, weights=weights, wrap=wrap)
    return [*found, *map(np.float64, map(value, layer.non_trainable_variables))]


CASES = pairs(
    ["eager", "function"],
    ["bfloat16", "float16"],
    [(8, 6, 6, 4), (8, 6, 6, 16), (8, 4), (4, 6, 16), (2, 3, 3, 3, 4)],
    [{}, {"scale": False}, {"center": False}, {"epsilon": 1e-6, "momentum": 0.5}],
)


@pytest.mark.parametrize(("mode", "dtype", "shape", "kwargs"), CASES, ids=str)
def test_as_exact_as_keras(mode, dtype, shape, kwargs, calls, request):
    # In 16 bits already, so that nothing is lost on the way in.
    x = tf.cast(data(shape), tf.bfloat16)
    exact = of_step(layer_of("float64", shape, **kwargs), tf.cast(x, tf.float64), "eager")
    ours = layer_of(dtype, shape, **kwargs)
    found = of_step(ours, tf.cast(x, dtype), mode)
    assert calls == ["FusedBatchNormV3"]
    request.getfixturevalue("kernels_of_tensorflow")
    of_keras = of_step(layer_of(dtype, shape, **kwargs), tf.cast(x, dtype), mode)
    assert len(calls) == 1
    assert [each.shape for each in found] == [each.shape for each in of_keras]
    for ours, keras_own in zip(distances(found, exact), distances(of_keras, exact), strict=True):
        # The last digit of a float32 sum, or of a rounding, may fall elsewhere.
        assert ours < 1.1 * keras_own + 3e-6


@pytest.mark.parametrize(
    "kwargs", [{"axis": 1}, {"synchronized": True}, {"trainable": False}, {"mask": True}], ids=str
)
def test_what_is_not_plain_is_left_to_keras(kwargs, calls):
    shape = (4, 3, 3, 3)
    mask = {"mask": tf.ones(shape[:-1], tf.bool)} if "mask" in kwargs else {}
    layer = layer_of("bfloat16", shape, **({} if mask else kwargs))
    layer(tf.cast(data(shape), tf.bfloat16), training=True, **mask)
    assert not calls


class Shifted(K.layers.BatchNormalization):
    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean - 1, variance


def test_inference_float32_and_classes_of_users_are_left_to_keras(calls):
    shape = (4, 3, 3, 3)
    layer = Shifted(dtype=unscaled("bfloat16"))
    assert float(tf.reduce_mean(layer(data(shape), training=True))) > 0.2
    layer_of("bfloat16", shape)(data(shape), training=False)
    layer_of("bfloat16", shape)(data(shape))
    layer_of("float32", shape)(data(shape), training=True)
    of_step(layer_of("bfloat16", shape), tf.cast(data(shape), tf.bfloat16), "jit")
    assert not calls


@pytest.mark.parametrize("kwargs", [{}, {"scale": False}, {"center": False}], ids=str)
def test_an_unknown_number_of_channels_is_left_to_keras(kwargs, calls):
    layer = layer_of("bfloat16", (4, 3), **kwargs)
    any_shape = [tf.TensorSpec([None, None], tf.bfloat16)]
    step = tf.function(lambda x: layer(x, training=True), input_signature=any_shape)
    assert step(tf.cast(data((4, 3)), tf.bfloat16)).shape == (4, 3)
    assert not calls


def test_a_batch_of_one_number_for_each_channel(calls):
    layer = layer_of("bfloat16", (1, 3))
    before = layer.moving_variance.numpy()
    y = layer(tf.constant([[1.0, 2, 3]], tf.bfloat16), training=True)
    np.testing.assert_array_equal(tf.cast(y, tf.float32)[0], tf.cast(layer.beta, tf.bfloat16))
    np.testing.assert_allclose(layer.moving_variance, 0.99 * before, rtol=1e-6)
    assert calls


def test_second_derivatives(calls):
    shape = (6, 4)
    x = tf.cast(data(shape), tf.bfloat16)

    def second(layer, x):
        def of_power(power):
            return lambda y: tf.reduce_sum(tf.cast(y, tf.float32) ** power)

        call = functools.partial(layer, x, training=True)
        gradient = lambda: differentiated(call, x, of_power(3))[1]  # noqa: E731
        return differentiated(gradient, x, of_power(2))[1]

    expected = second(layer_of("float32", shape), tf.cast(x, tf.float32)).numpy()
    found = tf.cast(second(layer_of("bfloat16", shape), x), tf.float32).numpy()
    assert calls
    assert distances([found], [expected])[0] < 0.05
