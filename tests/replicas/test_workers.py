"""Several machines: real worker processes, which reach each other over 127.0.0.1.

To start them takes longer than what they do, so they run what several tests look at.
"""

import contextlib
import functools
import os
import re
import signal
import time
import warnings
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.step import workers as workers_module
from tests import steps
from tests.common import IS_KERAS_3, assert_all_equal, once, value
from tests.models import FAMILIES, digits, make_optimizer
from tests.replicas import workers
from tests.replicas.test_distribution import collective_dtypes
from tests.replicas.test_fit import check_uneven
from tests.replicas.test_fit import uneven as uneven_shares
from tests.step.test_overflows import Program, expected_of, said, spoil

# What each worker's loss is multiplied by, step by step: the first worker's, then the others'.
FACTORS = [(1, 1), (1, np.inf), (np.nan, 1), (1, 1), (2, 1), (1, -np.inf)]


def own_model():
    """Variables, and a loss of a factor."""
    dense, table = tf.Variable([[0.5], [-1.0]]), tf.Variable(tf.ones([4, 2]))

    def loss(factor):
        rows = tf.gather(table, [1, 3, 1])
        return (tf.reduce_sum(dense * [[1.0], [0.25]]) + tf.reduce_sum(rows)) * factor

    return [dense, table], loss


def own_loop(strategy, index, name, in_float16):
    """An own loop in which single workers compute losses that are not finite."""
    with strategy.scope():
        variables, loss = own_model()
        # As the moving statistics of a normalization: each worker has its own.
        statistic = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )
        optimizer = keras_mp.LossScaleOptimizer(
            make_optimizer(name, 0.125, momentum=0.5),
            keras_mp.DynamicLossScale(64, increment_period=2),
            aggregate_in_float16=in_float16,
        )
        optimizer.build(variables)

    make = steps.rfc(optimizer, loss, variables)

    def replica_step(factor):
        with keras_mp.training_step(statistic):
            statistic.assign_add(factor)
            make(factor)

    step = tf.function(lambda factor: strategy.run(replica_step, (factor,)))
    seen = []
    for factors in FACTORS:
        step(tf.constant(factors[min(index, 1)], tf.float32))
        seen.append(
            {
                "variables": [value(v) for v in [*variables, *optimizer.variables]],
                "scale": float(optimizer.loss_scale),
                "good": int(value(optimizer.loss_scale.num_good_steps)),
                "skipped": int(optimizer.steps_skipped),
                "last": bool(optimizer.last_step_skipped),
                "statistic": float(strategy.experimental_local_results(statistic)[0]),
            }
        )
    return seen, collective_dtypes(step, tf.constant(1.0))


def control_loop(name, count):
    """One device that computes the sum of what the workers do, in the steps without a fault."""
    variables, loss = own_model()
    optimizer = make_optimizer(name, 0.125, momentum=0.5)
    keras_mp.OptimizerWrapper(optimizer).build(variables)
    step, seen = steps.unscaled(optimizer, loss, variables), []
    for first, others in FACTORS:
        factor = float(first + (count - 1) * others)
        if np.isfinite(factor):
            step(factor)
        own = optimizer.variables
        seen.append([value(v) for v in [*variables, *(own() if callable(own) else own)]])
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_one_bad_worker_skips_the_step_on_all(together, name):
    in_float16 = name == FAMILIES[0]
    check_own_loop(together[f"own loop, {name}"], name, 2, in_float16)


@once
def test_three_workers_skip_a_step_of_one_and_share_a_batch_unevenly():
    name = FAMILIES[0]
    calls = [(own_loop, {"name": name, "in_float16": False}), (uneven_shares, {})]
    of_loop, of_shares = workers.run(calls, 3)
    check_own_loop(of_loop, name, 3, in_float16=False)
    check_uneven(of_shares)


def check_own_loop(results, name, count, in_float16):
    control = control_loop(name, count)
    for index, (seen, sent) in enumerate(results):
        statistics = [1, 1, 1, 2, 3, 3] if index else [1, 1, 1, 2, 4, 4]
        assert [s["statistic"] for s in seen] == statistics
        assert ("float16" in sent) == in_float16
        assert [s["scale"] for s in seen] == [64, 32, 16, 16, 32, 16]
        assert [s["good"] for s in seen] == [1, 0, 0, 1, 0, 0]
        assert [s["skipped"] for s in seen] == [0, 1, 2, 2, 2, 3]
        assert [s["last"] for s in seen] == [False, True, True, False, False, True]
        for ours, expected in zip(seen, control, strict=True):
            assert_all_equal(ours["variables"], expected)


def bfloat16_loop(strategy, index):
    """Large and small gradients, dense and sparse ones, summed in bfloat16."""
    with strategy.scope():
        small, large = tf.Variable(0.0), tf.Variable(tf.zeros([2**21 + 1]))
        table = tf.Variable([[0.0]])
        variables = [small, large, table]
        optimizer = keras_mp.AllReduceOptimizer(make_optimizer(FAMILIES[-1], 1.0, momentum=0.0))
        optimizer.build(variables)

    def loss(factor):
        rows = tf.gather(table, [0] if index else [0, 0])
        return (tf.reduce_sum(large) + small + tf.reduce_sum(rows)) * factor

    make = steps.minimize(optimizer, loss, variables)
    step = tf.function(lambda factor: strategy.run(make, (factor,)))
    step(tf.constant([1 + 2.0**-9, 1 + 2.0**-6 + 2.0**-9][index]))
    moved = [value(small), set(value(large)), value(table).tolist()]
    return moved, collective_dtypes(step, tf.constant(1.0))


@once
def test_workers_sum_in_bfloat16(together):
    for moved, sent in together["bfloat16"]:
        total = -(2 + 2.0**-6)
        # Rows are rounded one by one, and added in float32.
        assert moved == [total, {total}, [[-(3 + 2.0**-6)]]]
        assert sent == {"bfloat16"}


class Left(Exception):
    """`fit` ends early, on all workers."""


def fit(strategy, index, name, folder, leave_in_epoch=None, die=False):
    """`fit` of a compiled model, of which one worker's data hold an Inf in one batch."""
    folder = os.path.join(folder, name)
    images, labels = digits()
    images, labels = images[:128].copy(), labels[:128]
    images[40] = np.inf
    keras_mp.set_global_policy(keras_mp.Policy("float32", loss_scale="dynamic"))
    with strategy.scope():
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(10)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make_optimizer(name), loss)
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(32)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    begun = []

    class Die(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            scale = model.optimizer.loss_scale
            begun.append((epoch, float(scale), int(value(scale.num_good_steps))))
            if epoch == leave_in_epoch and not die:
                raise Left
            if epoch == leave_in_epoch and index == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    backup = tf.keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"))
    with contextlib.suppress(Left):
        model.fit(data.with_options(options), epochs=4, verbose=0, callbacks=[backup, Die()])
    optimizer = model.optimizer
    return (
        begun,
        model.get_weights(),
        float(optimizer.loss_scale),
        int(optimizer.steps_skipped),
        int(value(optimizer.iterations)),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_fit_and_backup_and_restore(name, together, resumed):
    whole = together[f"fit, {name}"]
    # Four batches an epoch; one of them was skipped, on both workers.
    for begun, weights, scale, skipped, iterations in whole:
        assert [b[1] for b in begun] == [2**15, 2**14, 2**13, 2**12]
        assert (scale, skipped, iterations) == (2**11, 4, 12)
        assert np.isfinite(weights[0]).all()
        np.testing.assert_array_equal(weights[0], whole[0][1][0])
    for again, before in zip(resumed[name], whole, strict=True):
        assert again[0] == before[0][2:]
        assert again[2:4] == before[2:4]
        assert_all_equal(again[1], before[1])


def scaler_loop(strategy, index):
    """A scaler under which one worker overflows, and a tape that tries again."""
    with strategy.scope():
        v, optimizer = tf.Variable(8.0), make_optimizer(FAMILIES[0], 0.25, momentum=0.0)
        scaler = keras_mp.GradScaler(keras_mp.DynamicLossScale(2.0**18, increment_period=2))
        keras_mp.OptimizerWrapper(optimizer).build([v])

    def rounded(factor):
        return tf.cast(tf.cast(v, tf.float16) * factor, tf.float32)

    def apply(pairs):
        scaler.step(optimizer, pairs)
        scaler.update()

    def on_workers(make):
        return tf.function(lambda factor: strategy.run(make, (factor,)))

    tape = functools.partial(keras_mp.LossScaleGradientTape, scaler)
    with_tape = on_workers(steps.taped(rounded, [v], apply, tape=tape))
    loss = lambda factor: v * tf.cast(factor, tf.float32)  # noqa: E731
    plain = on_workers(steps.scaler(scaler, optimizer, loss, [v]))
    seen = []
    for step, *factors in ((plain, 0.0625, np.inf), (plain, 0.0625, 0.0625), (with_tape, 0.5, 4.0)):
        step(tf.constant(factors[index], tf.float16))
        seen.append((float(value(v)), float(scaler.loss_scale())))
    return seen, int(scaler.steps_skipped)


@once
def test_workers_share_a_scaler(together):
    for seen, skipped in together["scaler"]:
        assert seen == [(8.0, 2.0**17), (7.96875, 2.0**17), (6.84375, 2.0**13)]
        assert skipped == 1


# TensorFlow sends initial values to all workers, which it cannot with bfloat16 and int16.
METHODS = {"copy": "float16", "stochastic_rounding": "float16", None: "float32"}


def weights_in_16_bits(strategy, index, method, name):
    """The float32 weight that each worker ends with, the weight and the optimizer's variables."""
    with strategy.scope():
        v = tf.Variable(tf.ones([64], METHODS[method]))
        optimizer = make_optimizer(name, 1e-3)
        if method is not None:
            # Without a seed, which each worker would draw for itself.
            optimizer = keras_mp.MasterWeightOptimizer(optimizer, method)
        optimizer.build([v])

    @tf.function
    def step(factor):
        gradient = lambda: tf.cast(tf.linspace(1.0, 2.0, 64) * factor, v.dtype)  # noqa: E731
        strategy.run(lambda: optimizer.apply_gradients([(gradient(), v)]))

    for i in range(6):
        step(tf.constant(2.0 ** (index + i)))
    kept = [*optimizer.float32_weights(), v, *optimizer.variables] if method else [v]
    return [value(each) for each in kept]


def test_weights_in_16_bits_are_the_same_on_all_workers_and_train_as_float32(together):
    for method in METHODS:
        first, second = together[f"weights in 16 bits, {method}"]
        assert_all_equal(first, second)
        assert (first[0] != 1).any()
    in_16_bits, in_32 = (together[f"weights in 16 bits, {method}"][0] for method in ("copy", None))
    np.testing.assert_array_equal(in_16_bits[0], in_32[0])


PATTERNS = 8


def overflowing_loop(strategy, index):
    """A loop in which single workers overflow, in all of their steps but the first of two."""
    del index
    program = Program(strategy=strategy)
    seen = []
    for values in patterns(program):
        program.step(program.good())
        program.step(values)
        overflow = program.optimizer.last_overflow
        places = [(loss.place.replica, loss.place.worker) for loss in overflow.losses]
        seen.append((said(overflow), overflow.step, overflow.steps_skipped, places))
    eager = Program("eager", strategy=strategy)
    values = next(patterns(eager))
    eager.step(values)
    return seen, said(eager.optimizer.last_overflow)


def patterns(program):
    """What the workers' losses and gradients are, the same on each of them."""
    rng = np.random.default_rng(0)
    for _ in range(PATTERNS):
        values = program.good()
        spoil(values, rng)
        yield values


@once
def test_each_worker_says_what_overflowed_on_another(together):
    wanted = [expected_of(values) for values in patterns(Program(replicas=2))]
    places = [(0, 0), (1, 1)]
    for seen, eager in together["overflowing"]:
        assert seen == [(each, 2 * n, n, places) for n, each in enumerate(wanted, 1)]
        assert eager == wanted[0]


SUMS = ["float32", "bfloat16"]
# The optimizers of two workers that differ, and what both are told.
UNEVEN = {
    "periods": (
        lambda inner, index: keras_mp.LossScaleOptimizer(
            inner, keras_mp.DynamicLossScale(increment_period=2 + index)
        ),
        ["increment_period=2,", "increment_period=3,"],
    ),
    "scales that were assigned": (
        lambda inner, index: keras_mp.LossScaleOptimizer(inner),
        ["loss_scale=8.0", "loss_scale=16.0"],
    ),
    "sums": (
        lambda inner, index: keras_mp.LossScaleOptimizer(inner, 64, reduce_dtype=SUMS[index]),
        ["reduce_dtype", "bfloat16"],
    ),
    "sums where nothing is scaled": (
        lambda inner, index: keras_mp.AllReduceOptimizer(inner, SUMS[index]),
        ["reduce_dtype: worker 0: float32; worker 1: bfloat16"],
    ),
    "policies": (
        lambda inner, index: keras_mp.LossScaleOptimizer(inner, 64),
        ["global policy", "float64"],
    ),
}


def told(first_step, v):
    """What the first step of workers that differ raises, after how long, and the weight."""
    began = time.monotonic()
    try:
        first_step()
    except ValueError as error:
        return str(error), time.monotonic() - began, float(value(v))


def uneven_loop(strategy, index, kind, in_function, name):
    """Workers of which each has something else."""
    keras_mp.set_global_policy(["float64", "float32"][index] if kind == "policies" else None)
    with strategy.scope():
        v = tf.Variable(1.0)
        optimizer = UNEVEN[kind][0](make_optimizer(name), index)
        optimizer.build([v])
    if kind == "scales that were assigned":
        optimizer.loss_scale.loss_scale.assign([8.0, 16.0][index])

    def step():
        strategy.run(lambda: optimizer.minimize(lambda: 2 * v, [v]))

    return told(tf.function(step) if in_function else step, v)


def scales_on_one_worker(strategy, index, has_wrapper):
    """A worker that scales no loss beside one that does, with a wrapper or without."""
    with strategy.scope():
        v = tf.Variable(1.0)
        # Both on both, since TensorFlow sends the first values of variables to all workers.
        wrapper, bare = (
            keras_mp.LossScaleOptimizer(make_optimizer(FAMILIES[0]), 64, reduce_dtype="float32"),
            keras_mp.AllReduceOptimizer(make_optimizer(FAMILIES[0]), "float32"),
        )
        for each in (wrapper, bare):
            each.build([v])
    optimizer = wrapper if has_wrapper or index == 0 else bare

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = 2 * v
            if index == 0:
                loss *= optimizer.loss_scale()
        kind = {"scaled": index == 0} if has_wrapper or index == 0 else {}
        optimizer.apply_gradients([(tape.gradient(loss, v), v)], **kind)

    with warnings.catch_warnings():
        # The worker that scales no loss is also told so.
        warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
        return told(lambda: strategy.run(step), v)


def another_order(strategy, index):
    """Workers of which one makes a step with an optimizer that the other never uses."""
    with strategy.scope():
        variables = [tf.Variable(tf.ones([n])) for n in (1, 2)]
        optimizers = [keras_mp.AllReduceOptimizer(make_optimizer(FAMILIES[0])) for _ in range(2)]
        for optimizer, v in zip(optimizers, variables):
            optimizer.build([v])
    messages = []
    for i in (index, 1 - index):
        optimizer, v = optimizers[i], variables[i]
        workers_module.TIMEOUT_IN_SECONDS = 5.0
        if messages and index == 1:
            break
        try:
            strategy.run(lambda o=optimizer, v=v: o.apply_gradients([(tf.ones_like(v), v)]))
        except (ValueError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def another_version(strategy, index):
    """Workers that have nothing but different versions of the package."""
    with strategy.scope():
        v = tf.Variable(1.0)
        optimizer = keras_mp.LossScaleOptimizer(make_optimizer(FAMILIES[0]))
        optimizer.build([v])
    version = {"version of keras_mp": lambda: ["1.2.0", "1.3.0"][index]}
    with mock.patch.dict(workers_module.FACTS, version):
        return told(lambda: strategy.run(lambda: optimizer.minimize(lambda: 2 * v, [v])), v)


@once
@pytest.mark.parametrize("kind", UNEVEN)
def test_workers_that_differ_are_told_at_the_first_step(uneven, kind):
    for message, seconds, weight in uneven[kind]:
        assert "worker 0: " in message
        assert "worker 1: " in message
        for part in UNEVEN[kind][-1]:
            assert part in message
        assert not any(name in message for name in ("gradients:", "version"))
        assert seconds < 20  # TensorFlow notices different dtypes after more than 40
        assert weight == 1.0


@once
def test_a_worker_that_scales_no_loss_is_noticed(uneven):
    for message, _, weight in uneven["scaled on one, False"]:
        assert re.search("loss_scale: worker 0: FixedLossScale.*; worker 1: None", message)
        assert weight == 1.0
    for message, _, weight in uneven["scaled on one, True"]:
        assert "gradients are still scaled: worker 0: True; worker 1: " in message
        assert weight == 1.0


@once
def test_a_worker_that_waits_for_the_others_is_told():
    for _ in range(5):
        # TensorFlow sometimes crashes (SIGSEGV) while it ends a collective that timed out.
        [[first, second]] = workers.run([(another_order, {})], 2, may_die=True)
        if None not in (first, second):
            break
    for message in (first[0], *second):
        assert message.startswith("ValueError: The workers do not run the same training")
        assert "shapes of dense gradients: worker 0: (1,); worker 1: (2,)" in message
    assert first[1].startswith("RuntimeError: In the first step of an optimizer all workers")
    assert "has waited for the others for up to 5 seconds" in first[1]


@once
def test_workers_with_different_versions_alone_are_told(uneven):
    for message, _, weight in uneven["versions"]:
        differing = message.splitlines()[1:]
        assert differing == ["  version of keras_mp: worker 0: 1.2.0; worker 1: 1.3.0"]
        assert weight == 1.0


@pytest.fixture(scope="module")
def uneven():
    """What two workers return that differ: {name: of each worker}."""
    calls = {"versions": (another_version, {})}
    for has_wrapper in (True, False):
        arguments = {"has_wrapper": has_wrapper}
        calls[f"scaled on one, {has_wrapper}"] = (scales_on_one_worker, arguments)
    for i, kind in enumerate(UNEVEN):  # in eager and in a function in turn
        arguments = {"kind": kind, "in_function": bool(i % 2), "name": FAMILIES[-(i % 2)]}
        calls[kind] = (uneven_loop, arguments)
    return dict(zip(calls, workers.run(list(calls.values()), 2)))


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What two workers return that nobody disturbs: {name: of each worker}."""
    folder = {"folder": str(tmp_path_factory.mktemp("together"))}
    calls = {}
    for name in FAMILIES:
        loop = {"name": name, "in_float16": name == FAMILIES[0]}
        calls[f"own loop, {name}"] = (own_loop, loop)
        calls[f"fit, {name}"] = (fit, {"name": name, **folder})
    for method in METHODS:
        adam = {"name": FAMILIES[0].replace("SGD", "Adam")}
        calls[f"weights in 16 bits, {method}"] = (weights_in_16_bits, {"method": method, **adam})
    if IS_KERAS_3:
        calls |= {
            "bfloat16": (bfloat16_loop, {}),
            "scaler": (scaler_loop, {}),
            "overflowing": (overflowing_loop, {}),
        }
    return dict(zip(calls, workers.run(list(calls.values()), 2)))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """What `fit` returns after it was left early, in the last family because one was killed."""
    folder = {"folder": str(tmp_path_factory.mktemp("resumed"))}
    early = [
        (fit, {"name": name, **folder, "leave_in_epoch": 2, "die": name == FAMILIES[-1]})
        for name in FAMILIES
    ]
    # One was killed, and the other cannot go on alone.
    *left, killed = workers.run(early, 2, may_die=True)
    assert killed == [None, None]
    assert all(None not in of_workers for of_workers in left)
    calls = [(fit, {"name": name, **folder}) for name in FAMILIES]
    return dict(zip(FAMILIES, workers.run(calls, 2)))


def fails(strategy, index):
    """Ends the second worker with an error."""
    del strategy
    if index:
        raise RuntimeError("The second worker has had enough.")


@once
def test_the_last_lines_of_a_worker_that_has_died_are_shown():
    with pytest.raises(AssertionError, match=r"died:[\s\S]*The second worker has had enough"):
        workers.run([(fails, {})], 2)
