"""Random faults on random replicas, against a control that makes only the steps without one."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import OPTIMIZERS, make_optimizer, mirrored, once, value

PATTERNS = 12
STEPS = 6
FAULTS = [np.inf, -np.inf, np.nan]
VARIABLES = ["dense", "bias", "table"]


class Training:
    """Variables of several kinds, an optimizer, and a step whose gradients can be spoiled."""

    def __init__(self, optimizer):
        self.variables = [
            tf.Variable([[0.5, -1.0], [2.0, 1.0]], name="dense"),
            tf.Variable([0.25, 0.5], name="bias"),
            tf.Variable(tf.ones([4, 2]), name="table"),
        ]
        self.optimizer = optimizer
        keras_mp.OptimizerWrapper(optimizer).build(self.variables)

    def all_variables(self):
        variables = self.optimizer.variables
        return [*self.variables, *(variables() if callable(variables) else variables)]

    def set_state(self, state):
        for variable, array in zip(self.all_variables(), state, strict=True):
            variable.assign(array)

    def gradients(self, step, factors):
        """Dense and sparse gradients of a loss of one replica; `factors` spoil single ones."""
        with tf.GradientTape() as tape:
            dense, bias, table = self.variables
            # Linear, with powers of two, so that sums over replicas are exact in float16.
            factor = tf.pow(2.0, -tf.cast(step % 4, tf.float32))
            rows = tf.reduce_sum(tf.gather(table, [step % 4, 1, step % 4]))
            loss = tf.reduce_sum(dense * [[1.0, -2.0], [0.5, 1.0]]) + tf.reduce_sum(bias) - rows
            loss = loss * factor
        gradients = tape.gradient(loss, self.variables)
        return loss, [
            tf.IndexedSlices(g.values * f, g.indices, g.dense_shape)
            if isinstance(g, tf.IndexedSlices)
            else g * f
            for g, f in zip(gradients, tf.unstack(factors))
        ]


def components(variable):
    variable = variable if isinstance(variable, tf.Variable) else variable.value
    return [v.numpy() for v in getattr(variable, "values", [variable])]


def multiplied(gradients, factor):
    return [
        tf.IndexedSlices(g.values * factor, g.indices, g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else g * factor
        for g in gradients
    ]


@pytest.mark.parametrize(
    ("name", "replicas", "xla"),
    [
        pytest.param("new.SGD", 4, None, marks=once),
        pytest.param("new.Adam", 2, None, marks=once),
        (OPTIMIZERS[-1], 2, None),
        ("new.SGD", 1, "step"),
        ("new.Adam", 1, "step"),
    ],
)
def test_random_faults(name, replicas, xla):
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        inner = make_optimizer(name)
        scale = keras_mp.DynamicLossScale(16, increment_period=3)
        ours = Training(inner)
        optimizer = keras_mp.LossScaleOptimizer(inner, scale)
        control = Training(make_optimizer(name))
    start = [value(v) for v in ours.all_variables()]

    @tf.function(jit_compile=xla == "step")
    def control_step(step):
        def replica_step():
            _, gradients = control.gradients(step, tf.ones([len(VARIABLES)]))
            control.optimizer.apply_gradients(zip(gradients, control.variables))

        strategy.run(replica_step)

    @tf.function(jit_compile=xla == "step")
    def our_step(step, factors):
        def replica_step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            loss, gradients = ours.gradients(step, tf.gather(factors, replica))
            optimizer.scale_loss(loss)
            scaled = multiplied(gradients, optimizer.loss_scale())
            optimizer.apply_gradients(zip(scaled, ours.variables))

        strategy.run(replica_step)

    generator = np.random.default_rng(replicas)
    seen = set()
    for _ in range(PATTERNS):
        for training in (ours, control):
            training.set_state(start)
        scale.loss_scale.assign(16.0)
        scale.num_good_steps.assign(0)
        skipped_before = int(optimizer.steps_skipped)
        expected, good, skipped = 16.0, 0, 0
        for step in range(STEPS):
            factors = np.ones([replicas, len(VARIABLES)], "float32")
            if generator.random() < 0.5:
                for _ in range(generator.integers(1, 4)):
                    where = generator.integers(replicas), generator.integers(len(VARIABLES))
                    fault = generator.integers(len(FAULTS))
                    factors[where] = FAULTS[fault]
                    seen.add((int(where[0]), int(where[1]), int(fault)))
            our_step(tf.constant(step), tf.constant(factors))
            if np.isfinite(factors).all():
                control_step(tf.constant(step))
                good += 1
                if good == 3:
                    expected, good = expected * 2, 0
            else:
                expected, good, skipped = expected / 2, 0, skipped + 1
            assert float(optimizer.loss_scale) == expected
            assert int(value(scale.num_good_steps)) == good
            assert int(optimizer.steps_skipped) == skipped_before + skipped
            assert bool(optimizer.last_step_skipped) == (not np.isfinite(factors).all())
            for a, b in zip(ours.all_variables(), control.all_variables(), strict=True):
                first, *others = components(a)
                np.testing.assert_array_equal(first, components(b)[0])
                for other in others:
                    np.testing.assert_array_equal(first, other)
    # Somewhere in all of this, most combinations of replica, variable and fault have been.
    assert len(seen) > 0.5 * replicas * len(VARIABLES) * len(FAULTS)
