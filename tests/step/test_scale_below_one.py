"""Loss scales below 1: for gradients that overflow float16 although the loss is not scaled up."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import MODES, compiled_model, made, mirrored, once, pairs, placed, value

V1 = tf.compat.v1
# The scaled gradient is finite up to a scale of 2**-5, which takes five steps from a scale of 1.
GRADIENT, RATE, SKIPS = 2.0**20, 2.0**-20, 5
NAN, INF = float("nan"), float("inf")


def loss_of(v, factor=1.0, weight=1.0):
    """A finite loss whose gradient, `GRADIENT` times the scale, is computed in float16."""
    return tf.cast(tf.cast(v, tf.float16) * tf.cast(factor, tf.float16), tf.float32) * (
        GRADIENT * weight
    )


def dynamic(scale=1.0, **kwargs):
    return keras_mp.DynamicLossScale(scale, **kwargs)


def sgd():
    return tf.keras.optimizers.SGD(RATE)


def step_of(kind, scale, v):
    """A step of one of `steps.KINDS`, or one with the losses of two examples."""
    loss = functools.partial(loss_of, v)
    if kind == "of examples":
        kind, loss = "minimize", lambda factor: loss_of(v, factor) * [0.25, 0.75]
    return steps.with_scale(kind, scale, loss, [v], RATE)


KINDS = [*steps.KINDS, "of examples"]


@pytest.mark.parametrize(
    ("kind", "mode", "factor"),
    [
        *zip(KINDS, itertools.repeat("eager"), itertools.cycle([NAN, INF])),
        *zip(KINDS, itertools.cycle(["function", "jit"]), itertools.cycle([INF, NAN])),
    ],
)
def test_the_scale_goes_below_1_where_only_gradients_overflow(kind, mode, factor):
    scale, v = dynamic(), tf.Variable(0.0)
    step = placed(mode, step_of(kind, scale, v))
    for _ in range(SKIPS):
        step(tf.constant(1.0))
    assert (float(scale), float(v)) == (2.0**-SKIPS, 0)
    step(tf.constant(1.0))
    assert (float(scale), float(v)) == (2.0**-SKIPS, -1)
    # A loss that is not finite never takes it there.
    scale.loss_scale.assign(4.0)
    for _ in range(4):
        step(tf.constant(factor))
    assert float(scale) == 1
    # Nor does it move a scale that is below 1 already.
    scale.loss_scale.assign(0.25)
    step(tf.constant(factor))
    assert (float(scale), float(v)) == (0.25, -1)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_loss_that_is_not_known_never_takes_it_there(mode):
    scale, v = dynamic(2.0), tf.Variable(1.0)
    optimizer = keras_mp.LossScaleOptimizer(sgd(), scale)
    compute, apply = steps.halves(optimizer, lambda: loss_of(v), [v])
    compute, apply = tf.function(compute), placed(mode, apply)
    for _ in range(3):
        apply(compute())
    assert (float(scale), float(v)) == (1, 1)


@once
@pytest.mark.parametrize("mode", MODES)
def test_a_tape_computes_again_below_1(mode):
    scale, v = dynamic(2.0), tf.Variable(1.0)

    def gradient(factor, loss_scale):
        return steps.scaling_tape(loss_scale, lambda: loss_of(v, factor), v)

    moving = placed(mode, lambda factor: gradient(factor, scale))
    assert float(moving(tf.constant(1.0))) == GRADIENT
    assert float(scale) == 2.0**-SKIPS
    fixed = placed(mode, lambda factor: gradient(factor, keras_mp.FixedLossScale(0.25)))
    assert float(fixed(tf.constant(1.0))) == GRADIENT
    scale.loss_scale.assign(2.0)
    for expected in (1, 1):
        assert np.isnan(float(moving(tf.constant(NAN))))
        assert float(scale) == expected


# Replicas.


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("kind", ["minimize", "keras_3", "scaler"])
def test_replicas_have_one_verdict(kind, mode):
    with mirrored(2).scope():
        scale, v = dynamic(), tf.Variable(0.0)
        step = step_of(kind, scale, v)
    # This factor is of the scaled gradient, before it overflows.
    run = steps.on_replicas(lambda factor: step(1.0, factor), mode)
    for factors, expected in [
        ([1.0, NAN], 1),  # the loss of one replica is not finite
        ([1.0, 0.0], 0.5),  # the gradients of one replica overflow
        ([0.0, 1.0], 0.25),
        ([NAN, 1.0], 0.25),
        ([1.0, 1.0], 0.125),
        ([1.0, 1.0], 2.0**-4),
        ([1.0, 1.0], 2.0**-5),
    ]:
        run(tf.constant(factors))
        assert float(scale) == expected
    assert value(v) == 0
    run(tf.constant([0.5, 0.25]))
    assert value(v) == -0.75


# Graphs of TensorFlow 1.


@once
@pytest.mark.parametrize(("factor", "expected"), [(1.0, 2.0**-SKIPS), (NAN, 1)])
def test_graphs_of_tensorflow_1(factor, expected):
    with tf.Graph().as_default(), V1.Session() as session:
        v, fed = tf.Variable(1.0), V1.placeholder(tf.float32, [])
        optimizer = keras_mp.compat.v1.LossScaleOptimizer(
            V1.train.GradientDescentOptimizer(RATE), dynamic()
        )
        step = optimizer.minimize(loss_of(v, fed), var_list=[v])
        session.run(V1.global_variables_initializer())
        for _ in range(SKIPS):
            session.run(step, {fed: factor})
        assert session.run([v, optimizer.loss_scale()]) == [1, expected]


# Unscaled, a gradient is larger: it may overflow now.


@once
@pytest.mark.parametrize(("mode", "dtype"), pairs(MODES, ["float32", "float16"]))
def test_what_overflows_unscaled_is_skipped(mode, dtype):
    factor = {"float32": 2.0**126, "float16": 2.0**14}[dtype]
    scale, v = dynamic(2.0**-4), tf.Variable(tf.ones([3], dtype))
    optimizer = keras_mp.LossScaleOptimizer(sgd(), scale)

    def step(factor):
        def loss():
            # The gradient is `factor` although the scale is 2**-4.
            return tf.reduce_sum(tf.cast(v, tf.float32) * (factor / scale()))

        optimizer.minimize(loss, [v])

    step = placed(mode, step)
    step(tf.constant(factor))
    assert np.array_equal(value(v), np.ones(3))
    assert int(optimizer.steps_skipped) == 1
    step(tf.constant(2.0**-10))
    assert np.isfinite(value(v)).all()
    assert int(optimizer.steps_skipped) == 1


# A fixed scale.


@once
@pytest.mark.parametrize("kind", KINDS)
def test_a_fixed_scale(kind):
    v = tf.Variable(0.0)
    step = step_of(kind, keras_mp.FixedLossScale(2.0**-SKIPS), v)
    step(tf.constant(1.0))
    assert float(v) == -1


# In `fit`.


@pytest.mark.parametrize(
    "arguments", [{"run_eagerly": True}, {"jit_compile": False}, {"jit_compile": True}], ids=str
)
def test_fit_trains(arguments):
    # The loss is 4e10 and finite; the gradient of the float16 output is 4e5.
    x, y = np.ones([1, 2], "float32"), np.full([1, 1], -2e5, "float32")
    model = made(
        lambda: compiled_model(optimizer=tf.keras.optimizers.SGD(0.01), **arguments),
        keras_mp.Policy("mixed_float16", dynamic()),
    )
    before = float(model.evaluate(x, y, verbose=0))
    for _ in range(5):
        model.train_on_batch(x, y)
    assert 2.0**-5 <= float(model.optimizer.loss_scale) < 0.25
    assert int(model.optimizer.steps_skipped) < 5
    assert float(model.evaluate(x, y, verbose=0)) < 0.95 * before
