"""An exception in any call leaves scale, calls, weights and slots as they were before the call."""

import contextlib
import functools
import gc
import threading
import weakref
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import assert_all_equal, mirrored, once, pairs, placed, value
from tests.models import FAMILIES, compiled_model, make_optimizer

pytestmark = pytest.mark.parametrize("name", FAMILIES)

SCALE = 1024.0
BROKEN = "broken on purpose"


class Faults:
    """What raises once where it is asked to."""

    def __init__(self):
        self.armed = False

    def __call__(self, *args):
        if self.armed:
            self.armed = False
            raise RuntimeError(BROKEN)


def breaking(optimizer, faults):
    """An optimizer whose `apply_gradients` may raise before it has changed anything."""
    cls = type(optimizer)

    class Breaking(cls):
        def apply_gradients(self, *args, **kwargs):
            faults()
            return super().apply_gradients(*args, **kwargs)

    optimizer.__class__ = Breaking
    return optimizer


class Program:
    """An optimizer, a weight of 1 whose gradient is .5, and calls that may raise."""

    def __init__(self, name, wrap=None, **arguments):
        self.faults = Faults()
        inner = breaking(make_optimizer(name, 1.0, momentum=0.0), self.faults)
        scale = keras_mp.DynamicLossScale(SCALE)
        self.ours = keras_mp.LossScaleOptimizer(inner, scale, **arguments)
        self.optimizer = wrap(self.ours, self.faults) if wrap else self.ours
        self.v = tf.Variable(1.0)
        self.optimizer.build([self.v])
        self.gradients = []

    def loss(self):
        self.faults()
        return self.v * 0.5

    def compute(self, call):
        return steps.halves(self.ours, lambda: self.v * 0.5, [self.v], (call,))[0]()

    def apply(self, gradients, **kwargs):
        return self.optimizer.apply_gradients(zip(gradients, [self.v]), **kwargs)

    def state(self):
        scale = self.ours.loss_scale
        variables = [self.v, *self.ours.variables, self.ours.steps_skipped, scale.loss_scale]
        return [value(v) for v in (*variables, scale.num_good_steps, scale.num_bad_steps)]

    def raises(self, call, *args, error=RuntimeError, **kwargs):
        """Makes a call that raises, and shows that nothing has changed."""
        before = self.state()
        self.faults.armed = True
        with pytest.raises(error):
            call(*args, **kwargs)
        self.faults.armed = False
        assert_all_equal(self.state(), before)

    def whole_step(self):
        """Shows that the next step is right, whatever came before."""
        weight = float(self.v)
        self.apply(self.compute("scale_loss"))
        assert float(self.v) == weight - 0.5


class Watching(keras_mp.OptimizerWrapper):
    """A wrapper of somebody else."""

    def apply_gradients(self, grads_and_vars, **kwargs):
        return super().apply_gradients(list(grads_and_vars), **kwargs)


WRAPS = {
    "alone": None,
    "wrapped": lambda ours, faults: Watching(ours),
    "plainly wrapped": lambda ours, faults: keras_mp.OptimizerWrapper(ours),
    "wrapped by what breaks": lambda ours, faults: breaking(Watching(ours), faults),
}


@pytest.mark.parametrize(
    ("call", "wrap", "mode"),
    pairs(["scale_loss", "get_scaled_loss", "by hand"], WRAPS, ["eager", "function", "jit"]),
)
def test_gradients_are_applied_again(name, call, wrap, mode):
    program = Program(name, WRAPS[wrap])

    def apply(gradients):
        program.apply(gradients, **({"scaled": True} if call == "by hand" else {}))

    apply = placed(mode, apply)
    for _ in range(2):
        gradients = [tf.constant(0.5 * SCALE)] if call == "by hand" else program.compute(call)
        if call == "get_scaled_loss":
            gradients = program.ours.get_unscaled_gradients(gradients)
        weight = float(program.v)
        if program.v == 1 or mode == "eager":
            program.raises(apply, gradients)
        apply(gradients)
        assert float(program.v) == weight - 0.5
    program.whole_step()


def test_an_operation_that_fails_when_a_function_runs(name):
    program, is_broken = Program(name), tf.Variable(False)

    class Asserting(type(program.ours.inner_optimizer)):
        def apply_gradients(self, *args, **kwargs):
            with tf.control_dependencies([tf.debugging.Assert(~is_broken, [BROKEN])]):
                return super().apply_gradients(*args, **kwargs)

    program.ours.inner_optimizer.__class__ = Asserting
    apply = tf.function(program.apply)
    apply(program.compute("scale_loss"))
    gradients = program.compute("scale_loss")
    is_broken.assign(True)
    with pytest.raises(tf.errors.InvalidArgumentError):
        apply(gradients)
    is_broken.assign(False)
    apply(gradients)
    assert float(program.v) == 0


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("call", ["minimize", "compute_gradients", "hooks", "callable"])
def test_a_loss_raises_between_the_calls_of_a_step(name, call, mode):
    program = Program(name)
    if call == "hooks":

        class Hooked(type(program.ours)):
            def compute_gradients(self, *args, **kwargs):
                return super().compute_gradients(*args, **kwargs)

        program.ours.__class__, call = Hooked, "minimize"

    def make():
        if call == "callable":
            program.ours.scale_loss(program.loss)()
        else:
            getattr(program.ours, call)(program.loss, [program.v])

    gradients = program.compute("scale_loss")
    program.raises(make if mode == "eager" else tf.function(make))
    program.apply(gradients)
    assert float(program.v) == 0.5
    scaled = program.compute("get_scaled_loss")
    program.raises(make if mode == "eager" else tf.function(make))
    unscaled = program.ours.get_unscaled_gradients(scaled)
    program.raises(make if mode == "eager" else tf.function(make))
    program.apply(unscaled)
    assert float(program.v) == 0
    program.whole_step()


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_wrong_arguments_are_no_calls(name, mode):
    program = Program(name)
    ours, v = program.ours, program.v
    wrong = [
        lambda: ours.scale_loss(tf.constant(1)),
        lambda: ours.get_scaled_loss([1.0]),
        lambda: ours.get_unscaled_gradients("abc"),
        lambda: ours.apply_gradients([(tf.constant(1.0), None)]),
        lambda: ours.apply_gradients([(None, v)]),
        lambda: ours.apply([tf.constant(1.0)] * 2, [v]),
        lambda: ours.minimize(lambda: tf.constant(1), [v]),
        lambda: ours.minimize(None, [v]),
        lambda: ours.compute_gradients(lambda: "abc", [v]),
    ]
    for i, call in enumerate(wrong):
        gradients = program.compute("scale_loss")
        errors = (TypeError, ValueError, AttributeError)
        program.raises(call if mode == "eager" else tf.function(call), error=errors)
        program.apply(gradients)
        assert float(v) == 1 - 0.5 * (i + 1), i


def test_a_warning_that_is_an_error(name):
    program = Program(name)
    scaled = program.compute("get_scaled_loss")
    program.raises(program.apply, scaled, error=keras_mp.MixedPrecisionWarning)
    program.apply(program.ours.get_unscaled_gradients(scaled))
    assert float(program.v) == 0.5
    program.raises(program.apply, [tf.constant(0.5)], error=keras_mp.MixedPrecisionWarning)
    program.whole_step()


@once
def test_a_tape_beside_scale_moves_nothing(name):
    scaler, v = keras_mp.GradScaler(keras_mp.DynamicLossScale(2.0**20)), tf.Variable(3.0)
    scaler.scale(v)
    with keras_mp.LossScaleGradientTape(scaler, persistent=True) as tape:
        loss = tf.cast(tf.cast(v, tf.float16) ** 2, tf.float32)
    with pytest.raises(ValueError, match="makes it unclear what is scaled"):
        tape.gradient(loss, v)
    assert float(scaler.loss_scale()) == 2.0**20


@pytest.mark.parametrize(
    ("wrapper", "dtype"),
    [(keras_mp.AllReduceOptimizer, "float32"), (keras_mp.MasterWeightOptimizer, "bfloat16")],
)
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_other_wrappers(name, wrapper, dtype, mode):
    faults = Faults()
    inner = breaking(make_optimizer(name, 0.5, momentum=0.5), faults)
    v = tf.Variable(1.0, dtype=dtype)
    optimizer = wrapper(inner)
    optimizer.build([v])

    def step():
        optimizer.apply_gradients([(tf.constant(0.5, dtype), v)])

    before = [value(each) for each in (v, *optimizer.variables)]
    faults.armed = True
    with pytest.raises(RuntimeError, match=BROKEN):
        (step if mode == "eager" else tf.function(step))()
    assert_all_equal((v, *optimizer.variables), before)
    (step if mode == "eager" else tf.function(step))()
    assert float(v) == 0.75


@pytest.mark.parametrize("nested", [False, True])
def test_a_training_step_that_raises_puts_back_what_the_forward_pass_wrote(name, nested):
    program, other = Program(name), tf.Module()
    statistic, other.diverged = tf.Variable(0.0, trainable=False), tf.Variable(np.nan)

    def step():
        watched = keras_mp.training_step(statistic, [program.v], other)
        with watched, contextlib.ExitStack() as stack:
            if nested:
                stack.enter_context(keras_mp.training_step(program.v))
            statistic.assign_add(1.0)
            program.apply(program.compute("scale_loss"))

    program.raises(step)
    assert float(statistic) == 0
    step()
    assert (float(statistic), float(program.v)) == (1, 0.5)


def test_a_weight_of_another_shape_hides_no_exception(name):
    del name
    module = tf.Module()
    module.grows = tf.Variable([0.0, 0.0], shape=[None])

    def step():
        with keras_mp.training_step(module):
            module.grows.assign([1.0, 2.0, 3.0])
            raise RuntimeError(BROKEN)

    with pytest.raises(RuntimeError, match=BROKEN):
        step()


def in_threads(count, run):
    """Calls `run(i, meet)` in so many threads at once; `meet` waits for all of them."""
    barrier = threading.Barrier(count)

    def start(i):
        try:
            run(i, lambda: barrier.wait(60))
        except BaseException:
            barrier.abort()
            raise

    with futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(start, range(count)))


@pytest.mark.parametrize("in_functions", [False, True])
@once
def test_threads_of_one_scaler(name, in_functions):
    count, rounds, scaler = 4, 30, keras_mp.GradScaler(4.0)
    variables = [tf.Variable(100.0) for _ in range(count)]
    optimizers = [tf.compat.v1.train.GradientDescentOptimizer(1.0) for _ in range(count)]
    unscale = [lambda g, o=o: scaler.unscale([g], o)[0] for o in optimizers]
    step = [lambda g, o=o, v=v: scaler.step(o, [(g, v)]) for o, v in zip(optimizers, variables)]
    if in_functions:
        unscale, step = ([tf.function(each) for each in calls] for calls in (unscale, step))
    # Traced before, one after the other.
    scaler.scale(tf.constant(1.0))
    for i in range(count):
        assert bool(step[i](unscale[i](tf.constant(4.0))))

    def run(i, meet):
        for _ in range(rounds):
            meet()
            if i == 0:  # The others wait.
                scaler.update()
                scaler.scale(tf.constant(1.0))
            meet()
            gradient = unscale[i](tf.constant(4.0))
            meet()
            assert bool(step[i](gradient))

    in_threads(count, run)
    assert [float(v) for v in variables] == [100 - (rounds + 1)] * count


def test_each_thread_makes_its_own_steps_with_an_optimizer(name):
    optimizer = keras_mp.LossScaleOptimizer(make_optimizer(name, 1.0, momentum=0.0), SCALE)
    variables, rounds = [tf.Variable(100.0) for _ in range(2)], 20
    optimizer.build(variables)

    def run(i, meet):
        v, calls = variables[i], (steps.KERAS_3, steps.RFC)[i]
        compute, apply = steps.halves(optimizer, lambda: v * 0.5, [v], calls[:1])
        for _ in range(rounds):
            meet()
            gradients = compute()
            meet()
            if calls[1:]:
                gradients = optimizer.get_unscaled_gradients(gradients)
            meet()
            apply(gradients)

    in_threads(2, run)
    assert [float(v) for v in variables] == [100 - 0.5 * rounds] * 2


def graphs_alive():
    """Those that the garbage collector has left."""
    return {id(each): each for each in gc.get_objects() if isinstance(each, tf.Graph)}


# What XLA compiles may keep messages that wait for Python: of one engine for each kind of calls.
@pytest.mark.parametrize(
    ("kind", "jit_compile"),
    [
        *((kind, False) for kind in ("rfc", "keras_3", "minimize", *steps.SCALERS, "replicas")),
        *(("keras_3", True), ("scaler", True)),
    ],
)
def test_no_graph_is_kept_alive(name, kind, jit_compile):
    strategy = mirrored(2) if kind == "replicas" else tf.distribute.get_strategy()
    with strategy.scope():
        v, make = tf.Variable(1.0), functools.partial(make_optimizer, name)
        way = "minimize" if kind == "replicas" else kind
        of_replica = steps.with_scale(way, "dynamic", lambda factor: v * factor, [v], make=make)

    def step(factor):
        strategy.run(of_replica, (factor,))

    function = tf.function(step, jit_compile=jit_compile)
    for is_last in (False, True):  # What is made once, and stays, is made in the first round.
        before = graphs_alive() if is_last else {}
        for factor in (1.0, np.nan):
            function(tf.constant(factor))
        concrete = function.get_concrete_function(tf.TensorSpec([], tf.float32))
        graph = weakref.ref(concrete.graph)
        assert graph() is not None
        del concrete
        function = tf.function(lambda factor: step(factor), jit_compile=jit_compile)
        gc.collect()
        assert graph() is None
    left = [each for key, each in graphs_alive().items() if key not in before]
    assert left == []


def test_fit_keeps_no_graph_alive(name):
    def fit(policy):
        keras_mp.set_global_policy(policy)
        model = compiled_model(optimizer=make_optimizer(name))
        x = np.ones([8, 2], "float32")
        model.fit(x, x[:, :1], batch_size=4, verbose=0)
        model.fit(x * np.nan, x[:, :1], batch_size=4, verbose=0)

    def left_by(policy):
        fit(policy)
        gc.collect()
        before = graphs_alive()
        fit(policy)
        gc.collect()
        left = [each for key, each in graphs_alive().items() if key not in before]
        return sum(isinstance(each, tf.__internal__.FuncGraph) for each in left)

    assert left_by("mixed_float16") <= left_by("float32")
