"""Loss scales below 1: for gradients that overflow float16 although the loss is not scaled up."""

import contextlib
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.compat import v1
from tests import steps
from tests.common import (
    FAMILIES,
    IS_KERAS_3,
    MODES,
    make_optimizer,
    mirrored,
    once,
    pairs,
    placed,
    value,
)
from tests.step.test_schedule import next_state_of

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

    @tf.function
    def compute():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(loss_of(v))
        return tape.gradient(loss, v)

    apply = placed(mode, lambda gradient: optimizer.apply_gradients([(gradient, v)]))
    for _ in range(3):
        apply(compute())
    assert (float(scale), float(v)) == (1, 1)


@once
@pytest.mark.parametrize("mode", MODES)
def test_one_of_several_losses_that_is_not_finite_is_enough(mode):
    scale = dynamic()
    grad_scaler = keras_mp.GradScaler(scale)
    a, b, first, second = tf.Variable(1.0), tf.Variable(1.0), sgd(), sgd()

    def step(factor):
        with tf.GradientTape(persistent=True) as tape:
            losses = grad_scaler.scale([loss_of(a), loss_of(b, factor)])
        grad_scaler.step(first, [(tape.gradient(losses[0], a), a)])
        grad_scaler.step(second, [(tape.gradient(losses[1], b), b)])
        grad_scaler.update()

    step = placed(mode, step)
    step(tf.constant(NAN))
    assert float(scale) == 1
    step(tf.constant(1.0))
    assert float(scale) == 0.5


@once
def test_the_schedule_below_1():
    schedule = next_state_of(dynamic(min_loss_scale=2.0**-2, hysteresis=2))

    def after(scale, bad, finite, loss_is_finite):
        state = keras_mp.loss_scale.LossScaleState(scale, 0, bad)
        return float(schedule(state, finite, loss_is_finite=loss_is_finite).loss_scale)

    for wrap in (lambda verdict: verdict, tf.constant):
        known, unknown = wrap(True), wrap(False)
        assert after(1.0, 0, wrap(False), known) == 1  # hysteresis
        assert after(1.0, 1, wrap(False), known) == 0.5
        assert after(0.25, 1, wrap(False), known) == 0.25
        assert after(1.5, 1, wrap(False), unknown) == 1
        assert after(0.5, 1, wrap(False), unknown) == 0.5
        assert after(0.5, 0, wrap(True), unknown) == 0.5


@once
def test_the_floor():
    scale, v = dynamic(2.0**-22), tf.Variable(1.0)
    step = step_of("minimize", scale, v)
    bad, no_gradient = tf.Variable(0.0), tf.custom_gradient(lambda x: (x * 1, lambda dy: dy * NAN))
    optimizer = keras_mp.LossScaleOptimizer(sgd(), scale)
    optimizer.minimize(lambda: no_gradient(bad), [bad])
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="has come down to its floor"):
        optimizer.minimize(lambda: no_gradient(bad), [bad])
    optimizer.minimize(lambda: no_gradient(bad), [bad])
    assert float(scale) == scale.min_loss_scale == 2.0**-24
    step(tf.constant(1.0))
    assert float(v) == 0
    # As in RFC 293.
    scale = dynamic(min_loss_scale=1.0)
    step_of("minimize", scale, v)(tf.constant(1.0))
    assert float(scale) == 1


@once
@pytest.mark.parametrize("mode", MODES)
def test_a_tape_computes_again_below_1(mode):
    scale, v = dynamic(2.0), tf.Variable(1.0)

    def gradient(factor, loss_scale):
        with keras_mp.LossScaleGradientTape(loss_scale) as tape:
            loss = loss_of(v, factor)
        return tape.gradient(loss, v)

    moving = placed(mode, lambda factor: gradient(factor, scale))
    assert float(moving(tf.constant(1.0))) == GRADIENT
    assert float(scale) == 2.0**-SKIPS
    fixed = placed(mode, lambda factor: gradient(factor, keras_mp.FixedLossScale(0.25)))
    assert float(fixed(tf.constant(1.0))) == GRADIENT
    scale.loss_scale.assign(2.0)
    for expected in (1, 1):
        assert np.isnan(float(moving(tf.constant(NAN))))
        assert float(scale) == expected


@once
@pytest.mark.parametrize(("of_loss", "expected"), [(1.0, 0.125), (NAN, 1)])
def test_a_tape_that_finds_nothing(of_loss, expected):
    scale, v = dynamic(), tf.Variable(1.0)

    @tf.custom_gradient
    def spoilt(x):
        return x * of_loss, lambda dy: dy * NAN

    for _ in range(3):
        with keras_mp.LossScaleGradientTape(scale, max_retries=1) as tape:
            loss = spoilt(tf.convert_to_tensor(v))
        assert np.isnan(float(tape.gradient(loss, v)))
    assert float(scale) == expected


# Replicas.


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("kind", ["minimize", "keras_3", "scaler"])
def test_replicas_have_one_verdict(kind, mode):
    strategy = mirrored(2)
    with strategy.scope():
        scale, v = dynamic(), tf.Variable(0.0)
        step = step_of(kind, scale, v)

    def run(factors):
        def of_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            # Unlike the other factor, this one is of the scaled gradient, before it overflows.
            step(1.0, tf.gather(factors, replica))

        strategy.run(of_replica)

    run = placed(mode, run)
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
def test_the_tapes_of_replicas_have_one_verdict():
    strategy = mirrored(2)
    with strategy.scope():
        scale, v = dynamic(), tf.Variable(1.0)

    @tf.function
    def run(factors):
        def gradient():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            with keras_mp.LossScaleGradientTape(scale, max_retries=1) as tape:
                loss = loss_of(v) * tf.gather(factors, replica)
            return tape.gradient(loss, v)

        return strategy.run(gradient)

    for factors, expected in [
        ([1.0, NAN], 1),
        ([0.0, 1.0], 0.5),
        ([2.0**-4, 2.0**-5], 0.5),
        ([0.0, 0.125], 0.25),
    ]:
        run(tf.constant(factors))
        assert float(scale) == expected


# Graphs of TensorFlow 1.


@once
@pytest.mark.parametrize(("factor", "expected"), [(1.0, 2.0**-SKIPS), (NAN, 1)])
def test_graphs_of_tensorflow_1(factor, expected):
    with tf.Graph().as_default(), V1.Session() as session:
        v, fed = tf.Variable(1.0), V1.placeholder(tf.float32, [])
        optimizer = v1.LossScaleOptimizer(V1.train.GradientDescentOptimizer(RATE), dynamic())
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


@pytest.mark.parametrize("name", FAMILIES)
def test_all_spellings_of_a_fixed_scale(name):
    def scale_of(loss_scale="dynamic", **kwargs):
        return float(
            keras_mp.LossScaleOptimizer(make_optimizer(name), loss_scale, **kwargs).loss_scale
        )

    fixed = keras_mp.FixedLossScale(0.25)
    for given in (0.25, np.float32(0.25), fixed, keras_mp.loss_scale.serialize(fixed)):
        assert scale_of(given) == 0.25
        assert float(keras_mp.Policy("mixed_float16", loss_scale=given).loss_scale) == 0.25
        assert float(keras_mp.GradScaler(given).loss_scale) == 0.25
    assert scale_of(dynamic=False, initial_scale=0.25) == 0.25
    assert scale_of(initial_scale=0.25) == 0.25
    policy = keras_mp.Policy("mixed_float16", loss_scale=1 / 16)
    assert keras_mp.Policy.from_config(policy.get_config()) == policy
    assert hash(keras_mp.Policy("mixed_float16", 1 / 16)) == hash(policy)


@once
def test_managers():
    assert float(v1.FixedLossScaleManager(0.25).get_loss_scale()) == 0.25
    manager = v1.ExponentialUpdateLossScaleManager(0.25, 100, 1, decr_ratio=0.5)
    for finite, expected in [(False, 0.25), (True, 0.25)]:
        manager.update_loss_scale(finite)
        assert float(manager.get_loss_scale()) == expected
    manager = v1.ExponentialUpdateLossScaleManager(1.5, 100, 1, decr_ratio=0.5)
    manager.update_loss_scale(False)
    assert float(manager.get_loss_scale()) == 1


@once
@pytest.mark.parametrize(
    "scale", [keras_mp.FixedLossScale(0.25), keras_mp.DynamicLossScale(0.25)], ids=repr
)
def test_tensorflow_s_own_scales_end_at_1(scale):
    with pytest.raises(ValueError, match=r"at least 1. Received: .*=0.25"):
        scale.to_compat_v1()
    assert float(keras_mp.DynamicLossScale(min_loss_scale=1).to_compat_v1()()) == 2**15


# In `fit`.


def model_that_overflows(loss_scale, **compile_arguments):
    """Its loss is 4e10 and finite; the gradient of its float16 output is 4e5."""
    policy = keras_mp.Policy("mixed_float16", loss_scale=loss_scale)
    with keras_mp.policy_scope(policy):
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(0.01), "mse", **compile_arguments)
    return model


X, Y = np.ones([1, 2], "float32"), np.full([1, 1], -2e5, "float32")


@pytest.mark.parametrize(
    "arguments", [{"run_eagerly": True}, {"jit_compile": False}, {"jit_compile": True}], ids=str
)
def test_fit_trains(arguments):
    model = model_that_overflows(dynamic(), **arguments)
    before = float(model.evaluate(X, Y, verbose=0))
    for _ in range(5):
        model.train_on_batch(X, Y)
    assert 2.0**-5 <= float(model.optimizer.loss_scale) < 0.25
    assert int(model.optimizer.steps_skipped) < 5
    assert float(model.evaluate(X, Y, verbose=0)) < 0.95 * before


def test_files_and_checkpoints_keep_it(tmp_path):
    def trained(loss_scale):
        model = model_that_overflows(loss_scale, run_eagerly=True)
        model.train_on_batch(X, Y)
        return model

    for given, expected in [(dynamic(), 0.5), (0.125, 0.125)]:
        model = trained(given)
        assert float(model.optimizer.loss_scale) == expected
        for name in ("model.keras", "model.h5"):
            with warnings_of_h5(name):
                model.save(tmp_path / name)
            loaded = tf.keras.models.load_model(tmp_path / name)
            assert float(loaded.optimizer.loss_scale) == expected
            config = loaded.optimizer.loss_scale.get_config()
            assert config == model.optimizer.loss_scale.get_config()
    model = trained(dynamic())
    path = tf.train.Checkpoint(optimizer=model.optimizer).save(str(tmp_path / "checkpoint"))
    again = model_that_overflows("dynamic", run_eagerly=True)
    again.optimizer.build(again.trainable_variables)
    tf.train.Checkpoint(optimizer=again.optimizer).restore(path).assert_existing_objects_matched()
    assert float(again.optimizer.loss_scale) == 0.5


@contextlib.contextmanager
def warnings_of_h5(name):
    # Keras 3 logs that the format is old; Keras 2 warns.
    if name.endswith(".h5") and not IS_KERAS_3:
        with pytest.warns(UserWarning, match="legacy"):
            yield
    else:
        yield


def test_a_checkpoint_of_keras_s_own_scale_below_1(tmp_path):
    own = tf.keras.mixed_precision.LossScaleOptimizer(sgd(), initial_scale=64.0)
    v = tf.Variable(1.0)
    own.build([v])
    scale = own.dynamic_scale if IS_KERAS_3 else own.loss_scale
    if IS_KERAS_3:
        scale.assign(0.25)
        layout = lambda optimizer: optimizer.keras_layout()  # noqa: E731
    else:
        own._loss_scale._current_loss_scale.assign(0.25)
        layout = lambda optimizer: optimizer  # noqa: E731
    path = tf.train.Checkpoint(optimizer=own).save(str(tmp_path / "keras"))
    optimizer = keras_mp.LossScaleOptimizer(sgd())
    optimizer.build([v])
    tf.train.Checkpoint(optimizer=layout(optimizer)).restore(path).expect_partial()
    assert float(optimizer.loss_scale) == 0.25
