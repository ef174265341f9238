"""The first operation whose result is not finite is named, and what is planned goes on."""

import contextlib
import math
import weakref

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import record  # to see what is left behind
from tensorflow.python.framework import op_callbacks

import keras_mp
from tests import common, steps
from tests.numerics.tools import ExponentHistograms, audit, of_keras, sequential

L = tf.keras.layers
NotFiniteError, watch = keras_mp.numerics.NotFiniteError, keras_mp.numerics.watch


def named(run, *watched, **how):
    """The error that a block raises for what runs in it."""
    with pytest.raises(NotFiniteError) as raised, watch(*watched, **how):
        run()
    return raised.value


def program(**kwargs):
    @tf.function(**kwargs)
    def step(x):
        masked = tf.where(x > 0, tf.math.log(x), 0.0)
        return tf.reduce_sum(tf.exp(masked * 100))

    return step


@common.once
@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_operation_its_line_and_its_inputs(jit_compile):
    step = program(jit_compile=jit_compile)
    with watch():
        # The logarithm of zero goes nowhere.
        assert step(tf.constant([0.0, 1.0])) == 2
        with pytest.raises(NotFiniteError) as raised:
            step(tf.constant([0.0, 3.0]))
    bad = raised.value.operation
    assert (bad.operation, bad.dtype, bad.bad, bad.is_gradient) == ("Exp", "float32", 1, False)
    assert (bad.low, bad.high) == (1, 1)
    assert bad.line.startswith("test_first_bad_operation.py:")
    [given] = raised.value.inputs
    assert (given.operation, given.low) == ("Mul", 0)
    assert given.high == pytest.approx(100 * math.log(3))
    assert "in the forward pass:\n  Exp (float32, test_first_bad_operation.py:" in str(raised.value)


@common.once
def test_nothing_is_left_behind():
    step = program()
    with pytest.raises(ZeroDivisionError), watch():
        raise ZeroDivisionError
    assert tf.executing_eagerly()
    assert not op_callbacks.should_invoke_op_callbacks()
    assert np.isinf(step(tf.constant([3.0])))
    nothing = pytest.warns(keras_mp.MixedPrecisionWarning, match="has seen no operation")
    with nothing, watch():
        step(tf.constant([3.0]))


@common.once
def test_one_block_at_a_time():
    with watch():
        with pytest.raises(RuntimeError, match="one `watch` block at a time"), watch():
            pass
        # The outer one goes on.
        with pytest.raises(NotFiniteError):
            program()(tf.constant([3.0]))


@common.once
def test_loops_and_branches():
    @tf.function
    def step(x):
        for i in tf.range(4):
            x = x * x * 1e30 if i == 2 else x + 1
        return x

    found = named(lambda: step(tf.constant(1e8))).operation
    assert found.operation == "Mul"
    assert found.layer.startswith("while")

    @tf.function
    def of_a_branch(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(x < 1.0, lambda: tf.sqrt(x), lambda: x)
        return tape.gradient(y, x)

    found = named(lambda: of_a_branch(tf.constant(0.0))).operation
    assert found.operation == "SqrtGrad"
    assert found.is_gradient


@common.once
def test_bad_inputs_and_bad_weights_are_named_themselves():
    weight = tf.Variable(math.nan, name="weight")
    step = tf.function(lambda x: x * 2 + weight)
    assert named(lambda: step(tf.constant(math.inf))).operation.operation == "Placeholder"
    step = tf.function(lambda x: tf.cast(x, tf.float16) * 2)
    passed_in = pytest.raises(NotFiniteError, match="already not finite when it was passed in")
    with watch():
        with passed_in as raised:
            step(tf.constant(math.nan))
        assert raised.value.operation.operation == "Placeholder"
        # What is not known is not shown.
        assert "none finite, 1 not finite" in str(raised.value)
        assert not any(text in str(raised.value) for text in ("Its inputs", " inf"))
        with pytest.raises(NotFiniteError) as raised:
            step(tf.constant(1e6))
        assert raised.value.operation.operation == "Cast"
        assert raised.value.inputs[0].high == 1e6
    step = tf.function(lambda x: x * 2 + weight)
    found = named(lambda: step(tf.constant(1.0))).operation
    assert (found.operation, found.bad) == ("ReadVariableOp", 1)


def test_what_it_can_watch_the_scale_of():
    with pytest.raises(TypeError, match="Received: 'x'"):
        watch(optimizer="x")
    optimizer = keras_mp.LossScaleOptimizer("sgd")
    watch(None, [optimizer, tf.keras.optimizers.SGD(), keras_mp.GradScaler()])
    watch(tf.keras.Sequential([L.Dense(1)]))


def infinite(x):
    with tf.name_scope("near"):
        y = tf.math.log(x)
    with tf.name_scope("far"):
        return tf.reduce_sum(tf.sin(y))


@common.once
@pytest.mark.parametrize("how", ["eager", "function"])
def test_operations_to_look_at_and_to_leave_out(how):
    def first(**kwargs):
        step = infinite if how == "eager" else tf.function(infinite)
        return named(lambda: step(tf.constant([0.0, 1.0])), **kwargs).operation.operation

    assert first() == "Log"
    # What comes of an operation that is left out is not.
    assert first(exclude="Log") == "Sin"
    assert first(exclude=["near*"]) == "Sin"
    assert first(exclude=["Log", "Sin"]) == "Sum"
    assert first(include="far*") == "Sin"
    assert first(include=["far*"], exclude=["Sin"]) == "Sum"
    with watch(include=["near*"], exclude=["Log"]) as watching:
        infinite(tf.constant([0.0, 1.0]))
    assert watching.found == []
    with pytest.raises(TypeError, match="for `exclude`. Received: \\[3\\]"):
        watch(exclude=[3])


@common.once
def test_what_is_found_is_told_once_and_the_program_goes_on():
    step = tf.function(infinite)
    told = pytest.warns(keras_mp.MixedPrecisionWarning, match="  Log in near .* 1 not finite")
    with told as warnings, watch(raises=False) as watching:
        for _ in range(3):
            assert np.isnan(step(tf.constant([0.0, 1.0])))
        assert step(tf.constant([1.0, 1.0])) == 0
        infinite(tf.constant([-1.0, 1.0]))
    assert len(warnings) == 1
    assert [each.operation.operation for each in watching.found] == ["Log"]


@common.once
def test_eager_code_stops_where_it_is_checked():
    with watch() as watching:
        x = tf.nn.softmax(tf.constant([-math.inf, 1.0]) * 2)
        watching._check()
        tf.sqrt(-x)
        with pytest.raises(NotFiniteError) as raised:
            watching._check()
        assert (raised.value.operation.operation, raised.value.operation.bad) == ("Sqrt", 1)
        watching._check()


@common.once
def test_what_eager_code_gives_to_a_function_is_seen_there():
    step = tf.function(lambda x, mask: tf.nn.softmax(x + mask))
    with watch():
        mask = tf.constant([1.0, 0.0]) * 1e38 * -10
        for _ in range(2):
            assert step(tf.constant([1.0, 2.0]), mask).numpy().tolist() == [0, 1]


@common.once
@pytest.mark.filterwarnings("ignore:The loss scale has come down to its floor")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_it_goes_on_while_the_loss_scale_falls(jit_compile):
    weight = tf.Variable([1.0, 2.0])
    scale = keras_mp.DynamicLossScale(2.0**14, min_loss_scale=2.0**12)
    optimizer = keras_mp.LossScaleOptimizer("sgd", scale)

    def loss(factor):
        return tf.reduce_sum(tf.cast(weight, tf.float16) * tf.cast(factor, tf.float16))

    step = tf.function(steps.rfc(optimizer, loss, [weight]), jit_compile=jit_compile)
    with watch(optimizer=optimizer) as watching:
        step(tf.constant(8.0))  # 2**17 is too much, and so is 2**16.
        step(tf.constant(8.0))
        assert (watching.planned, float(scale())) == (2, 2.0**12)
        step(tf.constant(8.0))
        assert watching.planned == 2
        with pytest.raises(NotFiniteError) as raised:
            step(tf.constant(100.0))
        assert raised.value.operation.is_gradient
        # Not planned: the loss itself.
        with pytest.raises(NotFiniteError) as raised:
            step(tf.constant(60_000.0))
        assert not raised.value.operation.is_gradient


@common.once
def test_it_goes_on_with_several_steps_per_execution():
    scale = keras_mp.DynamicLossScale(2.0**14, min_loss_scale=2.0**10)
    layers = L.Dense(1, kernel_initializer="ones", dtype="mixed_float16"), L.Activation("linear")
    how = {"optimizer": keras_mp.LossScaleOptimizer("sgd", scale), "jit_compile": False}
    model = sequential(*layers, shape=[1], steps_per_execution=2, **how)
    # The gradient of the first step is too large with this scale, and the second's is not.
    x = np.array([[4], [0]], "float32")
    with watch(model) as watching:
        model.fit(x, np.zeros([2, 1]), batch_size=1, shuffle=False, verbose=0)
        assert watching.planned == 1
        # Not planned: what is computed of the input, in the first of two steps.
        x[0] = 1e30
        with pytest.raises(NotFiniteError) as raised:
            model.fit(x, np.zeros([2, 1]), batch_size=1, shuffle=False, verbose=0)
    assert not raised.value.operation.is_gradient


@common.once
def test_without_a_scale_the_advice_is_to_pass_it():
    weight = tf.Variable([0.0, 1.0])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sqrt(weight))
        weight.assign_sub(tape.gradient(loss, weight))

    error = named(step)
    assert "pass the model or the optimizer" in str(error)
    assert error.operation.operation == "SqrtGrad"
    # The line of the square root, not the one that asks for the gradient.
    line = step.python_function.__code__.co_firstlineno + 3
    assert error.operation.line == f"test_first_bad_operation.py:{line}"


def test_on_replicas():
    strategy = common.mirrored(2)

    @tf.function
    def both():
        def replica_step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return tf.exp(tf.gather([0.5, 3.0], replica) * 100)

        return strategy.run(replica_step)

    error = named(both)
    assert "CPU:1" in str(error)
    assert error.device.endswith("CPU:1")
    assert error.operation.operation == "Exp"


@common.once
def test_fit_on_replicas_does_not_blame_what_they_have_in_common():
    with common.mirrored(2).scope():
        model = tf.keras.Sequential([tf.keras.Input([2]), L.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    x = np.ones([4, 2], "float32")
    x[3] = math.inf
    fit = lambda: model.fit(x, np.zeros([4, 1]), 4, shuffle=False, verbose=0)  # noqa: E731
    error = named(fit, model)
    assert (error.operation.operation, error.operation.bad) == ("IteratorGetNext", 2)
    assert "when it was passed in" in str(error)


@common.once
def test_what_is_not_watched_is_said(monkeypatch):
    monkeypatch.setattr(keras_mp.numerics.operation_table, "CAPACITY", 8)
    warned = pytest.warns(keras_mp.MixedPrecisionWarning, match="at 8 operations .* found noth")
    with warned, watch():
        tf.function(lambda x: tf.sqrt(x) * 2 + tf.exp(x) * tf.sin(x) - tf.cos(x))(tf.constant(1.0))


class Zero(L.Layer):
    def call(self, x):
        return x / tf.reduce_max(tf.abs(x), -1, keepdims=True)


def nested(**kwargs):
    """A model with a layer that is called twice, and a model inside, in which 0 / 0 is computed."""
    inner = tf.keras.Sequential([L.Dense(4, name="dense"), Zero(name="zero")], name="inner")
    inputs, shared = tf.keras.Input([4]), L.Dense(4, name="dense")
    model = tf.keras.Model(inputs, L.Dense(1, name="last")(inner(shared(shared(inputs)))))
    model.compile("sgd", "mse", **kwargs)
    return model


@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(how, marks=common.once) for how in ("several steps", "replicas")),
        *("function", "eager"),
    ],
)
def test_the_path_of_a_layer(how):
    x, y = np.ones([8, 4], "float32"), np.zeros([8, 1], "float32")
    x[1] = 0
    with common.mirrored(2).scope() if how == "replicas" else contextlib.nullcontext():
        compiled = {"jit_compile": False} if how in ("several steps", "replicas") else {}
        model = nested(steps_per_execution=2 if how == "several steps" else 1, **compiled)
    size = 4 if how == "several steps" else 8
    run = {"function": lambda: tf.function(model)(x), "eager": lambda: model(x)}.get(
        how, lambda: model.fit(x, y, size, shuffle=False, verbose=0)
    )
    error = named(run, model)
    assert (error.operation.operation, error.operation.layer) == ("RealDiv", "inner/zero")
    if how != "several steps":  # the second of which is bad from the beginning
        assert {"dense", "inner/dense"} <= {each.layer for each in error.history}
    assert not any("call" in vars(layer) for layer in model.layers)
    if how == "several steps":  # which are quick again after it
        assert model.train_function is None


@tf.custom_gradient
def divided_backwards(x, by):
    return tf.identity(x), lambda upstream: (upstream / by, None)


class DividesBackwards(L.Layer):
    def __init__(self, by, **kwargs):
        super().__init__(**kwargs)
        self.by = by

    def call(self, x):
        return divided_backwards(x, tf.constant(self.by, x.dtype))


@pytest.mark.parametrize("how", ["fit", "fit with XLA", "function", "eager"])
def test_the_layer_of_a_custom_gradient(how):
    healthy, bad = DividesBackwards(2.0, name="healthy"), DividesBackwards(0.0, name="bad")
    layers = [L.Dense(2, name="first"), bad, healthy, L.Dense(1, name="last")]
    model = tf.keras.Sequential([tf.keras.Input([2]), *layers])
    model.compile("sgd", "mse", jit_compile=how == "fit with XLA")
    x, y = np.ones([4, 2], "float32"), np.zeros([4, 1], "float32")

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return tape.gradient(loss, model.trainable_variables)

    run = {"function": tf.function(step), "eager": step}.get(
        how, lambda: model.fit(x, y, batch_size=4, verbose=0)
    )
    found = named(run, model).operation
    assert (found.operation, found.layer, found.is_gradient) == ("RealDiv", "bad", True)
    assert found.line.startswith("test_first_bad_operation.py:")
    before = record.record_operation
    with watch(model):
        tf.identity(1.0)
    assert record.record_operation is before
    assert not hasattr(before, "__wrapped__")


@common.once
def test_the_results_of_a_block_are_the_programs_to_drop():
    with watch():
        dropped = weakref.ref(tf.ones([2]) * 2)
        assert dropped() is None


# Where operations come from.


class Model(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.first = L.Dense(4, kernel_initializer="identity")
        self.probabilities = L.Softmax(name="probabilities", dtype=of_keras())

    def call(self, x):
        return self.probabilities(self.first(x))


def log_loss(y, p):
    return -tf.reduce_sum(y * tf.math.log(tf.maximum(tf.cast(p, tf.float32), 1e-7)), -1)


def test_the_line_of_what_keras_computes_is_not_that_which_calls_the_layer():
    with keras_mp.policy_scope(keras_mp.Policy("mixed_float16", model_outputs=None)):
        model = Model()
        model.compile("sgd", log_loss)
    x, y = tf.one_hot([1] * 8, 4) * 20, tf.one_hot([0] * 8, 4)
    [finding] = audit(model, (x, y)).findings
    assert (finding.where, finding.line) == ("probabilities", None)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_layer_for_raw_data_is_seen_in_float32_and_passes_on_what_was_not_rounded(in_graph):
    keras_mp.set_global_policy("mixed_float16")
    first, second = L.Rescaling(1e6, name="first"), L.Rescaling(1e-6, name="second")
    model = sequential(first, second, L.ReLU(), shape=[2])  # The last one rounds nothing.
    paths = ["first", "second"]
    counted = ExponentHistograms(model, every=1, gradients=False, output_gradients=paths)

    def step(x):
        with counted.step():
            return model(x)

    x = tf.constant([[1.0, 3.0]])
    assert (tf.function(step) if in_graph else step)(x).numpy().tolist() == x.numpy().tolist()
    report = counted.read()
    assert [report["output", path].dtype for path in paths] == ["float32"] * 2
