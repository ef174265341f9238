"""Gradients of a scaled loss, unscaled, and computed again at half the scale if they overflow."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import MODES, assert_all_equal, mirrored, once, placed, value
from tests.steps import by_hand, by_replica, on_replicas, scaling_tape

pytestmark = once


def halves(v, factor=1.0):
    """A loss with gradients in float16, which are the scale first, and then `factor` times it."""
    return tf.cast(tf.cast(v, tf.float16) * tf.cast(factor, tf.float16), tf.float32)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_overflow_are_computed_again(mode):
    scale, v = keras_mp.DynamicLossScale(2.0**18, increment_period=2), tf.Variable(3.0)
    unused = tf.Variable(1.0)

    def gradient(factor):
        of_v, of_unused = scaling_tape(scale, lambda: halves(v, factor), [v, unused])
        assert of_unused is None
        return of_v

    gradient = placed(mode, gradient)
    for factor, expected in [(1.0, 15), (1.0, 15), (1.0, 16), (2.0, 14), (1.0, 14), (1.0, 15)]:
        assert float(gradient(tf.constant(factor))) == factor
        assert float(scale()) == 2.0**expected


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_what_nothing_helps_is_returned_and_is_one_bad_step(mode):
    scale, v = keras_mp.DynamicLossScale(2.0**20), tf.Variable(3.0)
    computed = tf.Variable(0)

    def gradient(of_gradient, of_loss):
        @tf.custom_gradient
        def spoilt(x):
            def backwards(dy):
                computed.assign_add(1)
                return dy * of_gradient

            return x * of_loss, backwards

        return scaling_tape(scale, lambda: spoilt(v), v, max_retries=3)

    gradient = placed(mode, gradient)
    assert np.isnan(gradient(tf.constant(np.nan), tf.constant(1.0)))
    assert float(scale()) == 2.0**19
    assert int(computed) == 1 + 3
    # Where the loss itself is not finite, no scale helps.
    assert np.isnan(gradient(tf.constant(np.nan), tf.constant(np.inf)))
    assert float(scale()) == 2.0**18
    assert int(computed) == 1 + 3 + 1


def test_the_floor_ends_the_search():
    scale, v = keras_mp.DynamicLossScale(2.0**18, min_loss_scale=2.0**16), tf.Variable(3.0)
    assert np.isinf(scaling_tape(scale, lambda: halves(v), v))
    assert float(scale()) == 2.0**17


def test_a_fixed_scale_stays():
    scale, v = keras_mp.FixedLossScale(2.0**18), tf.Variable(3.0)
    for given in (scale, 2.0**18, keras_mp.GradScaler(scale)):
        assert float(scaling_tape(given, lambda: halves(v), v)) == 1
    assert np.isinf(scaling_tape(scale, lambda: halves(v), v, max_retries=0))


@pytest.mark.parametrize("mode", MODES)
def test_with_a_scaler(mode):
    scaler = keras_mp.GradScaler(keras_mp.DynamicLossScale(2.0**18, increment_period=2))
    v, w = tf.Variable([4.0, 4.0]), tf.Variable(4.0)

    optimizers = [by_hand(), by_hand()]

    def step(factors):
        with keras_mp.LossScaleGradientTape(scaler, persistent=True) as tape:
            losses = [tf.reduce_sum(halves(v, factors[0])), halves(w, factors[1])]
        applied = []
        for optimizer, loss, variable in zip(optimizers, losses, (v, w)):
            gradient = tape.gradient(loss, variable)
            applied.append(scaler.step(optimizer, [(gradient, variable)]))
        scaler.update()
        return applied

    step = placed(mode, step)
    for factors, expected in [([1.0, 0.5], 15), ([0.25, 0.5], 16), ([0.5, np.nan], 14)]:
        applied = step(tf.constant(factors))
        assert [bool(each) for each in applied] == np.isfinite(factors).tolist()
        assert float(scaler.loss_scale()) == 2.0**expected
    np.testing.assert_array_equal(v.numpy(), [4 - 1.75] * 2)
    assert float(w) == 3
    assert int(scaler.steps_skipped) == 1


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_replicas_go_on_with_the_smallest_scale(mode):
    with mirrored(2).scope():
        v, scale = tf.Variable(1.0), keras_mp.DynamicLossScale(2.0**18, increment_period=2)

    gradients = on_replicas(lambda x: scaling_tape(scale, lambda: halves(v, x), v), mode)
    cases = [([1.0, 8.0], 12), ([1.0, 1.0], 12), ([1.0, 2.0], 13), ([4.0, np.nan], 12)]
    for factors, expected in cases:
        np.testing.assert_array_equal(by_replica(gradients(tf.constant(factors))), factors)
        assert float(value(scale.loss_scale)) == 2.0**expected


def test_targets_and_sources_as_of_a_tape():
    v, table, x = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([3, 2])), tf.constant(2.0)

    def record(tape):
        with tape:
            tape.watch(x)
            rows = tf.gather(table, [0, 2])
            targets = {
                "a": tf.reduce_sum(v * x),
                "b": (tf.cast(v, tf.float16), tf.reduce_sum(rows)),
            }
        sources = {"v": v, "rest": [table, x]}
        factors = {
            "a": tf.constant(3.0),
            "b": (tf.constant([1.0, 0.5], tf.float16), tf.constant(2.0)),
        }
        zero = tf.UnconnectedGradients.ZERO
        return [
            tape.gradient(targets, sources),
            tape.gradient(targets, sources, factors),
            tape.gradient(targets["a"], sources, unconnected_gradients=zero),
        ]

    ours = record(keras_mp.LossScaleGradientTape(2.0**16, persistent=True))
    plain = record(tf.GradientTape(persistent=True))
    for a, b in zip(ours, plain):
        tf.nest.assert_same_structure(a, b)
        of_ours, of_plain = tf.nest.flatten(a), tf.nest.flatten(b)
        assert [*map(type, of_ours)] == [*map(type, of_plain)]
        assert_all_equal(of_ours, of_plain)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_loop_and_rows_in_the_loss_of_a_function(jit_compile):
    scale, v = keras_mp.DynamicLossScale(2.0**18), tf.Variable(1.0)
    table = tf.Variable([1.0, 2.0])

    @tf.function(jit_compile=jit_compile)
    def gradients(count):
        with keras_mp.LossScaleGradientTape(scale) as tape:
            loss, two = tf.zeros([]), tf.constant(2.0)
            for _ in tf.range(count):
                loss += halves(v)
            if count > 1:
                loss = tf.map_fn(lambda x: x * 0.5, loss[tf.newaxis])[0]
            loss += tf.reduce_sum(tf.gather(table, [1, 1]))
            loss += tf.scan(lambda total, one: two * total + one * v, tf.ones([3]), 0.0)[-1]
        return [tf.convert_to_tensor(each) for each in tape.gradient(loss, [v, table])]

    # XLA must know how often the loop runs.
    assert_all_equal(gradients(4 if jit_compile else tf.constant(4)), [9.0, [0.0, 2.0]])
    assert float(scale()) == 2.0**16


def second_derivative(scale):
    v = tf.Variable(3.0)

    def second():
        with tf.GradientTape() as outer:
            first = scaling_tape(scale, lambda: tf.cast(tf.cast(v, "float16") ** 2, "float32"), v)
        return outer.gradient(first, v)

    return second


@pytest.mark.parametrize(("mode", "scale"), [("eager", 2.0**17), ("function", 2.0**14)])
def test_gradients_of_gradients(mode, scale):
    assert float(placed(mode, second_derivative(scale))()) == 2


def test_it_is_used_once_inside_of_its_context_too():
    v = tf.Variable(3.0)
    with keras_mp.LossScaleGradientTape("dynamic") as tape:
        loss = v**2
        assert float(tape.gradient(loss, v)) == 6
    assert [w.ref() for w in tape.watched_variables()] == [v.ref()]
    with pytest.raises(RuntimeError, match="persistent=True"):
        tape.gradient(loss, v)
    assert isinstance(tape, tf.GradientTape)


def test_wrong_arguments():
    for wrong, error in ((None, ValueError), ("fixed", ValueError), ([], TypeError)):
        with pytest.raises(error, match="loss_scale"):
            keras_mp.LossScaleGradientTape(wrong)
    with pytest.raises(ValueError, match="at least 0"):
        keras_mp.LossScaleGradientTape(1, max_retries=-1)
    with pytest.raises(TypeError, match="persistent"):
        keras_mp.LossScaleGradientTape(1, persistent=1)
    tape = keras_mp.LossScaleGradientTape(1)
    with pytest.raises(NotImplementedError, match=r"Only gradient.. scales"):
        tape.jacobian(None, None)
    with pytest.raises(NotImplementedError, match=r"Only gradient.. scales"):
        tape.batch_jacobian(None, None)
    with mirrored(2).scope(), pytest.raises(ValueError, match="replica context"):
        tape.gradient(tf.constant(1.0), [])


@pytest.mark.parametrize("devices", [1, 2])
def test_a_rare_search_stays_one_operation_where_there_is_one_device(devices, monkeypatch):
    visible = tf.config.list_logical_devices()[:devices]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: visible)
    second = tf.function(second_derivative(keras_mp.DynamicLossScale(2.0**14)))
    assert float(second()) == 2
    operations = second.get_concrete_function().graph.get_operations()
    loops = [op.get_attr("_lower_using_switch_merge") for op in operations if "While" in op.type]
    assert all(loops) == (devices > 1)
