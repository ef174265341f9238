"""What a GradScaler keeps of calls, beside the table in `test_contract.py`."""

import copy
import functools
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import once, placed

pytestmark = once


def sgd(pairs):
    for gradient, v in pairs:
        v.assign_sub(gradient)


@pytest.mark.parametrize("mode", ["eager", "functions"])
def test_gradients_that_were_not_finite_when_they_were_unscaled_are_skipped_elsewhere(mode):
    scaler, v = keras_mp.GradScaler(keras_mp.DynamicLossScale(4)), tf.Variable(8.0)
    where = (lambda f: f) if mode == "eager" else tf.function
    scale = where(lambda factor: scaler.scale(factor))
    unscale = where(lambda gradient: tf.clip_by_value(scaler.unscale([gradient], sgd)[0], -1, 1))
    step = where(lambda gradient: scaler.step(sgd, [(gradient, v)]))
    update = where(scaler.update)
    for factor, made in ((1.0, True), (np.inf, False), (1.0, True)):
        scaled = scale(tf.constant(factor))
        assert bool(step(unscale(scaled))) == made
        update()
    assert float(v) == 6
    assert float(scaler.loss_scale()) == 2


@pytest.mark.parametrize("calls", [[], ["unscale"], ["step"]], ids=" ".join)
def test_update_begins_anew_with_the_scale_that_it_has(calls):
    scaler, v = keras_mp.GradScaler("dynamic"), tf.Variable(8.0)
    gradient, scale = tf.constant(2.0**15), scaler.loss_scale()
    step = lambda: scaler.step(sgd, [(gradient, v)])  # noqa: E731
    if calls:
        scaler.scale(v)
    if calls == ["unscale"]:
        scaler.unscale([gradient], sgd)
    if calls == ["step"]:
        step()
    before = float(v)
    scaler.update(scale)
    scaler.scale(v)
    step()
    scaler.update()
    assert float(v) == before - 1
    assert float(scaler.loss_scale()) == 2.0**15


def test_an_update_without_a_step_is_an_error_that_leaves_the_step_as_it_was():
    scaler, v = keras_mp.GradScaler(4), tf.Variable(8.0)
    scaler.scale(v)
    with pytest.raises(ValueError, match="without a step"):
        scaler.update()
    scaler.step(sgd, [(tf.constant(4.0), v)])
    scaler.update()
    assert float(v) == 7


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_the_scale_of_functions_that_are_not_traced_again_is_known(mode):
    scale = keras_mp.DynamicLossScale(4, increment_period=1)
    scaler, v = keras_mp.GradScaler(scale), tf.Variable(8.0)
    scale_it = tf.function(lambda: scaler.scale(v / v))
    update = tf.function(scaler.update) if mode == "eager" else scaler.update

    def steps():
        for of_function in (True, False, True, True, True):
            gradient = scale_it() if of_function else scaler.scale(v / v)
            scaler.step(sgd, [(gradient, v)])
            update()

    placed(mode, steps)()
    assert float(v) == 3
    assert float(scale()) == 4 * 2.0**5
    assert len(scaler._step_calls.current().step.losses) <= 1


class Rule:
    def update(self, pairs):
        sgd(pairs)


def test_a_second_optimizer_after_one_was_left_out_is_an_error():
    scaler, v, first = keras_mp.GradScaler(4), tf.Variable(8.0), Rule()
    scaler.scale(v)
    gradients = scaler.unscale([tf.constant(4.0)])
    scaler.step(first.update, zip(gradients, [v]))
    with pytest.raises(ValueError, match="there are several"):
        scaler.step(Rule().update, zip(gradients, [v]))


def test_methods_are_told_apart_by_their_objects():
    scaler, v, a, b = keras_mp.GradScaler(1), tf.Variable(8.0), Rule(), Rule()
    scaler.scale(v)
    for rule in (a, b):
        scaler.step(rule.update, [(tf.constant(1.0), v)])
    assert float(v) == 6
    with pytest.raises(ValueError, match="Call update.. once"):
        scaler.step(a.update, [(tf.constant(1.0), v)])
    with pytest.raises(ValueError, match="there are several"):
        scaler.unscale([tf.constant(1.0)])
    scaler.step(Rule().update, [(tf.constant(1.0), v)])  # as if that had not been called


def test_functions_that_are_made_anew_each_time_and_are_gone_have_made_their_steps():
    scaler, v = keras_mp.GradScaler(4), tf.Variable(100.0)
    for unscales in [True, False] * 10:
        scaler.scale(v)
        gradients = [tf.constant(4.0)]
        gradients = scaler.unscale(gradients) if unscales else gradients
        for _ in range(1 if unscales else 3):
            assert bool(scaler.step(lambda pairs: sgd(pairs), zip(gradients, [v])))
        scaler.update()
    assert float(v) == 100 - 10 * (1 + 3)


def test_neither_functions_nor_optimizers_are_kept_alive():
    scaler, v = keras_mp.GradScaler(4), tf.Variable(8.0)

    def references():
        optimizer = functools.partial(sgd)

        def step():
            scaler.scale(v)
            scaler.step(optimizer, [(tf.constant(4.0), v)])
            scaler.update()

        graph = tf.function(step).get_concrete_function().graph
        return weakref.ref(graph), weakref.ref(optimizer)

    references = references()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_copies_begin_anew():
    scaler, v = keras_mp.GradScaler(2), tf.Variable(8.0)
    scaler.scale(v)
    copied = copy.deepcopy(scaler)
    with pytest.raises(ValueError, match="no loss was scaled"):
        copied.step(sgd, [(tf.constant(2.0), v)])
    scaler.step(sgd, [(tf.constant(2.0), v)])
    assert float(v) == 7
    copied = copy.deepcopy(keras_mp.GradScaler())
    copied.scale(v)
    copied.step(sgd, [(tf.constant(np.inf), v)])
    copied.update()
    assert bool(copied.last_step_skipped)
    assert not bool(scaler.last_step_skipped)


def test_loops_of_a_function():
    scaler, v = keras_mp.GradScaler(keras_mp.DynamicLossScale(4, 2)), tf.Variable(8.0)

    @tf.function
    def steps(factors):
        for factor in factors:
            with tf.GradientTape() as tape:
                loss = scaler.scale(v * factor)
            gradients = scaler.unscale([tape.gradient(loss, v)])
            if factor != 0:
                scaler.step(sgd, zip(gradients, [v]))
            else:
                scaler.step(sgd, [(gradients[0] + 1, v)])
            scaler.update()

    steps(tf.constant([1.0, 0.0, np.nan, 0.5]))
    assert float(v) == 5.5
    assert float(scaler.loss_scale()) == 4
    assert int(scaler.steps_skipped) == 1


def test_gradients_that_a_function_has_unscaled_are_not_multiplied_again():
    # The function does not know what was called before it, but knows that much.
    scaler, v = keras_mp.GradScaler(), tf.Variable(tf.zeros([64, 64]))

    @tf.function
    def step(gradient):
        scaler.scale(tf.constant(1.0))
        gradients = scaler.unscale([gradient])
        scaler.step(sgd, zip(gradients, [v]))
        scaler.update()

    graph = step.get_concrete_function(tf.TensorSpec([64, 64])).graph
    products = [op for op in graph.get_operations() if op.type == "Mul"]
    assert len([op for op in products if op.outputs[0].shape == [64, 64]]) == 1
