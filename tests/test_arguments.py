"""Methods of optimizers take what those of Keras take: by keyword, by position, and in lists."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import FAMILIES, IS_KERAS_3, make_optimizer, mirrored, value
from tests.test_step_tapes import expect_same_as_in_float32, trained


def unscaling(inner):
    return keras_mp.LossScaleOptimizer(inner, loss_scale=None, skip_nonfinite=True)


WRAPPERS = [unscaling, keras_mp.OptimizerWrapper, keras_mp.AllReduceOptimizer]


def by_keyword(optimizer, pairs):
    return optimizer.apply_gradients(grads_and_vars=pairs)


def of_lists(optimizer, pairs):
    return optimizer.apply_gradients([list(pair) for pair in pairs])


def of_a_generator(optimizer, pairs):
    return optimizer.apply_gradients(grads_and_vars=(pair for pair in pairs))


def of_a_tuple(optimizer, pairs):
    return optimizer.apply_gradients(tuple(list(pair) for pair in pairs))


def by_apply(optimizer, pairs):
    gradients, variables = zip(*pairs)
    return optimizer.apply(grads=list(gradients), trainable_variables=list(variables))


WAYS = [by_keyword, of_lists, of_a_generator, of_a_tuple, *([by_apply] if IS_KERAS_3 else [])]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_gradients_are_applied_in_a_train_step_however_they_are_passed(way, is_wrapped):
    def step(model, x, y):
        optimizer = model.optimizer if is_wrapped else model.my_optimizer
        with tf.GradientTape() as tape:
            loss = model.loss_of(x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        way(optimizer, list(zip(gradients, model.trainable_variables)))
        return loss

    def run(policy):
        mode = {"optimizer": tf.keras.optimizers.SGD(1e5), "run_eagerly": True}
        return trained(step, policy, mode)

    expect_same_as_in_float32(run)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("way", [by_keyword, of_lists, of_a_generator, of_a_tuple])
def test_wrappers_apply_gradients_however_they_are_passed(way, wrapper, family):
    found = []
    for make in (lambda o: o, wrapper):
        variable = tf.Variable([1.0, 2.0])
        optimizer = make(make_optimizer(family))
        way(optimizer, [(tf.constant([0.5, -1.0]), variable)])
        found.append(value(variable))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_whether_to_sum_may_be_said_by_position(wrapper, family):
    # The third argument of legacy optimizers says the opposite of that of the others.
    is_legacy = family.startswith("legacy")
    with mirrored(2).scope():
        optimizer = wrapper(make_optimizer(family, 1.0, momentum=0.0))
        variable = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
        optimizer.build([variable])

    def step(is_to_sum):
        optimizer.apply_gradients([(tf.constant(1.0), variable)], None, is_to_sum == is_legacy)

    for is_to_sum, moved in [(True, 2.0), (False, 1.0)]:
        before = float(value(variable))
        mirrored(2).run(step, [is_to_sum])
        assert before - float(value(variable)) == moved
    with pytest.raises(TypeError, match="by keyword"):
        optimizer.apply_gradients([], None, True, True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_minimize_takes_its_arguments_by_position_in_any_order(wrapper, family):
    variable, optimizer = tf.Variable(2.0), wrapper(make_optimizer(family, 0.25, momentum=0.0))
    with tf.GradientTape() as tape:
        loss = variable**2
    optimizer.minimize(loss, [variable], None, "train", tape)  # as of legacy optimizers
    assert float(variable) == 1.0
    optimizer.minimize(lambda: variable**2, [variable], None, None, "train")
    assert float(variable) == 0.5
    if family.startswith("legacy"):
        optimizer.minimize(lambda: variable**2, [variable], tf.constant(0.5), "train")
        assert float(variable) == 0.375
    with pytest.raises(TypeError, match="given twice"):
        optimizer.minimize(loss, [variable], "train", name="train")


def test_build_takes_the_names_of_both_kerases():
    variable = tf.Variable([1.0, 2.0])
    for arguments in ({"var_list": [variable]}, {"variables": [variable]}):
        optimizer = keras_mp.LossScaleOptimizer("adam")
        optimizer.build(**arguments)
        assert len(optimizer.variables) > 2


def test_a_train_step_that_is_called_by_keyword_reports_its_inputs():
    keras_mp.set_global_policy("mixed_float16")
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x = tf.fill([2, 4], np.float32("nan"))
    model.train_step(data=(x, tf.ones([2, 1])))
    (found,) = model.optimizer.last_overflow.inputs
    assert (found.name, found.nans) == ("x", 8)
