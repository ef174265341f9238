"""A skipped step leaves no trace in weights that the forward pass assigns to."""

import contextlib
import gc
import warnings
import weakref
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.step import state_rollback
from tests import steps
from tests.common import IS_KERAS_3, assert_all_equal, mirrored, once, placed, value
from tests.models import FAMILIES, make_optimizer

layers = tf.keras.layers
FLOAT32 = "float32"


class Seen(layers.Layer):
    """Assigns in `call`: with an addition that reads nothing before, and with a whole value."""

    def build(self, shape):
        dtypes = {"count": "int64", "total": FLOAT32, "last": FLOAT32}
        self.count, self.total, self.last = (
            self.add_weight(shape=(), dtype=dtype, initializer="zeros", trainable=False, name=name)
            for name, dtype in dtypes.items()
        )

    def call(self, inputs):
        self.count.assign_add(1)
        self.total.assign_add(tf.reduce_sum(tf.cast(inputs, FLOAT32)))
        self.last.assign(tf.reduce_max(tf.cast(inputs, FLOAT32)))
        return inputs


def make_model(cls=tf.keras.Sequential, between=()):
    tf.keras.utils.set_random_seed(0)
    head = [tf.keras.Input([4]), layers.Dense(4), layers.BatchNormalization(momentum=0.5), Seen()]
    return cls([*head, *(make() for make in between), layers.Dense(1)])


def normalized():
    """One that assigns to a weight that is trained, too."""
    return layers.SpectralNormalization(layers.Dense(3))


def data(batches=4, bad=()):
    """Batches of 4, of which some hold a NaN."""
    x = np.random.default_rng(0).normal(size=(4 * batches, 4)).astype(FLOAT32)
    x[[4 * i for i in bad], 0] = np.nan
    return x, x[:, :1]


def without(batches, bad):
    """The same data without the batches that have a NaN."""
    x, y = data(batches)
    keep = np.repeat([i not in bad for i in range(batches)], 4)
    return x[keep], y[keep]


def fit(model, x, y, name="new.SGD", policy="mp", **options):
    if policy == "mp":
        optimizer = keras_mp.LossScaleOptimizer(
            make_optimizer(name), keras_mp.DynamicLossScale(2.0**10)
        )
    else:
        optimizer = make_optimizer(name)
    model.compile(optimizer, "mse", **options)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return model


def assert_same(model, expected):
    got, expected = ([value(w) for w in m.weights] for m in (model, expected))
    for weight, a, b in zip(model.weights, got, expected, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=weight.name)


@pytest.mark.parametrize(
    ("mode", "between", "name"),
    [
        *(({}, [], name) for name in FAMILIES),
        *(({"run_eagerly": True}, [], FAMILIES[0]), ({"jit_compile": True}, [], FAMILIES[0])),
        *(({"steps_per_execution": 2}, [], FAMILIES[0]), ({}, [normalized], FAMILIES[0])),
    ],
)
def test_fit_as_keras_does_without_the_batch(mode, between, name):
    # The last step is made with momentum, or slots, of the ones before.
    model = fit(make_model(between=between), *data(4, bad=[1, 2]), name, **mode)
    assert int(model.optimizer.steps_skipped) == 2
    # Where an update may be skipped, it may be rounded in other places: by XLA, for one.
    policy = "mp" if "jit_compile" in mode or between else "stock"
    control = fit(make_model(between=between), *without(4, [1, 2]), name, policy, **mode)
    assert_same(model, control)
    assert int(value(model.layers[2].count)) == 2


def test_layers_that_the_first_batch_builds():
    model = tf.keras.Sequential([layers.BatchNormalization(), layers.Dense(1)])
    fit(model, *data(1, bad=[0]))
    np.testing.assert_array_equal(model.get_weights()[2:4], [np.zeros(4), np.ones(4)])


class Begin:
    """What a model and its optimizer begin with: a second run needs no trace of its own."""

    def __init__(self, model, optimizer):
        self.variables = [*model.weights, *optimizer.variables]
        self.values = [value(v) for v in self.variables]

    def again(self):
        for variable, begin in zip(self.variables, self.values):
            variable.assign(begin)


@pytest.mark.parametrize("eager", [False, True])
def test_a_nan_on_one_replica_of_two(eager):
    with mirrored(2).scope():
        model = make_model()
        optimizer = keras_mp.LossScaleOptimizer(
            make_optimizer("new.SGD"), keras_mp.DynamicLossScale(2.0**10), False
        )
        model.compile(optimizer, "mse", run_eagerly=eager)
        optimizer.build(model.trainable_variables)
    begin, weights = Begin(model, optimizer), []
    for x, y in (data(6, bad=[3]), without(6, [2, 3])):
        begin.again()
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        weights.append([value(v) for v in of_replicas(model)])
    assert len(weights[0]) == 2 * len(model.weights)
    assert_all_equal(*weights)
    assert int(optimizer.steps_skipped) == 1


def of_replicas(model):
    weights = [w.value if IS_KERAS_3 else w for w in model.weights]
    return [v for w in weights for v in mirrored(2).experimental_local_results(w)]


class Counting(tf.keras.Sequential):
    """Has a `train_step` and a metric of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mean = tf.keras.metrics.Mean(name="mean")

    def train_step(self, data):
        self.mean.update_state(1.0)
        return super().train_step(data)


def test_train_step_of_ones_own():
    models = []
    for policy in ("mp", "stock"):
        model = fit(make_model(Counting), *data(4, bad=[1, 3]), policy=policy)
        model.fit(*data(4), batch_size=4, verbose=0)
        models.append(model)
    assert [int(value(model.layers[2].count)) for model in models] == [6, 8]
    assert [float(model.mean.count) for model in models] == [4, 4]  # Metrics tell what happened.


class Function(tf.keras.Sequential):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


@once
def test_train_step_that_is_a_function():
    # What is assigned to there without having been read is not known.
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="seen.*/last'.* in a tf.function"):
        model = fit(make_model(Function), *data(2, bad=[1]))
    expected = fit(make_model(), *without(2, [1]))
    for layer, other in zip(model.layers[:2], expected.layers[:2], strict=True):
        assert_same(layer, other)


def own_step(calls, between=()):
    """A model, its optimizer, and a step of one's own."""
    model = make_model(between=between)
    optimizer = keras_mp.LossScaleOptimizer(make_optimizer("new.SGD"))
    optimizer.build(model.trainable_variables)

    def loss(x, y):
        return tf.reduce_mean((model(x, training=True) - y) ** 2)

    return model, optimizer, steps.WAYS[calls](optimizer, loss, model.trainable_variables)


def own_loop(mode="eager", calls="rfc", between=()):
    """A model, its optimizer, and a step in a `training_step`."""
    model, optimizer, make = own_step(calls, between)

    def step(x, y):
        with keras_mp.training_step(model):
            make(x, y)

    return model, optimizer, placed(mode, step)


@pytest.mark.parametrize(
    ("mode", "calls"),
    [("eager", "rfc"), ("function", "minimize_tensor"), ("function", "keras_3"), ("jit", "rfc")],
)
def test_own_loops(mode, calls):
    model, optimizer, step = own_loop(mode, calls, [normalized] if mode == "eager" else [])
    begin, weights = Begin(model, optimizer), []
    for x, y in (data(4, bad=[1, 2]), without(4, [1, 2])):
        begin.again()
        for i in range(0, len(x), 4):
            step(tf.constant(x[i : i + 4]), tf.constant(y[i : i + 4]))
        weights.append([value(w) for w in model.weights])
    assert_all_equal(*weights)
    assert int(optimizer.steps_skipped) == 2


@once
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_two_optimizers_in_one_step(mode):
    statistic, weights = tf.Variable(0.0, trainable=False), [tf.Variable(1.0) for _ in range(2)]
    optimizers = [keras_mp.LossScaleOptimizer("sgd") for _ in weights]
    for optimizer, weight in zip(optimizers, weights):
        optimizer.build([weight])

    def step(bad):
        with keras_mp.training_step(statistic, weights):
            for i, (optimizer, weight) in enumerate(zip(optimizers, weights)):
                with tf.GradientTape() as tape:
                    statistic.assign(0.5 * statistic + 1.0)
                    loss = weight * tf.where(bad == i, np.nan, 1.0)
                optimizer.minimize(loss, [weight], tape=tape)

    step = placed(mode, step)
    for bad in (0, 1):  # Each of the two is skipped once.
        step(tf.constant(bad))
    assert float(statistic) == 1.5
    assert [int(optimizer.steps_skipped) for optimizer in optimizers] == [1, 1]


@once
def test_steps_in_branches_and_in_bodies_of_loops():
    v, seen = tf.Variable(1.0), tf.Variable(1.0, trainable=False)
    optimizer = keras_mp.LossScaleOptimizer("sgd")
    compute, apply = steps.halves(optimizer, lambda x: v * x, [v], steps.RFC)
    optimizer.build([v])

    def step(x, is_applied):
        with keras_mp.training_step(v, seen):
            seen.assign_add(x)
            gradients = compute(x)
            if is_applied:
                apply(gradients)

    branching = tf.function(step)
    for x, is_applied in ((1.0, True), (np.inf, True), (2.0, False), (4.0, True)):
        branching(tf.constant(x), tf.constant(is_applied))
    assert float(seen) == 8
    assert int(optimizer.steps_skipped) == 1

    @tf.function
    def loop(xs):
        for x in xs:
            step(x, True)

    loop(tf.constant([1.0, np.nan, 2.0, np.inf, 4.0]))
    assert float(seen) == 15
    assert int(optimizer.steps_skipped) == 3


@pytest.mark.skipif(not IS_KERAS_3, reason="only Keras 3 accumulates gradients")
@pytest.mark.parametrize("eager", [True, False])
def test_gradients_that_are_accumulated(eager):
    model = make_model()
    sgd = tf.keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
    model.compile(keras_mp.LossScaleOptimizer(sgd), "mse", run_eagerly=eager)
    # The second batch of the first step, and the first one of the third.
    model.fit(*data(6, bad=[1, 4]), batch_size=4, shuffle=False, verbose=0)
    assert int(model.optimizer.steps_skipped) == 2
    assert all(np.isfinite(value(w)).all() for w in model.weights)
    assert int(value(model.layers[2].count)) == 3


def test_a_fixed_scale_skips_nothing():
    model = make_model()
    model.compile(keras_mp.LossScaleOptimizer("sgd", 1), "mse")
    model.fit(*data(1, bad=[0]), verbose=0)
    assert int(value(model.layers[2].count)) == 1


@once
def test_only_what_was_written_is_held():
    # A buffer that is held is copied when it is updated: that must not be all weights.
    model, _, step = own_loop("function")
    graph = step.get_concrete_function(*map(tf.constant, data(1))).graph
    branches = next(op for op in graph.get_operations() if op.type == "If")
    reads = [t.op.inputs[0] for t in branches.inputs if t.op.type == "ReadVariableOp"]
    moving = [v.handle for v in model.layers[1].non_trainable_variables]
    captured = {id(outside): inside for outside, inside in graph.captures}
    assert {t.name for t in reads} >= {captured[id(h)].name for h in moving}
    trained = {captured[id(v.handle)].name for v in model.trainable_variables}
    assert not trained & {t.name for t in reads}


@once
def test_nothing_is_held_in_eager_while_a_step_is_made(monkeypatch):
    model, optimizer, step = own_loop()
    held, sizes, keep = [], [], state_rollback.StepUnderWay.keep
    note = lambda given: sizes.append(len(held[0][0])) or given  # noqa: E731
    of_keep = lambda *args: held.append(keep(*args)) or note(held[0])  # noqa: E731
    monkeypatch.setattr(state_rollback.StepUnderWay, "keep", of_keep)
    inner = optimizer.inner_optimizer
    apply = lambda pairs, f=inner.apply_gradients: f(note(pairs))  # noqa: E731
    with mock.patch.object(inner, "apply_gradients", apply):
        step(*map(tf.constant, data(1)))
    assert sizes == [len(model.weights), 0]


@once
def test_a_model_is_not_kept_alive():
    model, optimizer, step = own_loop()
    step(*map(tf.constant, data(1, bad=[0])))
    handle = weakref.ref(model.layers[1].moving_mean.handle)
    del model, optimizer, step
    gc.collect()
    assert handle() is None


@once
def test_takes_what_has_variables():
    module = tf.Module()
    module.v = tf.Variable(1.0, trainable=False)
    layer = layers.Dense(1)
    layer.build([None, 1])
    for models in ((module,), (module.v,), ([module, layer], layer), ()):
        with keras_mp.training_step(*models), keras_mp.training_step(layer):
            pass
    for bad in ("model", tf.constant(1.0), None, {"model": layer}, [None]):
        with pytest.raises(TypeError, match="Received: "), keras_mp.training_step(bad):
            pass
    with (
        mirrored(2).scope(),
        pytest.raises(ValueError, match="replica context"),
        keras_mp.training_step(layer),
    ):
        pass


@once
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_an_exception_after_good_steps_leaves_them(mode):
    model, optimizer, step = own_step("keras_3")
    step = placed(mode, step)
    batch = [tf.constant(a) for a in data(1)]
    for interrupted in (KeyboardInterrupt, OSError):
        with contextlib.suppress(interrupted), keras_mp.training_step(model):
            with warnings.catch_warnings():  # A function in the block knows no weights of before.
                warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
                step(*batch)
            step(*batch)
            after = [value(w) for w in model.weights]
            raise interrupted
        assert_all_equal(model.weights, after)
    assert int(value(optimizer.iterations)) == 4


@once
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_an_update_that_raises_leaves_the_good_steps_of_functions(mode):
    model = tf.Module()
    model.v, model.w = tf.Variable(1.0), tf.Variable(1.0)
    model.seen = tf.Variable(0.0, trainable=False)
    first, second = (
        keras_mp.LossScaleOptimizer(make_optimizer("new.SGD", 1.0, momentum=0.0)) for _ in range(2)
    )
    first.build([model.v])
    second.build([model.w])
    good = tf.function(lambda: first.minimize(lambda: model.v * 1.0, [model.v]))
    bad = placed(mode, lambda: second.minimize(lambda: model.w * 1.0, [model.w]))
    good()
    failing = mock.patch.object(second.inner_optimizer, "apply_gradients", side_effect=OSError)
    with contextlib.suppress(OSError), failing as update, keras_mp.training_step(model):
        good()
        model.seen.assign_add(1.0)
        bad()
    assert update.called
    assert (float(model.v), float(model.w), float(model.seen)) == (-1, 1, 1)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_states_of_recurrent_layers_are_put_back(run_eagerly):
    rnn = layers.SimpleRNN(3, stateful=True)
    inputs = tf.keras.Input(batch_shape=(4, 3, 2))
    model = tf.keras.Model(inputs, layers.Dense(1)(rnn(inputs)))
    optimizer = keras_mp.LossScaleOptimizer("sgd", keras_mp.DynamicLossScale(8.0))
    model.compile(optimizer, "mse", run_eagerly=run_eagerly)
    x, y = np.ones([4, 3, 2], "float32"), np.ones([4, 1], "float32")
    model.train_on_batch(x, y)
    before = [value(state) for state in tf.nest.flatten(rnn.states)]
    model.train_on_batch(np.where(np.arange(2) == 1, np.nan, x), y)
    assert_all_equal(tf.nest.flatten(rnn.states), before)
    model.train_on_batch(x, y)
    assert int(model.optimizer.steps_skipped) == 1
