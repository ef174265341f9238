import sys
import threading

import pytest
import tensorflow as tf

import keras_mp
from tests.common import mirrored, once, value
from tests.models import FAMILIES, make_optimizer


def branches(x):
    if x > 0:  # Only AutoGraph makes this work in a graph.
        return x
    return -x


def converted_names(function, *args):
    """Names of the functions that AutoGraph has converted and that a call runs."""
    names = set()

    def look(frame, event, arg):
        del arg
        code = frame.f_code
        if event == "call" and "__autograph_generated_file" in code.co_filename:
            names.add(code.co_name)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {name for name in names if name.startswith("tf__")}


@pytest.mark.parametrize("strategy", [None, "mirrored"])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_function_of_keras_mp_is_converted_in_a_step(name, strategy):
    strategy = mirrored(2) if strategy else tf.distribute.get_strategy()
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])
        optimizer = keras_mp.LossScaleOptimizer(make_optimizer(name))
        outer = keras_mp.OptimizerWrapper(make_optimizer(name))
        scaler = keras_mp.GradScaler()
        for each in (optimizer, outer):
            each.build([v])

    def update(pairs):
        for gradient, variable in pairs:
            variable.assign_sub(0.5 * gradient)

    def replica_step():
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(v)
            losses = optimizer.get_scaled_loss(loss), scaler.scale(loss)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(losses[0], [v]))
        optimizer.apply_gradients(zip(gradients, [v]))
        optimizer.minimize(lambda: tf.reduce_sum(v), [v])
        outer.apply_gradients([(tf.ones([2]), v)])
        scaler.step(update, [(tape.gradient(losses[1], v), v)])
        scaler.update()

    @tf.function
    def step():
        strategy.run(replica_step)

    names = converted_names(step)
    assert names - {"tf__lam"} == {"tf__step", "tf__replica_step", "tf__update"}


@once
@pytest.mark.parametrize("strategy", [None, "mirrored"])
def test_what_a_user_gave_keras_mp_to_call_is_converted(strategy):
    strategy = mirrored(2) if strategy else tf.distribute.get_strategy()
    with strategy.scope():
        v = tf.Variable(-2.0)
        optimizer = keras_mp.LossScaleOptimizer(make_optimizer(FAMILIES[0], 0.25, momentum=0.0))
        optimizer.build([v])
        scaler = keras_mp.GradScaler()

    def update(pairs):
        [(gradient, variable)] = pairs
        if gradient > 0:
            variable.assign_sub(gradient)
        else:
            variable.assign_add(0.5)

    class Lists:
        def apply(self, updates, parameters):
            update(list(zip(updates, parameters)))

    def replica_step():
        optimizer.minimize(lambda: branches(tf.convert_to_tensor(v)) / 2, [v])
        for rule in (update, Lists()):
            scaler.step(rule, [(scaler.scale(-0.5), v)])
        scaler.update()

    @tf.function
    def step():
        strategy.run(replica_step)

    step()
    # The gradient of |v| / 2, twice where two replicas add up; then twice a half.
    assert float(value(v)) == -2 + 0.125 * strategy.num_replicas_in_sync + 1.0
