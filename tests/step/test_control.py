"""A float32 model trained plainly, and the same one through loss scaling: equal to the bit.

A power-of-two scale changes exponents only, so nothing that is finite may differ. (Where XLA
compiles the step, it is one with Keras's wrapper that it equals.) One runner trains both; a case is
the way in which the step is made.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, assert_all_equal, made, pairs, placed
from tests.models import FAMILIES, classifier, digits, make_optimizer, state

STEPS = 12


class Run:
    """A small network on the digits, and an optimizer."""

    def __init__(self, optimizer):
        generator = np.random.default_rng(0)
        self.optimizer = optimizer
        self.variables = [
            tf.Variable(generator.normal(0, 0.1, shape).astype("float32"), name=f"v{i}")
            for i, shape in enumerate([(64, 16), (16,), (16, 10), (10,)])
        ]

    def loss(self, x, y):
        w1, b1, w2, b2 = self.variables
        logits = tf.nn.relu(x @ w1 + b1) @ w2 + b2
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        return tf.reduce_mean(losses)

    def train(self, way, mode):
        """Makes STEPS steps."""
        compiled = placed(mode, way(self.optimizer, self.loss, self.variables))
        images, labels = digits()
        for i in range(STEPS):
            batch = slice(32 * i, 32 * i + 32)
            compiled(tf.constant(images[batch]), tf.constant(labels[batch]))
        return self


@functools.cache
def train_control(name, mode):
    """Trains without us."""
    optimizer = make_optimizer(name)
    if mode != "jit":
        return Run(optimizer).train(steps.unscaled, mode)
    # Where an update may be skipped XLA rounds it in other places, with Keras's wrapper too.
    stock = Run(tf.keras.mixed_precision.LossScaleOptimizer(optimizer))
    stock.train(steps.keras_3 if IS_KERAS_3 else steps.rfc, mode)
    stock.optimizer = optimizer
    return stock


def assert_equal(run, control):
    found, expected = ([*each.variables, *state(each.optimizer)] for each in (run, control))
    assert_all_equal(found, expected)


def scaled(name, loss_scale="dynamic", **kwargs):
    return Run(keras_mp.LossScaleOptimizer(make_optimizer(name, **kwargs), loss_scale))


LOSS_SCALES = {
    "dynamic": lambda: "dynamic",
    "fixed": lambda: 1024,
    "growing": lambda: keras_mp.DynamicLossScale(2, increment_period=3),
}


@pytest.mark.parametrize(
    ("name", "way", "loss_scale", "mode"),
    [
        *pairs(FAMILIES, steps.WAYS, LOSS_SCALES, ["eager", "function"]),
        ("new.Adam", "rfc", "dynamic", "eager"),
        ("new.RMSprop", "rfc", "dynamic", "function"),
        (FAMILIES[-1], "rfc", "dynamic", "jit"),
    ],
)
def test_every_way_of_making_a_step(name, way, loss_scale, mode):
    run = scaled(name, LOSS_SCALES[loss_scale]()).train(steps.WAYS[way], mode)
    assert_equal(run, train_control(name, mode))
    if loss_scale == "dynamic":
        assert int(run.optimizer.loss_scale.num_good_steps) == STEPS
    # The training did something.
    assert np.abs(run.variables[0].numpy() - Run(None).variables[0].numpy()).max() > 1e-3


@pytest.mark.parametrize(
    "clip", [{"clipnorm": 0.01}, {"global_clipnorm": 0.01}, {"clipvalue": 1e-3}], ids=repr
)
@pytest.mark.parametrize("name", FAMILIES)
def test_clipping_sees_unscaled_gradients(name, clip):
    # Eager: in a graph, Keras 3's global norm is fused differently and moves by one ulp.
    control = Run(make_optimizer(name, **clip)).train(steps.unscaled, "eager")
    run = scaled(name, **clip).train(steps.keras_3, "eager")
    assert_equal(run, control)


@pytest.mark.parametrize(
    ("name", "loss_scale", "how"),
    [
        *((name, 1024, {"jit_compile": True}) for name in (FAMILIES[-1], "new.Adam")),
        ("new.Adam", "dynamic", {}),
    ],
)
def test_fit_then_own_loop_then_fit(name, loss_scale, how):
    images, labels = (each[:256] for each in digits())
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = []
    for policy in (None, keras_mp.Policy("float32", loss_scale)):
        model = made(classifier, policy)
        model.compile(make_optimizer(name), loss_fn, **how)
        assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer) == (policy is not None)
        fit = functools.partial(model.fit, images, labels, 32, shuffle=False, verbose=0)
        fit()
        way = steps.unscaled if policy is None else steps.rfc
        loss = lambda: loss_fn(labels, model(images))  # noqa: E731
        way(model.optimizer, loss, model.trainable_variables)()
        fit()
        weights.append(model.get_weights())
    assert_all_equal(*weights)
