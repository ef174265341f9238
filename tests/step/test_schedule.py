"""What the schedule of a dynamic loss scale comes to, over thousands of steps."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.step.schedule import History, LossScaleState
from tests import steps
from tests.common import MODES, once, placed

STEPS = 4000


def next_state_of(scale):
    """The pure function with the arguments of a scale."""
    arguments = scale.get_config()
    del arguments["initial_loss_scale"]
    return functools.partial(keras_mp.loss_scale.next_state, **arguments)


def run(verdict, steps=STEPS, seed=0, **kwargs):
    """Moves a scale by `verdict(step, scale, random)`; returns scales before, and the verdicts."""
    random = np.random.default_rng(seed).random(steps)
    scale = keras_mp.DynamicLossScale(**kwargs)

    @tf.function
    def moves():
        scales, verdicts = (tf.TensorArray(dtype, steps) for dtype in (tf.float32, tf.bool))
        for step in tf.range(steps):
            before = scale()
            finite = verdict(step, before, tf.constant(random, tf.float32)[step])
            scale.move(finite, True)
            scales, verdicts = scales.write(step, before), verdicts.write(step, finite)
        return scales.stack(), verdicts.stack()

    return [each.numpy() for each in moves()]


def now_and_then(every):
    return lambda step, scale, random: tf.not_equal(step % every, every - 1)


def at_random(every):
    return lambda step, scale, random: random >= 1 / every


def needs(limit, noise=0.0):
    return lambda step, scale, random: scale * tf.exp(noise * tf.math.ndtri(random)) <= limit


@once
@pytest.mark.parametrize("every", [20, 50, 300])
@pytest.mark.parametrize("kind", [now_and_then, at_random])
def test_a_bad_step_now_and_then_never_takes_the_scale_below_1(every, kind):
    scales, _ = run(kind(every), initial_loss_scale=64)
    assert scales.min() >= 1


@once
@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_gradients_that_need_a_scale_below_1_get_it(noise):
    scales, finite = run(needs(2.0**-12, noise))
    settled = slice(STEPS // 4, None)
    assert np.mean(~finite[settled]) <= 0.05
    assert np.median(scales[settled]) >= 2.0**-16
    assert noise or np.median(scales[settled]) == 2.0**-12


@once
@pytest.mark.parametrize("later", [None, 50, 20])
def test_the_scale_comes_back_after_40_bad_steps_in_a_row(later):
    def verdict(step, scale, random):
        is_good = True if later is None else now_and_then(later)(step, scale, random)
        return ((step < 100) | (step >= 140)) & is_good

    scales, finite = run(verdict, steps=1400)
    assert scales[140] < 2.0**-20
    good = np.cumsum(finite[140:])
    assert scales[140:][good <= 1000][-1] >= 1


@once
def test_a_scale_below_1_grows_once_it_may():
    def needed(step, scale, random):
        return (step >= 1500) | (scale <= 1 / 16)

    scales, finite = run(needed, steps=3500)
    assert np.median(scales[500:1500]) == 1 / 16
    assert np.mean(~finite[500:1500]) <= 0.02
    assert scales[-1] >= 1


@once
def test_a_growth_that_fails_is_tried_half_as_often_each_time():
    _, finite = run(needs(2.0**-3), initial_loss_scale=2.0**-3, steps=700)
    assert np.diff(np.flatnonzero(~finite)).tolist() == [11, 21, 41, 81, 161, 321]


@once
def test_below_1_steps_are_counted_though_a_bad_one_is_between():
    schedule = next_state_of(keras_mp.DynamicLossScale())
    state = schedule(
        LossScaleState(0.5, 6, 0), False, loss_is_finite=True, history=History(evidence=0.0)
    )
    assert [float(x) for x in state] == [0.5, 6, 1]
    # At 1 and above the RFC's rule stands.
    state = schedule(LossScaleState(1.0, 6, 0), False, history=History(evidence=0.0))
    assert [float(x) for x in state] == [1, 0, 1]


@once
def test_a_pure_function_in_every_mode():
    schedule = next_state_of(keras_mp.DynamicLossScale(tolerance=0.1))
    cases = [(2.0, 30, 0, 1.0), (0.5, 9, 0, 4.0), (1.0, 0, 3, 4.0), (0.25, 2, 1, 0.0)]

    def after(scale, good, bad, evidence, finite):
        state = LossScaleState(scale, good, bad)
        history = History(evidence=evidence, fallen_to=0.5)
        return schedule(state, finite, loss_is_finite=True, history=history)

    traced = [tf.function(after, jit_compile=jit_compile) for jit_compile in (False, True)]
    for case in cases:
        for finite in (True, False):
            expected = [float(x) for x in after(*case, finite)]
            scale, *counts, evidence = case
            arguments = scale, *np.int64(counts), evidence, finite
            arguments = [*map(tf.constant, arguments)]
            assert [[float(x) for x in run(*arguments)] for run in traced] == [expected] * 2


@once
def test_with_hysteresis_it_goes_below_1_one_step_later():
    scale = keras_mp.DynamicLossScale(1.0, hysteresis=2, min_loss_scale=0.25)
    for expected in (1, 0.5, 0.25, 0.25):
        scale.move(False, True)
        assert float(scale) == expected
    scale = keras_mp.DynamicLossScale(1.5)
    scale.move(False, False)  # which is not known to have a finite loss
    assert float(scale) == 1


@once
def test_tolerance_is_the_share_of_steps_that_may_fail():
    scales, _ = run(now_and_then(20), tolerance=0.05, steps=1000)
    assert scales.tolist() == [2.0**15] * 1000
    scales, _ = run(now_and_then(20), tolerance=0.1, steps=3000)
    assert scales[-1] == 2.0**16  # It grows as if the bad steps had not been.
    scales, _ = run(now_and_then(20), tolerance=0.04, steps=1000)
    assert scales[-1] < 2.0**15
    # A scale that is too high comes down as quickly as without it.
    scales, finite = run(needs(2.0**5), tolerance=0.2, steps=100)
    assert np.flatnonzero(~finite).tolist() == list(range(10))
    assert scales[-1] == 2.0**5


@once
def test_tolerance_with_hysteresis_needs_both():
    schedule = next_state_of(keras_mp.DynamicLossScale(tolerance=0.1, hysteresis=2))
    for bad, good, expected in [(0, 1, 64.0), (1, 1, 32.0), (1, 50, 64.0)]:
        assert float(schedule(LossScaleState(64.0, good, bad), False).loss_scale) == expected


@pytest.mark.parametrize("kind", ["minimize", "scaler", "tensorflow 1"])
@pytest.mark.parametrize("mode", MODES)
def test_tolerance_wherever_steps_are_made(kind, mode):
    scale, v = keras_mp.DynamicLossScale(64, tolerance=0.25), tf.Variable(1.0)
    step = placed(mode, steps.with_scale(kind, scale, lambda factor: v * factor, [v], 0.0))
    for _ in range(3):
        for factor in (1.0, 1.0, 1.0, float("inf")):
            step(tf.constant(factor))
    assert float(scale) == 64
    assert int(scale.num_good_steps) == 9
    step(tf.constant(float("inf")))
    assert float(scale) == 32
