"""Scaled once and unscaled once, wherever and in whatever order the calls are made."""

import copy
import gc
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, MODES, mirrored, once, pairs, placed, value
from tests.models import FAMILIES, sgd
from tests.steps import DIALECTS, KERAS_3, RFC, our_warnings

SCALE = 1024.0

pytestmark = pytest.mark.parametrize("name", FAMILIES)


def scaling(name, loss_scale=SCALE, count=1):
    """An optimizer that scales losses, and variables of 8 that it trains."""
    variables = [tf.Variable(8.0) for _ in range(count)]
    optimizer = keras_mp.LossScaleOptimizer(sgd(name), loss_scale)
    optimizer.build(variables)
    return optimizer, *variables


def doubling():
    """A scale that each step moves."""
    return keras_mp.DynamicLossScale(SCALE, increment_period=1)


def half_of_sum(*variables):
    return tf.add_n([tf.reduce_sum(v) for v in variables]) * 0.5


# Where the first half of a step is made, and the second: the same, and one beside eager code.
PLACES_OF_TWO = [
    *(("eager", "eager"), ("function", "function"), ("jit", "jit")),
    *(("function", "eager"), ("eager", "jit"), ("jit", "function")),
]


@pytest.mark.parametrize("calls", DIALECTS)
@pytest.mark.parametrize(("compute_in", "apply_in"), PLACES_OF_TWO)
def test_a_function_goes_by_the_calls_before_it_was_traced(name, calls, compute_in, apply_in):
    optimizer, v = scaling(name)
    compute, apply = steps.halves(optimizer, lambda: half_of_sum(v), [v], calls)
    compute, apply = placed(compute_in, compute), placed(apply_in, apply)
    for i in range(4):
        apply(compute())
        assert float(v) == 8 - 0.5 * (i + 1)


@pytest.mark.parametrize("calls", [RFC, KERAS_3])
@pytest.mark.parametrize("retraced", ["compute", "apply", "both"])
def test_functions_that_are_traced_again(name, calls, retraced):
    optimizer, v = scaling(name)
    compute, apply = steps.halves(optimizer, lambda tag: half_of_sum(v), [v], calls)
    compute = tf.function(compute)
    apply = tf.function(lambda gradients, tag: optimizer.apply_gradients(zip(gradients, [v])))
    for tag in ("first", "first", "second", "second"):
        with our_warnings() as caught:
            gradients = compute("" if retraced == "apply" else tag)
            apply(gradients, "" if retraced == "compute" else tag)
        # Of a retrace of `apply` alone nobody can tell whether the calls were made; it is said.
        assert len(caught) <= (retraced == "apply"), [str(w.message)[:200] for w in caught]
    assert float(v) == 8 - 4 * 0.5


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    ("calls", "unscale_in_loop"), [(RFC, True), (RFC, False), (KERAS_3, False), (DIALECTS[2], True)]
)
def test_accumulation_in_a_loop_of_a_function(name, calls, unscale_in_loop, jit_compile):
    optimizer, v = scaling(name)
    in_loop = calls if unscale_in_loop else calls[:1]
    compute, apply = steps.halves(optimizer, lambda: half_of_sum(v), [v], in_loop)

    @tf.function(jit_compile=jit_compile)
    def step():
        total = tf.zeros([])
        for _ in tf.range(4):
            total += compute()[0]
        if calls != in_loop:
            [total] = optimizer.get_unscaled_gradients([total])
        apply([total])

    step()
    step()
    assert float(v) == 4


IN_A_FUNCTION = [
    lambda f: tf.cond(tf.constant(1.0) > 0, f, f),
    lambda f: tf.while_loop(lambda i: i < 1, lambda i: (f(), i + 1)[1:], [0]),
    lambda f: tf.function(f)(),
]


@once
@pytest.mark.parametrize("call", IN_A_FUNCTION, ids=["branch", "loop", "function"])
def test_a_part_of_a_step_that_a_function_has_begun_is_applied_inside_of_it(name, call):
    optimizer, v, w = scaling(name, count=2)

    @tf.function
    def step():
        scaled = optimizer.scale_loss(half_of_sum(v, w)) * 0 + 0.5 * SCALE
        optimizer.apply_gradients([(scaled, v)])
        call(lambda: optimizer.apply_gradients([(scaled, w)]) is None)

    step()  # Quietly.
    assert float(v) == float(w) == 7.5


@once
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_gradients_that_are_unscaled_at_once_and_applied_in_parts(name, mode):
    optimizer, v, w = scaling(name, count=2)
    compute = tf.function(steps.halves(optimizer, lambda: half_of_sum(v, w), [v, w], RFC[:1])[0])

    def step():
        for _ in range(2):
            of_v, of_w = optimizer.get_unscaled_gradients(compute())
            optimizer.apply_gradients([(of_v, v)])
            optimizer.apply_gradients([(of_w, w)])

    placed(mode, step)()  # Quietly.
    assert float(v) == float(w) == 7


@once
@pytest.mark.parametrize("calls", [RFC, KERAS_3])
def test_a_function_that_begins_a_step_is_called_twice_in_another_one(name, calls):
    optimizer, v = scaling(name)
    compute, apply = steps.halves(optimizer, lambda: half_of_sum(v), [v], calls)
    compute = tf.function(compute)

    @tf.function
    def step():
        for _ in range(3):
            apply(compute())  # The second call traces nothing.

    step()  # Quietly.
    assert float(v) == 6.5


@pytest.mark.parametrize("calls", DIALECTS)
def test_replicas_that_compute_in_one_function_and_apply_in_another(name, calls):
    strategy = mirrored(2)
    with strategy.scope():
        optimizer, v = scaling(name)
    of_replica, applied = steps.halves(optimizer, lambda: half_of_sum(v), [v], calls)
    compute = tf.function(lambda: strategy.run(of_replica))
    apply = tf.function(lambda gradients: strategy.run(applied, args=(gradients,)))
    for _ in range(3):
        apply(compute())
    assert float(value(v)) == 5
    # In eager each `run` has new threads.
    strategy.run(applied, args=(strategy.run(of_replica),))
    assert float(value(v)) == 4


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


@pytest.mark.parametrize(
    ("calls", "mode", "minimizes"), pairs([RFC, KERAS_3], [*MODES, "one function"], [False, True])
)
def test_a_step_in_parts_is_divided_by_the_scale_that_it_was_multiplied_by(
    name, calls, mode, minimizes
):
    optimizer, u, v, w = scaling(name, doubling(), count=3)
    compute, _ = steps.halves(optimizer, lambda: half_of_sum(u, v), [u, v], calls[:1])

    def part(gradient, variable):
        gradients = [gradient]
        if calls[1:]:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, [variable]))

    def between():
        if minimizes:
            optimizer.minimize(lambda: half_of_sum(w), [w])

    where, whole = ("eager", "function") if mode == "one function" else (mode, "eager")
    compute, between = placed(where, compute), placed(where, between)
    parts = [placed(where, lambda g, variable=variable: part(g, variable)) for variable in (u, v)]

    def step():
        for gradient, apply in zip(compute(), parts, strict=True):
            between()
            apply(gradient)

    step = placed(whole, step)
    for i in (1, 2):
        step()  # Quietly, and the scale doubles after each part, and each `minimize`.
        assert [float(x) for x in (u, v, w)] == [8 - 0.5 * i, 8 - 0.5 * i, 8 - i * minimizes]
        assert float(optimizer.loss_scale) == SCALE * 4 ** (i * (1 + minimizes))


def test_a_step_does_not_report_the_loss_of_minimize_between_its_calls(name):
    optimizer, v, w = scaling(name, doubling(), count=2)
    optimizer.get_scaled_loss(half_of_sum(v))
    optimizer.minimize(lambda: half_of_sum(w) * np.inf, [w])
    assert optimizer.last_overflow.loss_is_finite is False
    gradients = optimizer.get_unscaled_gradients([tf.constant(np.inf)])
    optimizer.apply_gradients(zip(gradients, [v]))
    assert optimizer.last_overflow.loss_is_finite is True


def test_to_do_a_thing_twice_is_refused(name):
    optimizer, v = scaling(name)
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
    with pytest.raises(ValueError, match="already"):
        optimizer.apply_gradients([(gradients[0], v)], scaled=True)
    with pytest.raises(ValueError, match="no LossScaleOptimizer"):
        keras_mp.OptimizerWrapper(sgd(name)).apply_gradients([], scaled=True)
    optimizer.apply_gradients([(gradients[0], v)])
    assert float(v) == 7


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

    ours, v = scaling(name)
    optimizer = Keeping(ours)
    compute, _ = steps.halves(ours, lambda: half_of_sum(v), [v])
    for i, expected in enumerate((8, 7, 7, 6, 6)):  # Quietly.
        optimizer.apply_gradients(zip(compute(), [v]))
        assert float(v) == expected, i
    optimizer.apply_kept()
    assert float(v) == 5.5


@pytest.mark.parametrize(("read_in", "apply_in"), PLACES_OF_TWO)
def test_a_loss_that_was_multiplied_by_hand(name, read_in, apply_in):
    optimizer, v = scaling(name, doubling())
    right, applied = steps.halves(optimizer, lambda: half_of_sum(v), [v])
    compute = placed(read_in, lambda: [tf.constant(0.5) * optimizer.loss_scale()])
    apply = placed(apply_in, lambda gradients: applied(gradients, scaled=True))
    apply_right = placed(apply_in, applied)
    for i in range(3):  # Quietly, and the scale doubles after each step.
        apply(compute())
        assert float(v) == 8 - 1.0 * i - 0.5
        apply_right(right())
        assert float(v) == 8 - 1.0 * (i + 1)
    assert float(optimizer.loss_scale()) == SCALE * 2**6
    optimizer.apply([tf.constant(0.5) * optimizer.loss_scale()], [v], scaled=True)
    assert float(v) == 4.5


@once
def test_a_function_that_was_traced_and_is_gone_has_scaled_nothing(name):
    optimizer, v = scaling(name)
    tf.function(lambda: optimizer.scale_loss(v)).get_concrete_function()
    gc.collect()
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="Neither"):
        optimizer.apply_gradients([(tf.constant(0.5), v)])
    assert float(v) == 7.5


@once
def test_a_function_that_is_only_traced_has_no_part_in_a_step_of_eager_code(name):
    optimizer, v = scaling(name)
    optimizer.scale_loss(v)
    other = tf.function(lambda: optimizer.get_scaled_loss(v))
    other.get_concrete_function()
    optimizer.apply_gradients([(tf.constant(0.5 * SCALE), v)])  # Quietly.
    assert float(v) == 7.5


@once
@pytest.mark.parametrize("calls", [RFC, KERAS_3])
def test_a_step_in_parts_goes_on_though_another_thread_has_begun_one_since(name, calls):
    optimizer, v, w, of_other = scaling(name, count=3)
    compute, _ = steps.halves(optimizer, lambda: half_of_sum(v, w), [v, w], calls)
    other_calls = RFC if calls == KERAS_3 else KERAS_3
    begin, _ = steps.halves(optimizer, lambda: half_of_sum(of_other), [of_other], other_calls)
    with futures.ThreadPoolExecutor(1) as thread:
        for i in range(2):
            of_v, of_w = compute()
            optimizer.apply_gradients([(of_v, v)])
            thread.submit(begin).result()
            optimizer.apply_gradients([(of_w, w)])  # Quietly.
            assert (float(v), float(w)) == (7.5 - 0.5 * i, 7.5 - 0.5 * i)


@once
@pytest.mark.parametrize("calls", [RFC, KERAS_3])
@pytest.mark.parametrize("calls_of_function", [RFC, KERAS_3])
def test_a_step_of_eager_code_before_gradients_of_a_function(name, calls, calls_of_function):
    optimizer, v, w = scaling(name, doubling(), count=2)
    step = steps.halves(optimizer, lambda: half_of_sum(v), [v], calls)
    compute, apply = steps.halves(optimizer, lambda: half_of_sum(w), [w], calls_of_function)
    compute = tf.function(compute)
    for i in range(3):
        step[1](step[0]())
        apply(compute())
        assert (float(v), float(w)) == (7.5 - 0.5 * i, 7.5 - 0.5 * i)
