"""Functions of tensors and variables, side by side: the operation that parts first is named."""

import itertools
import json
import math

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.numerics.comparison.compare_function import compare_function
from tests import common

pytestmark = common.once
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=[16, 8]).astype("float32")


class Net(tf.Module):
    """A few layers, an exponential moving average, and what may be done in between."""

    def __init__(self, depth, between=tf.identity, wrap=lambda variable: variable):
        super().__init__(name="net")
        sizes = [8] + [12] * depth + [1]
        self.weights = [
            wrap(tf.Variable(RANDOM.normal(size=shape).astype("float32") / 3, name="w"))
            for shape in itertools.pairwise(sizes)
        ]
        self.mean = tf.Variable(0.0, trainable=False, name="mean")
        self.between = between

    @tf.Module.with_name_scope
    def __call__(self, x):
        for weight in self.weights[:-1]:
            x = tf.nn.relu(tf.matmul(x, weight))
        x = self.between(x)
        self.mean.assign(0.9 * self.mean + 0.1 * tf.cast(tf.reduce_mean(x), tf.float32))
        return tf.matmul(x, self.weights[-1])


def loss_of(net):
    @tf.function
    def loss(x):
        return tf.reduce_mean(tf.square(tf.cast(net(x), tf.float32) - 1))

    return loss


def clean(comparison):
    assert comparison.findings == [], str(comparison)
    distances = [
        d for row in comparison.layers for d in (row.output, row.gradient) if d is not None
    ]
    assert max(distance.units for distance in distances) < 4, str(comparison)
    return comparison


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_net_of_variables_is_sound(dtype):
    net = Net(8)
    before = [variable.numpy() for variable in net.variables]
    comparison = clean(compare_function(loss_of(net), X, dtype=dtype, variables=net))
    kinds = {row.path: row for row in comparison.layers}
    assert kinds["net/MatMul_8"].dtype == dtype
    assert kinds["net/MatMul_8"].output.relative > 0
    assert kinds["w_3"].kind == "variable"
    assert 0 < kinds["w_3"].gradient.relative < 1
    assert kinds["argument 0"].gradient is not None
    assert kinds["result 0"].output.relative > 0
    for variable, value in zip(net.variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_variables_that_are_cast_in_a_scope():
    net = Net(3, wrap=keras_mp.autocast_variable)

    def loss(x):
        return loss_of(net)(tf.cast(x, net.weights[0].dtype))

    comparison = clean(compare_function(loss, X, context=keras_mp.autocast_scope))
    assert comparison.layers[0].dtype == "float16"


def test_a_long_chain_without_variables_drifts_and_is_sound():
    def loss(x, dtype):
        x = tf.cast(x, dtype)
        for _ in range(100):
            x = x + 0.01 * tf.sin(x)
        return tf.reduce_sum(x)

    comparison = compare_function(
        lambda x: loss(x, tf.float16), X, context=None, reference=lambda x: loss(x, tf.float32)
    )
    assert comparison.findings == [], str(comparison)


def epsilon_of_zero(x):
    norm = tf.reduce_sum(x * x, -1, keepdims=True)
    return x * tf.math.rsqrt(norm * 0 + tf.constant(1e-8, x.dtype)) * 1e-4


def square(x):
    return tf.sqrt(tf.square(x * 400) + 1) / 400


def shifted(x):
    return (x + 3000) - 3000


@pytest.mark.parametrize(
    ("defect", "what"),
    [
        (epsilon_of_zero, "a constant of 1e-08, which is 0 in float16"),
        (square, "Overflow: Square reaches"),
        (shifted, "Cancellation: Sub of numbers of about 3e+03"),
    ],
)
def test_a_planted_defect_is_named(defect, what):
    def scoped(x):
        with tf.name_scope("planted"):
            return defect(x)

    net = Net(2, scoped, wrap=keras_mp.autocast_variable)

    def loss(x):
        return loss_of(net)(tf.cast(x, net.weights[0].dtype))

    comparison = compare_function(loss, X, variables=net, context=keras_mp.autocast_scope)
    first = comparison.findings[0]
    assert first.path.startswith("net/planted/")
    assert (first.hazard, len(comparison.findings)) == ("a difference in the forward pass", 1)
    assert what in first.why
    assert " (test_compare_function.py:" in first.where
    assert "net/planted/" in str(comparison)
    assert json.loads(comparison.to_json())["findings"][0]["where"] == first.where


def test_a_defect_on_the_way_back_is_named():
    @tf.custom_gradient
    def small(x):
        return tf.identity(x), lambda d: d * tf.constant(1e-9, d.dtype) * 1e4 * 1e5

    w = tf.Variable(X[:8, :8], name="w")

    def loss(x, dtype):
        y = small(tf.matmul(tf.cast(x, dtype), tf.cast(w, dtype)))
        return tf.reduce_sum(tf.cast(y, tf.float32) ** 2)

    comparison = compare_function(
        lambda x: loss(x, tf.float16), X, context=None, reference=lambda x: loss(x, tf.float32)
    )
    first = comparison.findings[0]
    assert (first.path, first.hazard) == ("MatMul", "a difference in the backward pass")
    assert "a constant of 1e-09, which is 0 in float16" in first.why


def test_a_gradient_that_is_zero_but_for_rounding():
    model = tf.keras.Sequential([tf.keras.Input([8]), tf.keras.layers.Dense(8)])
    model.add(tf.keras.layers.BatchNormalization())
    model.add(tf.keras.layers.Dense(1))
    model.set_weights([np.resize(X, w.shape) + 1 for w in model.get_weights()])

    def loss(x):
        return model(x, training=True)

    assert compare_function(loss, X).findings == []


def test_both_draw_the_same_numbers():
    w = tf.Variable(X[:8, :8])

    def loss(x):
        return tf.nn.dropout(x @ w, 0.5) + tf.random.normal([16, 8])

    clean(compare_function(loss, X, variables=[w]))


@pytest.mark.parametrize("read", [tf.identity, lambda w: tf.gather(w, tf.range(8))])
def test_variables_are_put_back(read):
    w = tf.Variable(X[:8, :8])

    def loss(x):
        y = x @ read(w)
        w.assign(w * 1.5)
        w.assign_add(w)
        return y

    for variables in (None, [w]):
        clean(compare_function(loss, X, variables=variables))
        np.testing.assert_array_equal(w.numpy(), X[:8, :8])

    def fails(x):
        raise RuntimeError(loss(x))

    with pytest.raises(RuntimeError):
        compare_function(fails, X)
    np.testing.assert_array_equal(w.numpy(), X[:8, :8])


def test_the_loss_scale_falls_until_nothing_overflows():
    w = tf.Variable(X[:8, :8])
    comparison = clean(compare_function(lambda x: tf.reduce_sum(x @ w) * 1e2, X))
    assert 1 <= comparison.loss_scale < 2**15
    assert compare_function(lambda x: x @ w, X).loss_scale == 2.0**15


def test_what_cannot_be_compared():
    w = tf.Variable(X[:8, :8])
    with pytest.raises(ValueError, match="computes nothing in 16 bits"):
        compare_function(lambda x: tf.exp(x) * w[0], X)
    traced = tf.function(lambda x: x @ w).get_concrete_function(X)
    with pytest.raises(ValueError, match="A concrete function"):
        compare_function(traced, X)
    with pytest.raises(ValueError, match="Expected <lambda> to return floating-point tensors"):
        compare_function(lambda x: tf.argmax(x @ w), X)
    with pytest.raises(ValueError, match="Received: dtype='float32'"):
        compare_function(lambda x: x @ w, X, dtype="float32")
    for variables in ({"w": w}, [3], 3, w, X):
        with pytest.raises(TypeError, match=r"Expected a tf.Module or an iterable of variables\."):
            compare_function(lambda x: x @ w, X, variables=variables)
    nothing = compare_function(lambda x: x @ w, X * math.nan)
    assert not nothing.is_judged
