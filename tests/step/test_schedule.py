"""What the schedule of a dynamic loss scale comes to, over thousands of steps."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.step.schedule import History, LossScaleState
from tests import steps
from tests.common import MODES, made, mirrored, once, pairs, placed, value
from tests.models import compiled_model
from tests.replicas import workers

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


# Scales below 1.

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


@once
@pytest.mark.parametrize("mode", MODES)
def test_a_good_step_moves_the_scale_in_its_branch_as_without_one(mode):
    one, other = (dynamic(2.0, increment_period=25, max_loss_scale=16.0) for _ in range(2))

    def step(finite):
        def good():
            one.move(True)

        def bad():
            one.move(False, True)

        tf.cond(finite, good, bad)
        other.move(finite, True)

    step, random = placed(mode, step), np.random.default_rng(0)
    seen = set()
    for i in range(200 if mode == "eager" else 800):
        step(tf.constant(bool(random.random() < (0.3 if i % 100 < 12 else 1.0))))
        states = [
            [value(x) for x in (s.loss_scale, *s._state()[1:], *s.history())] for s in (one, other)
        ]
        np.testing.assert_array_equal(*states)
        seen.add(float(one))
    assert min(seen) < 1 < max(seen)


# One device, as most machines have it.


def states_of_steps():
    """Whether conditions are put into the graph around them, and states after each step."""
    v, scale = tf.Variable(0.0), keras_mp.DynamicLossScale(8.0, increment_period=2)
    optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), scale)

    @tf.function
    def step(factor):
        optimizer.minimize(lambda: v * factor, [v])

    states = []
    for factor in (1.0, 1.0, INF, 1.0, NAN, 1.0, 1.0):
        step(tf.constant(factor))
        states.append(tuple(float(x) for x in (v, scale, *scale._state()[1:])))
    made = step.get_concrete_function(tf.constant(1.0)).graph.get_operations()
    return [op.get_attr("_lower_using_switch_merge") for op in made if op.type == "If"], states


@once
def test_a_step_where_there_is_one_device():
    expected = [(-1, 8, 1, 0), (-2, 16, 0, 0), (-2, 8, 0, 1), (-3, 8, 1, 0)]
    expected += [(-3, 4, 0, 1), (-4, 4, 1, 0), (-5, 8, 0, 0)]
    assert workers.in_own_process(states_of_steps) == ([False], expected)
    assert states_of_steps() == ([True], expected)


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
