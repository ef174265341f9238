"""Scaled once and unscaled once, wherever and in whatever order the calls are made."""

import contextlib
import copy
import gc
import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import FAMILIES, IS_KERAS_3, MODES, mirrored, once, placed, sgd, value

RFC = ("get_scaled_loss", "get_unscaled_gradients")
KERAS_3 = ("scale_loss",)
RIGHT = [RFC, KERAS_3, ("scale_loss", "get_unscaled_gradients")]
SCALE = 1024.0

pytestmark = pytest.mark.parametrize("name", FAMILIES)


def our_warnings(stack):
    """Collects keras_mp's warnings in a list, as long as the stack is open."""
    caught = stack.enter_context(warnings.catch_warnings(record=True))
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", keras_mp.MixedPrecisionWarning)
    return caught


# Where the first half of a step is made, and the second: the same, and one beside eager code.
PLACES_OF_TWO = [
    *(("eager", "eager"), ("function", "function"), ("jit", "jit")),
    *(("function", "eager"), ("eager", "jit"), ("jit", "function")),
]


@pytest.mark.parametrize("calls", RIGHT)
@pytest.mark.parametrize(("compute_in", "apply_in"), PLACES_OF_TWO)
def test_a_function_goes_by_the_calls_before_it_was_traced(name, calls, compute_in, apply_in):
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name), SCALE), tf.Variable(8.0)
    optimizer.build([v])

    def compute():
        with tf.GradientTape() as tape:
            loss = getattr(optimizer, calls[0])(v * 0.5)
        gradients = tape.gradient(loss, [v])
        return optimizer.get_unscaled_gradients(gradients) if calls[1:] else gradients

    compute = placed(compute_in, compute)
    apply = placed(apply_in, lambda gradients: optimizer.apply_gradients(zip(gradients, [v])))
    for i in range(4):
        apply(compute())
        assert float(v) == 8 - 0.5 * (i + 1)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    ("calls", "unscale_in_loop"), [(RFC, True), (RFC, False), (KERAS_3, False), (RIGHT[2], True)]
)
def test_accumulation_in_a_loop_of_a_function(name, calls, unscale_in_loop, jit_compile):
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name), SCALE), tf.Variable(8.0)
    optimizer.build([v])

    @tf.function(jit_compile=jit_compile)
    def step():
        total = tf.zeros([])
        for _ in tf.range(4):
            with tf.GradientTape() as tape:
                loss = getattr(optimizer, calls[0])(v * 0.5)
            gradient = tape.gradient(loss, v)
            if calls[1:] and unscale_in_loop:
                [gradient] = optimizer.get_unscaled_gradients([gradient])
            total += gradient
        if calls[1:] and not unscale_in_loop:
            [total] = optimizer.get_unscaled_gradients([total])
        optimizer.apply_gradients([(total, v)])

    step()
    step()
    assert float(v) == 4


@pytest.mark.parametrize("calls", RIGHT)
def test_replicas_that_compute_in_one_function_and_apply_in_another(name, calls):
    strategy = mirrored(2)
    with strategy.scope():
        v = tf.Variable(8.0)
        optimizer = keras_mp.LossScaleOptimizer(sgd(name), SCALE)
        optimizer.build([v])

    def replica_compute():
        with tf.GradientTape() as tape:
            loss = getattr(optimizer, calls[0])(v * 0.5)
        gradients = tape.gradient(loss, [v])
        return optimizer.get_unscaled_gradients(gradients) if calls[1:] else gradients

    def replica_apply(gradients):
        optimizer.apply_gradients(zip(gradients, [v]))

    compute = tf.function(lambda: strategy.run(replica_compute))
    apply = tf.function(lambda gradients: strategy.run(replica_apply, args=(gradients,)))
    for _ in range(3):
        apply(compute())
    assert float(value(v)) == 5
    # In eager each `run` has new threads.
    strategy.run(replica_apply, args=(strategy.run(replica_compute),))
    assert float(value(v)) == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_any_call_is_reported_at_its_line_and_by_functions_once(name, mode):
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name), SCALE), tf.Variable(8.0)
    optimizer.build([v])

    def step():
        optimizer.apply_gradients([(tf.constant(1.0), v)])

    step = placed(mode, step)
    with contextlib.ExitStack() as stack:
        caught = our_warnings(stack)
        for _ in range(3):
            step()
    assert [w.filename for w in caught] == [__file__] * (3 if mode == "eager" else 1)


def test_copies_begin_anew(name):
    if name.startswith("new") and not IS_KERAS_3:
        pytest.skip("Keras 2 copies only its legacy optimizers.")
    optimizer, v, w = keras_mp.LossScaleOptimizer(sgd(name), 2), tf.Variable(8.0), tf.Variable(8.0)
    optimizer.get_scaled_loss(v)
    copied = copy.deepcopy(optimizer)
    copied.scale_loss(w)
    copied.apply_gradients([(tf.constant(4.0), w)])
    gradients = optimizer.get_unscaled_gradients([tf.constant(4.0)])
    optimizer.apply_gradients(zip(gradients, [v]))
    assert float(v) == float(w) == 6


def half_of_sum(*variables):
    return tf.add_n([tf.reduce_sum(v) for v in variables]) * 0.5


def gradients_in_dialect(optimizer, calls, *variables, persistent=False):
    with tf.GradientTape(persistent=persistent) as tape:
        loss = getattr(optimizer, calls[0])(half_of_sum(*variables))
    gradients = tape.gradient(loss, variables)
    return optimizer.get_unscaled_gradients(gradients) if calls[1:] else gradients


@pytest.mark.parametrize("calls", [RFC, KERAS_3])
@pytest.mark.parametrize("mode", ["eager", "function", "split"])
def test_a_step_in_parts_is_divided_by_the_scale_that_it_was_multiplied_by(name, calls, mode):
    scale = keras_mp.DynamicLossScale(SCALE, increment_period=1)
    optimizer, v, w = keras_mp.LossScaleOptimizer(sgd(name), scale), *two_variables()
    optimizer.build([v, w])

    def compute():
        with tf.GradientTape() as tape:
            loss = getattr(optimizer, calls[0])(half_of_sum(v, w))
        return tape.gradient(loss, [v, w])

    def part(gradient, variable):
        gradients = [gradient]
        if calls[1:]:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, [variable]))

    where = "function" if mode == "split" else "eager"
    compute = placed(where, compute)
    parts = [placed(where, lambda g, variable=variable: part(g, variable)) for variable in (v, w)]
    step = placed(
        "function" if mode == "function" else "eager",
        lambda: [apply(gradient) for apply, gradient in zip(parts, compute())],
    )
    for i in (1, 2, 3):
        step()  # Quietly, and the scale doubles after each part.
        assert float(v) == float(w) == 1 - 0.5 * i
        assert float(scale) == SCALE * 4**i


def two_variables():
    return tf.Variable(1.0), tf.Variable(1.0)


@pytest.mark.parametrize("calls", [RFC, KERAS_3])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_minimize_between_computing_and_applying_disturbs_nothing(name, calls, mode):
    scale = keras_mp.DynamicLossScale(2.0, increment_period=1)  # So that each step moves it.
    optimizer, v, w = keras_mp.LossScaleOptimizer(sgd(name), scale), *two_variables()
    optimizer.build([v, w])
    compute = placed(mode, lambda: gradients_in_dialect(optimizer, calls, v))
    between = placed(mode, lambda: optimizer.minimize(lambda: half_of_sum(w), [w]))
    apply = placed(mode, lambda gradients: optimizer.apply_gradients(zip(gradients, [v])))
    for i in (1, 2):
        gradients = compute()
        between()
        between()
        apply(gradients)
        assert (float(v), float(w)) == (1 - 0.5 * i, 1 - i)


def test_to_do_a_thing_twice_is_refused(name):
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name), SCALE), tf.Variable(1.0)
    with tf.GradientTape(persistent=True) as tape:
        scaled = optimizer.get_scaled_loss(half_of_sum(v))
        with pytest.raises(ValueError, match="already"):
            optimizer.get_scaled_loss(scaled)
        with pytest.raises(ValueError, match="already"):
            optimizer.scale_loss(scaled)
    with pytest.raises(ValueError, match="already"):
        optimizer.minimize(scaled, [v], tape=tape)
    with pytest.raises(ValueError, match="already"):
        optimizer.minimize(lambda: optimizer.get_scaled_loss(half_of_sum(v)), [v])
    scaled = optimizer.get_scaled_loss(half_of_sum(v))
    gradients = optimizer.get_unscaled_gradients([tf.constant(SCALE), None])
    with pytest.raises(ValueError, match="already"):
        optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients([(gradients[0], v)])
    assert float(v) == 0


def test_a_wrapper_keeps_gradients_for_later(name):
    class Keeping(keras_mp.OptimizerWrapper):
        kept = ()

        def apply_gradients(self, grads_and_vars, **kwargs):
            Keeping.kept = [*Keeping.kept, *(g for g, _ in grads_and_vars)]
            if len(Keeping.kept) == 2:
                self.apply_kept()

        def apply_kept(self):
            total, Keeping.kept = tf.add_n(Keeping.kept), ()
            super().apply_gradients([(total, v)])

    ours, v = keras_mp.LossScaleOptimizer(sgd(name), SCALE), tf.Variable(8.0)
    optimizer = Keeping(ours)
    optimizer.build([v])
    with warnings.catch_warnings():
        warnings.simplefilter("error", keras_mp.MixedPrecisionWarning)
        for i, expected in enumerate((8, 7, 7, 6, 6)):
            optimizer.apply_gradients(zip(gradients_in_dialect(ours, KERAS_3, v), [v]))
            assert float(v) == expected, i
        optimizer.apply_kept()
    assert float(v) == 5.5


def test_fit_with_a_wrapper_around_ours(name):
    class Clipping(keras_mp.OptimizerWrapper):
        def apply_gradients(self, grads_and_vars, **kwargs):
            pairs = [(tf.clip_by_value(g, -0.25, 0.25), v) for g, v in grads_and_vars]
            return super().apply_gradients(pairs, **kwargs)

    for wrap in (
        lambda o: Clipping(keras_mp.LossScaleOptimizer(o, SCALE)),
        lambda o: keras_mp.LossScaleOptimizer(Clipping(o), SCALE),
    ):
        model = tf.keras.Sequential(
            [tf.keras.Input((2,)), tf.keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(wrap(sgd(name)), "mse")
        model.fit(tf.ones([4, 2]), 100 * tf.ones([4, 1]), batch_size=4, verbose=0)
        for weights in model.get_weights():
            np.testing.assert_array_equal(weights, 0.25)


READS = {
    "loss_scale": lambda optimizer: optimizer.loss_scale(),
    "converted": lambda optimizer: tf.convert_to_tensor(optimizer.loss_scale) * 1.0,
    "dynamic_scale": lambda optimizer: tf.convert_to_tensor(optimizer.dynamic_scale),
    "initial_scale": lambda optimizer: optimizer.initial_scale,
}


@pytest.mark.parametrize(
    ("read", "mode"),
    [*(("loss_scale", mode) for mode in MODES), *zip([*READS][1:], MODES)],
)
def test_reading_the_scale_never_changes_a_step(name, read, mode):
    scale = keras_mp.DynamicLossScale(SCALE)
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name), scale), tf.Variable(8.0)
    optimizer.build([v])

    def step(reads):
        if reads:
            READS[read](optimizer)
        optimizer.apply_gradients([(tf.constant(0.5), v)])

    step = placed(mode, step)
    for i, reads in enumerate([False, True, True, False]):
        with contextlib.ExitStack() as stack:
            caught = our_warnings(stack)
            READS[read](optimizer)
            step(reads)
        assert all("scaled=True" in str(w.message) for w in caught)
        assert caught or mode != "eager"
        assert float(v) == 8 - 0.5 * (i + 1)


@pytest.mark.parametrize(("read_in", "apply_in"), PLACES_OF_TWO)
def test_a_loss_that_was_multiplied_by_hand(name, read_in, apply_in):
    scale = keras_mp.DynamicLossScale(SCALE, increment_period=1)
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name), scale), tf.Variable(8.0)
    optimizer.build([v])
    compute = placed(read_in, lambda: tf.constant(0.5) * optimizer.loss_scale())
    apply = placed(apply_in, lambda g: optimizer.apply_gradients([(g, v)], scaled=True))
    right = placed(apply_in, lambda g: optimizer.apply_gradients([(g, v)]))
    for i in range(3):  # Quietly, and the scale doubles after each step.
        apply(compute())
        assert float(v) == 8 - 1.0 * i - 0.5
        right(gradients_in_dialect(optimizer, KERAS_3, v)[0])
        assert float(v) == 8 - 1.0 * (i + 1)
    assert float(scale()) == SCALE * 2**6
    optimizer.apply([tf.constant(0.5) * optimizer.loss_scale()], [v], scaled=True)
    assert float(v) == 4.5


def test_by_hand_through_wrappers_and_subclasses(name):
    seen = []

    class Watching(keras_mp.OptimizerWrapper):
        def apply_gradients(self, grads_and_vars, **kwargs):
            pairs = list(grads_and_vars)
            seen.append(float(pairs[0][0]))
            return super().apply_gradients(pairs, **kwargs)

    class Subclass(keras_mp.LossScaleOptimizer):
        def apply_gradients(self, grads_and_vars, **kwargs):
            pairs = list(grads_and_vars)
            seen.append(float(pairs[0][0]))
            return super().apply_gradients(pairs, **kwargs)

    for make in (
        lambda: Watching(keras_mp.LossScaleOptimizer(sgd(name), SCALE)),
        lambda: keras_mp.OptimizerWrapper(keras_mp.LossScaleOptimizer(sgd(name), SCALE)),
        lambda: Subclass(sgd(name), SCALE),
    ):
        optimizer, v = make(), tf.Variable(8.0)
        optimizer.apply_gradients([(tf.constant(0.5 * SCALE), v)], scaled=True)
        optimizer.apply([tf.constant(0.5 * SCALE)], [v], scaled=True)
        assert float(v) == 7
    assert seen == [0.5] * 4


def test_what_cannot_be_scaled_is_refused(name):
    v = tf.Variable(8.0)
    optimizer = keras_mp.OptimizerWrapper(sgd(name))
    with pytest.raises(ValueError, match="no LossScaleOptimizer"):
        optimizer.apply_gradients([(tf.constant(1.0), v)], scaled=True)
    optimizer = keras_mp.LossScaleOptimizer(sgd(name), SCALE)
    gradients = gradients_in_dialect(optimizer, RFC, v)
    with pytest.raises(ValueError, match="already"):
        optimizer.apply_gradients(zip(gradients, [v]), scaled=True)
    optimizer.apply_gradients(zip(gradients, [v]))
    assert float(v) == 7.5


@once
def test_a_function_that_was_traced_and_is_gone_has_scaled_nothing(name):
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name), 2), tf.Variable(8.0)
    tf.function(lambda: optimizer.scale_loss(v)).get_concrete_function()
    gc.collect()
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="Neither"):
        optimizer.apply_gradients([(tf.constant(0.5), v)])
    assert float(v) == 7.5
