"""Methods of optimizers take what those of Keras take: by keyword, and in lists."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import FAMILIES, IS_KERAS_3, make_optimizer, value
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


def test_build_takes_the_names_of_both_kerases():
    variable = tf.Variable([1.0, 2.0])
    for arguments in ({"var_list": [variable]}, {"variables": [variable]}):
        optimizer = keras_mp.LossScaleOptimizer("adam")
        optimizer.build(**arguments)
        assert len(optimizer.variables) > 2


def test_a_train_step_that_is_called_by_keyword_knows_its_batch():
    keras_mp.set_global_policy("mixed_float16")
    model = tf.keras.Sequential(
        [tf.keras.Input((4,)), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", run_eagerly=True)
    model.train_step(data=(tf.ones([2, 4]), tf.ones([2, 1])))
    model.train_step(data=(tf.ones([0, 4]), tf.ones([0, 1])))
    assert [loss.kind for loss in model.optimizer.last_overflow.losses] == ["no examples"]
