"""Scaled once and unscaled once, wherever and in whatever order the calls are made."""

import contextlib
import copy
import gc
import pickle
import threading
import warnings
import weakref
from typing import NamedTuple

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import keras_mp
from keras_mp.step.optimizer_calls import OptimizerCalls
from tests.common import FAMILIES, make_optimizer, mirrored, once, value

RFC = ("get_scaled_loss", "get_unscaled_gradients")
KERAS_3 = ("scale_loss",)
RIGHT = [RFC, KERAS_3, ("scale_loss", "get_unscaled_gradients")]
WRONG = [(), ("get_scaled_loss",), ("get_unscaled_gradients",)]
SCALE = 1024.0

pytestmark = pytest.mark.parametrize("name", FAMILIES)


def our_warnings(stack):
    """Collects keras_mp's warnings in a list, as long as the stack is open."""
    caught = stack.enter_context(warnings.catch_warnings(record=True))
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", keras_mp.MixedPrecisionWarning)
    return caught


class Step(NamedTuple):
    """How one step is made: which calls, and where.

    Attributes:
        calls: names of the optimizer's methods, or "minimize".
        compute_in: where gradients are computed: "eager", "function" or "retraced".
        apply_in: where they are applied: "same" place, or one of its own.
        thread: is a new thread started for it?
        looked_at: are gradients computed and thrown away before? Only where the step is right and
            scales anew in eager: nobody can tell gradients that were thrown away from others.
        finite: is the loss finite?
    """

    calls: tuple[str, ...] | str
    compute_in: str = "eager"
    apply_in: str = "same"
    thread: bool = False
    looked_at: bool = False
    finite: bool = True

    @property
    def is_right(self):
        return self.calls == "minimize" or self.calls in RIGHT


class Training:
    """A dense variable and an embedding, with numbers so round that every sum is exact."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.variables = [tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([3, 2]))]
        build = "build" if hasattr(optimizer, "build") else "_create_all_weights"
        getattr(optimizer, build)(self.variables)
        self.functions = {}
        self.traces = 0

    def loss(self, factor):
        dense, table = self.variables
        rows = tf.gather(table, [2, 0, 2])
        return (tf.reduce_sum(dense * [0.5, -1.0]) + tf.reduce_sum(rows) * 0.25) * factor

    def gradients(self, calls, factor):
        with tf.GradientTape() as tape:
            loss = self.loss(factor)
            for call in calls:
                if call != "get_unscaled_gradients":
                    loss = getattr(self.optimizer, call)(loss)
        gradients = tape.gradient(loss, self.variables)
        if "get_unscaled_gradients" in calls:
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        return gradients

    def apply(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.variables))

    def whole(self, calls, factor):
        if calls == "minimize":
            self.optimizer.minimize(lambda: self.loss(factor), self.variables)
        else:
            self.apply(self.gradients(calls, factor))

    def call(self, where, method, calls, argument):
        """Calls a method, given the calls to make, in eager or in a function, maybe retraced."""
        if where == "eager":
            return method(*calls, argument)
        key = (method.__name__, calls)
        if key not in self.functions:
            self.functions[key] = tf.function(lambda argument, tag: method(*calls, argument))
        self.traces += where == "retraced"
        tag = f"{self.traces}" if where == "retraced" else ""
        return self.functions[key](argument, tag)

    def make(self, step):
        factor = tf.constant(1.0 if step.finite else np.inf)
        if step.looked_at and step.calls in RIGHT and step.compute_in == "eager":
            self.optimizer.compute_gradients(lambda: self.loss(factor), self.variables)
        if step.apply_in == "same" or step.calls == "minimize":
            self.call(step.compute_in, self.whole, (step.calls,), factor)
        else:
            gradients = self.call(step.compute_in, self.gradients, (step.calls,), factor)
            self.call(step.apply_in, self.apply, (), gradients)

    def was_traced(self, step):
        is_one_function = step.compute_in == "function" and step.apply_in == "same"
        return is_one_function and ("whole", (step.calls,)) in self.functions

    def state(self):
        return [value(v) for v in self.all_variables()]

    def set_state(self, state):
        for variable, array in zip(self.all_variables(), state):
            variable.assign(array)

    def all_variables(self):
        variables = self.optimizer.variables
        return [*self.variables, *(variables() if callable(variables) else variables)]


def in_thread(fn):
    errors = []

    def run():
        try:
            fn()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


# Where the first half of a step is made, and the second: the same, and one beside eager code.
PLACES_OF_TWO = [
    *(("eager", "eager"), ("function", "function"), ("jit", "jit")),
    *(("function", "eager"), ("eager", "jit"), ("jit", "function")),
]
PLACES = st.sampled_from(["eager", "function", "retraced"])
STEPS = st.builds(
    Step,
    calls=st.sampled_from([*RIGHT, "minimize", *RIGHT, *WRONG]),
    compute_in=PLACES,
    apply_in=st.just("same"),
    thread=st.booleans(),
    looked_at=st.booleans(),
    finite=st.sampled_from([True, True, False]),
)
# Of functions that make parts of a step, those of one dialect: each goes by the last calls before
# it was traced.
STEPS_IN_PARTS = st.sampled_from(RIGHT).flatmap(
    lambda calls: st.lists(
        st.builds(
            Step,
            calls=st.just(calls),
            compute_in=PLACES,
            apply_in=PLACES,
            thread=st.booleans(),
            finite=st.sampled_from([True, True, False]),
        ),
        min_size=1,
        max_size=6,
    )
)


@once
@hypothesis.settings(
    max_examples=9 // len(FAMILIES),
    deadline=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(st.one_of(st.lists(STEPS, min_size=1, max_size=8), STEPS_IN_PARTS))
def test_any_mixture_equals_the_control_or_warns_at_that_step(name, steps):
    ours = Training(
        keras_mp.LossScaleOptimizer(make_optimizer(name, 0.125, momentum=0.5), "dynamic")
    )
    control = Training(make_optimizer(name, 0.125, momentum=0.5))
    before = None
    for step in steps:
        state, is_traced = ours.state(), ours.was_traced(step)
        with contextlib.ExitStack() as stack:
            caught = our_warnings(stack)
            (in_thread if step.thread else lambda fn: fn())(lambda: ours.make(step))
        if step.is_right:
            assert not caught, (step, str(caught[0].message))
            if step.finite:
                control.apply(control.gradients((), tf.constant(1.0)))
        else:
            # A function that makes a step wrongly says so when it is traced; and that functions
            # make no calls at all is said once, until one does again.
            is_said = is_traced or (before is not None and before.calls == step.calls == ())
            assert caught or is_said, step
            ours.set_state(state)
        before = step
        for our_array, control_array in zip(ours.state(), control.state()):
            np.testing.assert_array_equal(our_array, control_array)


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


def placed(where, function):
    if where == "eager":
        return function
    return tf.function(function, jit_compile=where == "jit")


def sgd(name, learning_rate=1.0):
    return make_optimizer(name, learning_rate, momentum=0.0)


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


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_function_without_any_call_is_reported_once_at_its_line(name, jit_compile):
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name), SCALE), tf.Variable(8.0)
    optimizer.build([v])

    @tf.function(jit_compile=jit_compile)
    def step():
        optimizer.apply_gradients([(tf.constant(1.0), v)])

    with contextlib.ExitStack() as stack:
        caught = our_warnings(stack)
        for _ in range(3):
            step()
    assert [w.filename for w in caught] == [__file__]


def test_copies_begin_anew(name):
    scale = keras_mp.FixedLossScale(2)
    calls, v = OptimizerCalls(scale), tf.Variable(1.0)
    calls.begin(scale(), to_apply=False)
    for copied in (copy.deepcopy(calls), pickle.loads(pickle.dumps(calls))):
        copied.begin(scale(), to_apply=True)
        with copied.applying([v]) as given:
            assert given.scaled is True
    [gradient] = calls.unscale([tf.constant(4.0)])
    assert float(gradient) == 2
    with calls.applying([v]) as given:
        assert given.scaled is False


@once
def test_functions_are_not_kept_alive(name):
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name), SCALE), tf.Variable(8.0)
    optimizer.build([v])
    function = tf.function(lambda: optimizer.get_unscaled_gradients([tf.constant(1.0)]))
    graph = weakref.ref(function.get_concrete_function().graph)
    assert graph() is not None
    del function
    gc.collect()
    assert graph() is None


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


@pytest.mark.parametrize(("first", "second"), [(KERAS_3, RFC), (RFC, KERAS_3)])
def test_steps_of_two_dialects_that_overlap_are_reported(name, first, second):
    optimizer, v, w = keras_mp.LossScaleOptimizer(sgd(name), SCALE), *two_variables()
    optimizer.build([v, w])
    gradients = gradients_in_dialect(optimizer, first, v)
    optimizer.apply_gradients(zip(gradients_in_dialect(optimizer, second, w), [w]))
    assert float(w) == 0.5
    with pytest.warns(keras_mp.MixedPrecisionWarning):
        optimizer.apply_gradients(zip(gradients, [v]))


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


@pytest.mark.parametrize("calls", [RFC, KERAS_3])
@pytest.mark.parametrize("mode", ["eager", "function", "split"])
def test_a_wrapper_around_ours_sees_unscaled_gradients(name, calls, mode):
    seen = []

    class Clipping(keras_mp.OptimizerWrapper):
        def apply_gradients(self, grads_and_vars, **kwargs):
            pairs = [(tf.clip_by_value(g, -0.25, 0.25), v) for g, v in grads_and_vars]
            seen.append(pairs)
            return super().apply_gradients(pairs, **kwargs)

    ours, v = keras_mp.LossScaleOptimizer(sgd(name), SCALE), tf.Variable(1.0)
    optimizer = Clipping(ours)
    optimizer.build([v])
    if mode == "split":
        compute = tf.function(lambda: gradients_in_dialect(ours, calls, v))
        apply = tf.function(lambda gradients: optimizer.apply_gradients(zip(gradients, [v])))
        step = lambda: apply(compute())  # noqa: E731
    else:
        step = placed(
            mode,
            lambda: optimizer.apply_gradients(zip(gradients_in_dialect(ours, calls, v), [v])),
        )
    for i in (1, 2):
        step()
        assert float(v) == 1 - 0.25 * i
    assert seen


def test_a_subclass_of_ours_sees_unscaled_gradients(name):
    class Clipping(keras_mp.LossScaleOptimizer):
        def apply_gradients(self, grads_and_vars, **kwargs):
            pairs = [(tf.clip_by_value(g, -0.25, 0.25), v) for g, v in grads_and_vars]
            return super().apply_gradients(pairs, **kwargs)

    for calls in (RFC, KERAS_3):
        optimizer, v = Clipping(sgd(name), SCALE), tf.Variable(1.0)
        optimizer.apply_gradients(zip(gradients_in_dialect(optimizer, calls, v), [v]))
        assert float(v) == 0.75


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


MODES = ["eager", "function", "jit"]


class Unmodified(tf.keras.Model):
    """A model whose `train_step` was written without loss scaling in mind."""

    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(1, kernel_initializer="zeros")

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(self(x, training=True) - y, tf.float32))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"mean": loss}


@pytest.mark.parametrize("mode", MODES)
def test_an_unmodified_train_step_trains(name, mode):
    class Logs(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.loss_scale  # noqa: B018
            self.model.optimizer.get_config()

    model = Unmodified()
    options = {"run_eagerly": mode == "eager", "jit_compile": mode == "jit"}
    model.compile(keras_mp.LossScaleOptimizer(sgd(name), SCALE), "mse", **options)
    data = tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, 1]))).repeat(3)
    monitor = keras_mp.callbacks.LossScaleMonitor(1)
    with contextlib.ExitStack() as stack:
        caught = our_warnings(stack)
        model.fit(data, verbose=0, callbacks=[monitor, Logs()])
        model.optimizer.steps_skipped  # noqa: B018
    for weights in model.get_weights():
        np.testing.assert_array_equal(weights, -3)
    assert caught
    assert all("applied as they are" in str(w.message) for w in caught)


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
    calls, v, scale = OptimizerCalls(keras_mp.FixedLossScale(2)), tf.Variable(8.0), tf.constant(2.0)
    tf.function(lambda: calls.begin(scale, to_apply=True)).get_concrete_function()
    gc.collect()
    warns = pytest.warns(keras_mp.MixedPrecisionWarning, match="Neither")
    with warns, calls.applying([v]) as given:
        assert given.scaled is False
