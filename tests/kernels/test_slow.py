"""Operations are computed in float32 inside where 16 bits are slower."""

import collections

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp import kernels
from keras_mp.kernels import slow
from tests import inside
from tests.common import once

K = tf.keras


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(
    ("dtype", "channels", "options", "expected"),
    [
        ("bfloat16", 12, {}, tf.float32),
        ("bfloat16", 100, {}, tf.float32),
        ("bfloat16", 32, {}, tf.bfloat16),
        ("bfloat16", None, {}, tf.bfloat16),
        ("bfloat16", 12, {"data_format": "NCHW"}, tf.bfloat16),
        ("float16", 12, {}, tf.float16),
        ("float32", 12, {}, tf.float32),
    ],
    ids=str,
)
def test_channels_that_fill_no_vectors_are_normalized_in_float32(
    dtype, channels, options, expected, is_training, monkeypatch
):
    shape = [None, channels, 4, 4] if options else [None, 4, 4, channels]

    def normalized(x, scale):
        given = {} if is_training else {"mean": scale, "variance": scale}
        how = {**given, **options, "is_training": is_training}
        y, *_ = tf.compat.v1.nn.fused_batch_norm(x, scale, scale, **how)
        return tf.gradients(y, [x, scale])

    inside.set_units(lambda dtype: True, monkeypatch.setattr)
    with inside.in_reach(dtype):
        found = dtypes_by_type(normalized, tf.TensorSpec(shape, dtype), tf.TensorSpec([channels]))
    assert set().union(*(found[op] for op in found if "BatchNorm" in op)) == {expected}


def test_a_normalization_in_float32_is_rounded_once():
    with inside.in_reach(None):  # It has lost nothing.
        x = tf.cast(tf.random.stateless_normal([8, 4, 4, 12], [1, 2]), tf.bfloat16)
    options = {"scale": tf.fill([12], 1.5), "offset": tf.fill([12], 0.5), "epsilon": 1e-3}
    found, *statistics = tf.compat.v1.nn.fused_batch_norm(x, **options)
    exact, *expected = tf.compat.v1.nn.fused_batch_norm(tf.cast(x, tf.float32), **options)
    np.testing.assert_array_equal(found, tf.cast(exact, tf.bfloat16))
    np.testing.assert_array_equal(statistics, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("has_units", [True, False])
def test_the_units_of_the_cpu_decide(has_units, dtype, monkeypatch):
    inside.set_units(lambda dtype: has_units, monkeypatch.setattr)
    found = set(inside.slow_operations(dtype))
    gradients = {op for op in inside.SLOW_OPERATIONS if "Backprop" in op}
    assert len(gradients) == 6
    if not has_units:
        assert found == set(inside.SLOW_OPERATIONS)
    else:
        assert found == (gradients if dtype == "float16" else set())


def dtypes_by_type(function, *specs):
    """The dtypes in which the operations of a graph compute, by their types."""
    found = collections.defaultdict(set)
    for op in tf.function(function).get_concrete_function(*specs).graph.get_operations():
        if "T" in op.node_def.attr:
            found[op.type].add(op.get_attr("T"))
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_operations_take_float32_where_they_are_slow(dtype, monkeypatch):
    def compute(x, image, volume):
        pooled = [pool(image, 2, 2, "VALID") for pool in (tf.nn.max_pool2d, tf.nn.avg_pool2d)]
        pooled += [pool(volume, 2, 2, "VALID") for pool in (tf.nn.max_pool3d, tf.nn.avg_pool3d)]
        filters = tf.ones([3, 3, 2, 2], dtype)
        convolved = [
            tf.nn.conv2d(image, filters, 1, "SAME"),
            tf.nn.depthwise_conv2d(image, filters, [1] * 4, "SAME"),
            tf.nn.conv3d(volume, tf.ones([2, 2, 2, 2, 2], dtype), [1] * 5, "SAME"),
        ]
        scale = tf.ones([2])
        normal = tf.compat.v1.nn.fused_batch_norm(image, scale, scale)[0]
        products = [tf.matmul(x, x, transpose_b=True), tf.matmul(x[0], x[0], transpose_b=True)]
        products.append(tf.einsum("abc,adc->abd", x, x))
        results = [*pooled, *convolved, normal, *products]
        return tf.gradients(results, [x, image, volume, filters])

    specs = [tf.TensorSpec(s, dtype) for s in ([2, 4, 3], [2, 4, 4, 2], [2, 4, 4, 4, 2])]
    found = {}
    for are_slow in (True, False):
        inside.set_slow(monkeypatch, are_slow)
        with inside.in_reach(dtype):
            found[are_slow] = dtypes_by_type(compute, *specs)
    for op in inside.SLOW_OPERATIONS:
        # TensorFlow differentiates what was computed in float32 in float32.
        assert found[True][op] <= {tf.float32}
        if not op.endswith(("Grad", "Backprop")):
            assert found[True][op] or "Backprop" in op
    for op in ("MatMul", "Conv2D", "Conv2DBackpropInput", "MaxPool"):
        assert found[False][op] == {tf.as_dtype(dtype)}


FUNCTIONS = {
    "product": lambda x: x @ tf.reshape(tf.reverse(x, [0]), [32, 8]),
    "max pooling": lambda x: tf.nn.max_pool2d(tf.reshape(x, [1, 8, 8, 4]), 2, 2, "VALID"),
    "einsum": lambda x: tf.einsum("ab,cb->ac", x, tf.ones_like(x)),
    "average pooling": lambda x: tf.nn.avg_pool2d(tf.reshape(x, [1, 8, 8, 4]), 2, 2, "VALID"),
}


def output_and_gradient(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    weights = tf.reshape(tf.linspace(0.5, 1.5, y.shape.num_elements()), y.shape)
    return y, tape.gradient(y, x, output_gradients=tf.cast(tf.cast(weights, "bfloat16"), y.dtype))


@once
@pytest.mark.usefixtures("sums_of_tensorflow")  # A small window is averaged in float32 anyway.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_inside_is_no_less_exact(name, dtype, monkeypatch):
    x = tf.cast(3 * tf.random.stateless_normal([8, 32], [3, 4]), dtype)
    exact = output_and_gradient(FUNCTIONS[name], tf.cast(x, "float64"))

    def errors(is_slow):
        inside.set_slow(monkeypatch, is_slow)
        function = tf.function(lambda x: output_and_gradient(FUNCTIONS[name], x))
        graph = function.get_concrete_function(x).graph
        casts = [op for op in graph.get_operations() if op.type == "Cast"]
        found = function(x)
        assert all(each.dtype == dtype for each in found)
        return len(casts), [
            np.abs(np.subtract(tf.cast(each, "float64"), right)).mean()
            for each, right in zip(found, exact)
        ]

    (more_casts, patched), (casts, own) = errors(True), errors(False)
    assert more_casts > casts
    for ours, theirs in zip(patched, own):
        assert ours <= theirs * 1.000001


def test_float32_is_not_asked_about(monkeypatch):
    def fail(*_):
        raise AssertionError

    kernels.install()
    monkeypatch.setattr(slow, "is_slow_here", fail)
    x = tf.ones([1, 4, 4, 1])
    output_and_gradient(tf.keras.layers.Conv2D(2, 3), x)
    policy = keras_mp.Policy("mixed_float16")
    with pytest.raises(AssertionError):
        output_and_gradient(tf.keras.layers.Conv2D(2, 3, dtype=policy), x)
