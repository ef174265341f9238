"""Gradients are computed in the reach of the operation that they belong to."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.kernels import sums
from tests import inside
from tests.common import Mixes, differentiated, mirrored, once

K = tf.keras
ROWS = 10_000
RIGHT = 9984  # 10,000 in bfloat16
X = tf.ones([ROWS, 1], tf.bfloat16)


@pytest.fixture(autouse=True)
def wrong(in_reach, monkeypatch):
    """Outside of reach, on a machine whose kernels are all wrong."""
    inside.set_wrong(monkeypatch, sums.TABLE)
    inside.set_slow(monkeypatch, False)
    with inside.in_reach(None):
        yield


class Bias(K.layers.Layer):
    """A layer of raw operations, with one bias."""

    def build(self, shape):
        self.bias = self.add_weight(shape=[1], initializer="zeros", name="bias")
        self.built = True

    def call(self, x):
        return tf.nn.bias_add(x, tf.cast(tf.convert_to_tensor(self.bias), x.dtype))


def layer(policy=None):
    net = Bias(dtype=policy or keras_mp.Policy("mixed_bfloat16"))
    net.build([None, 1])
    return net


KERAS_OWN = (getattr(K.mixed_precision, "DTypePolicy", None) or K.mixed_precision.Policy)(
    "mixed_bfloat16"
)


def total(y):
    return tf.reduce_sum(tf.cast(y, tf.float32))


def of_bias(net, run=None):
    return differentiated(lambda: (run or net)(X), net.trainable_variables[0], total)[1]


def in_function(net):
    return tf.function(lambda: of_bias(net))()


def of_a_function(net):
    return of_bias(net, tf.function(net))


def in_a_loop(net):
    def loop(x):
        more = lambda i, y: (i + 1, y + total(net(x)))  # noqa: E731
        return tf.while_loop(lambda i, _: i < 1, more, (0, 0.0))[1]

    return tf.function(lambda: of_bias(net, loop))()


def in_a_branch(net):
    def branch(x):
        return tf.cond(tf.size(x) > 1, lambda: total(net(x)), float)

    return tf.function(lambda: of_bias(net, branch))()


def on_a_persistent_tape(net):
    with tf.GradientTape(persistent=True) as tape:
        y = net(X)
    tape.gradient(y, net.trainable_variables)
    return tape.gradient(y, net.trainable_variables)[0]


def recomputed(net):
    return of_bias(net, tf.recompute_grad(net))


def in_another_thread(net):
    with tf.GradientTape() as tape:
        y = net(X)
    found = []
    bias = net.trainable_variables[0]
    thread = threading.Thread(target=lambda: found.append(tape.gradient(y, bias)))
    thread.start()
    thread.join()
    return found[0]


def on_a_replica(net):
    strategy = mirrored(2)
    with strategy.scope():
        distributed = layer(net.dtype_policy)
    step = tf.function(lambda: strategy.run(lambda: of_bias(distributed)))
    return strategy.experimental_local_results(step())[1]


WAYS = [of_bias, in_function, of_a_function, in_a_loop, in_a_branch, on_a_persistent_tape]
WAYS += [recomputed, in_another_thread, on_a_replica]


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_of_a_layer(way):
    exact = float(way(layer())[0])
    assert exact == RIGHT
    own = tf.raw_ops.BiasAddGrad(out_backprop=X)
    for _ in range(2):  # before ours and after
        assert float(way(layer(KERAS_OWN))[0]) == float(own[0])
        assert float(way(layer())[0]) == RIGHT


@once
def test_a_session_differentiates_a_graph():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x, bias = tf.ones([ROWS, 1], tf.bfloat16), tf.zeros([1], tf.bfloat16)
        with inside.in_reach("bfloat16"):
            ours = tf.nn.bias_add(x, bias)
        gradients = [tf.gradients(y, bias) for y in (ours, tf.nn.bias_add(x, bias))]
        found = [op.type for op in tf.compat.v1.get_default_graph().get_operations()]
        assert found.count("BiasAddGrad") == 1
        assert session.run(gradients[0])[0] == RIGHT


def around(inner, policy):
    return Mixes(lambda x: inner(tf.cast(x, tf.bfloat16)), dtype=policy)


def test_a_layer_of_others_inside_of_ours_is_not_ours():
    own = float(tf.raw_ops.BiasAddGrad(out_backprop=X)[0])
    ours, theirs = layer(), layer(KERAS_OWN)
    around_theirs = around(theirs, keras_mp.Policy("mixed_bfloat16"))
    assert float(of_bias(theirs, around_theirs)[0]) == own
    assert float(of_bias(ours, around(ours, KERAS_OWN))[0]) == RIGHT


@once
def test_gradients_of_gradients():
    x, w = tf.ones([ROWS, 1], tf.bfloat16), tf.ones([1], tf.bfloat16)

    def compute():
        with inside.in_reach("bfloat16"):
            return tf.nn.bias_add(x, w) ** 2

    def second():
        return differentiated(lambda: differentiated(compute, w)[1], w)[1]

    for run in (second, tf.function(second)):
        # The gradient of a bias is 2 * (x + w), added up; the second is 2, added up.
        assert float(run()[0]) == float(tf.cast(2.0 * ROWS, tf.bfloat16))


@once
def test_a_function_has_a_trace_for_reach():
    types = []

    @tf.function
    def function(x, b):
        types.append(inside.dtype_in_reach())
        return tf.nn.bias_add(x, b)

    b = tf.zeros([1], tf.bfloat16)
    dtypes = [None, tf.bfloat16, tf.float16]
    for dtype in dtypes * 2:
        with inside.in_reach(dtype), tf.GradientTape() as tape:
            tape.watch(b)
            y = function(X, b)
        assert (float(tape.gradient(y, b)[0]) == RIGHT) == (dtype is not None)
    assert types == dtypes


def test_scopes_and_regions_are_ours():
    b = tf.zeros([1], tf.bfloat16)

    def gradient(scope):
        with tf.GradientTape() as tape:
            tape.watch(b)
            with scope:
                y = tf.nn.bias_add(X, b)
        return float(tape.gradient(y, b)[0])

    assert gradient(keras_mp.autocast_scope("bfloat16")) == RIGHT
    assert gradient(keras_mp.autocast("bfloat16")) == RIGHT
    own = float(tf.raw_ops.BiasAddGrad(out_backprop=X)[0])
    assert gradient(inside.in_reach(None)) == own
    assert gradient(keras_mp.autocast(enabled=False)) == own
    assert gradient(keras_mp.autocast_scope("float32")) == own
    with keras_mp.autocast("bfloat16"):
        assert gradient(keras_mp.autocast(enabled=False)) == own


@once
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_forward_mode_counts_what_takes_a_float32_face(policy):
    """The input of a layer has one, which is another tensor than the one that is watched."""

    def derivative(x):
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = 2 * x + tf.exp(x)
        return accumulator.jvp(y)

    x = tf.constant([[0.0, 1.0]])
    layer = Mixes(derivative, dtype=keras_mp.Policy(policy))
    for run in (layer, tf.function(layer)):
        np.testing.assert_allclose(tf.cast(run(x), tf.float32), 2 + tf.exp(x), rtol=1e-2)
