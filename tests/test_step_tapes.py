"""A `train_step` of somebody else, with optimizers that scale nothing, trains as in float32."""

import contextlib
import functools
import warnings
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import (
    IS_KERAS_3,
    Subclassed,
    Weighs,
    distances,
    made,
    mirrored,
    once,
    ours,
    placed,
    unscaled,
    value,
)
from tests.common import MODES as FUNCTION_MODES
from tests.models import FAMILIES, compiled_model, make_optimizer

L = tf.keras.layers

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

# With a loss of this size the gradients of float16 layers are zero, unless it is scaled.
TINY = 1e-7

MODES = {"eager": {"run_eagerly": True}, "graph": {}, "jit": {"jit_compile": True}}
EAGER_AND_GRAPH = ["eager", "graph"]


class Trained(Subclassed):
    """A model with an optimizer of its own and a `train_step` that is given."""

    def __init__(self, step, layers):
        super().__init__(*layers)
        self.step = step

    def compile(self, my_optimizer, **kwargs):
        super().compile(**kwargs)
        self.my_optimizer = my_optimizer

    def loss_of(self, x, y):
        return tf.reduce_mean(tf.square(self(x, training=True) - y)) * TINY

    def train_step(self, data):
        self.step(self, *data)
        return {"made": 1.0}


def dense():
    return [L.Dense(8, "tanh"), L.Dense(1)]


def update(model, tape, loss):
    gradients = tape.gradient(loss, model.trainable_variables)
    model.my_optimizer.apply_gradients(zip(gradients, model.trainable_variables))


def plain(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.loss_of(x, y)
    update(model, tape, loss)


def by_hand(model, x, y):
    steps.taped(model.loss_of, model.trainable_variables, steps.by_hand(1e5))(x, y)


def persistent(model, x, y):
    """Several losses, and a dict of sources."""
    with tf.GradientTape(persistent=True) as tape:
        loss = model.loss_of(x, y)
        decay = TINY * tf.add_n([tf.reduce_sum(tf.square(v)) for v in model.trainable_variables])
    variables = dict(enumerate(model.trainable_variables))
    of_loss, of_decay = tape.gradient(loss, variables), tape.gradient(decay, variables)
    gradients = [of_loss[i] + of_decay[i] for i in variables]
    model.my_optimizer.apply_gradients(zip(gradients, model.trainable_variables))


def penalty(model, x, y):
    """The gradient of a gradient, as a WGAN has it."""
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            out = model(x, training=True)
        norm = tf.norm(inner.gradient(out, x) + 1e-6, axis=1)
        loss = TINY * tf.reduce_mean(tf.square(norm - 1.0)) + model.loss_of(x, y)
    update(model, tape, loss)


def split(model, x, y):
    """The gradient of a part has a shape that TensorFlow does not know in a loop."""
    with tf.GradientTape() as tape:
        parts = tf.split(tf.tile(model(x, training=True), [1, 4]), 2, axis=1)
        loss = TINY * tf.reduce_mean(tf.square(tf.concat(parts[::-1], axis=1) - y))
        loss += TINY * tf.reduce_mean(parts[0] * tf.tanh(parts[1]))
    update(model, tape, loss)


def inside(model, x, y):
    """The tape still records where it is asked."""
    with tf.GradientTape() as tape:
        loss = model.loss_of(x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.my_optimizer.apply_gradients(zip(gradients, model.trainable_variables))


# Several tapes, some of which record while another computes gradients.


def apply(model, *gradients):
    variables = model.trainable_variables
    sums = [sum(parts[1:], parts[0]) for parts in zip(*gradients)]
    model.my_optimizer.apply_gradients(zip(sums, variables))


def one_outlives_the_other(model, x, y):
    variables = model.trainable_variables
    with tf.GradientTape() as first, tf.GradientTape() as second:
        loss = model.loss_of(x, y)
        twice = 2 * loss
        of_second = second.gradient(loss, variables)
    apply(model, first.gradient(twice, variables), of_second)


def among_three(model, x, y):
    variables = model.trainable_variables
    with tf.GradientTape(), tf.GradientTape(persistent=True) as kept, tf.GradientTape() as last:
        loss = model.loss_of(x, y)
        gradients = [tape.gradient(loss, variables) for tape in (last, kept, kept)]
    apply(model, *gradients)


def while_it_records(model, x, y):
    variables = model.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        loss = model.loss_of(x, y)
        gradients = tape.gradient(loss, variables)
        other = model.loss_of(x, y)
    apply(model, gradients, tape.gradient(other, variables))


def while_it_is_stopped(model, x, y):
    variables = model.trainable_variables
    with tf.GradientTape(persistent=True) as kept, tf.GradientTape() as tape:
        loss = model.loss_of(x, y)
        with kept.stop_recording(), tape.stop_recording():
            gradients = [each.gradient(loss, variables) for each in (kept, tape)]
        other = model.loss_of(x, y)
    apply(model, *gradients, kept.gradient(other, variables))


def entered_again(model, x, y):
    variables, tape, gradients = model.trainable_variables, tf.GradientTape(), []
    for _ in range(2):
        with tape:
            loss = model.loss_of(x, y)
        gradients.append(tape.gradient(loss, variables))
    apply(model, *gradients)


def differentiated(model, x, y):
    """The loss has gradients of variables in it, which the outer tape differentiates."""
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            loss = model.loss_of(x, y) / TINY
        gradients = inner.gradient(loss, model.trainable_variables)
        squares = tf.add_n([tf.reduce_sum(tf.square(each)) for each in gradients])
        loss = TINY * (loss + 0.1 * squares)
    update(model, tape, loss)


def adversarial(model, x, y):
    """The signs of gradients that float16 cannot hold."""
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = model.loss_of(x, y)
        loss = model.loss_of(x + 0.5 * tf.sign(inner.gradient(loss, x)), y)
    update(model, tape, loss)


def trained(step, policy, mode, layers=dense, optimizer=None, cls=Trained, **fit):
    """The weights after a few steps, those before them, and the model."""

    def make():
        model = cls(step, layers())
        model(X[:8])
        before = model.get_weights()
        model.compile(optimizer or tf.keras.optimizers.SGD(1e5), **mode)
        model.fit(X, Y, **{"batch_size": 8, "shuffle": False, "verbose": 0, **fit})
        return model.get_weights(), before, model

    return made(make, policy)


def moved(result):
    weights, before, _ = result
    return [a - b for a, b in zip(weights, before)]


@functools.cache
def moved_in_float32(step):
    """How far a step moves the weights in float32, in eager, whatever the mode that is tested."""
    return moved(trained(step, "float32", {"run_eagerly": True}))


def expect_as_in_float32(result, step):
    assert max(distances(moved(result), moved_in_float32(step))) < 0.02


def expect_same_as_in_float32(run, mode="graph"):
    """Compares how far weights have moved with float32, in eager, and mixed_float16, in a mode."""
    exact = moved(run("float32", MODES["eager"]))
    found = moved(run("mixed_float16", MODES[mode]))
    assert max(distances(found, exact)) < 0.02


# What is traced for XLA is what a graph has. It might not compile derivatives of derivatives, and
# shapes that it does not know.
GRAPH = [plain, by_hand, persistent]
COMPILED = [penalty, split, inside, among_three, differentiated, adversarial]
SEVERAL = [one_outlives_the_other, while_it_records, while_it_is_stopped, entered_again]


@pytest.mark.parametrize(
    ("step", "mode"),
    [
        *((step, "eager") for step in (*GRAPH, *COMPILED, *SEVERAL)),
        *((step, "graph") for step in GRAPH),
        *((step, "jit") for step in COMPILED),
    ],
)
def test_an_optimizer_that_scales_nothing_trains_as_in_float32(step, mode):
    expect_as_in_float32(trained(step, "mixed_float16", MODES[mode]), step)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_overflow_are_computed_again(mode):
    policy = keras_mp.Policy("mixed_float16", loss_scale=keras_mp.DynamicLossScale(2.0**60))
    result = trained(plain, policy, MODES[mode])
    expect_as_in_float32(result, plain)
    assert 2.0**30 < float(value(result[2].optimizer.loss_scale.loss_scale)) < 2.0**50


def test_the_optimizer_that_was_given_to_compile():
    given = tf.keras.optimizers.SGD(1e5)

    def step(model, x, y):
        steps.unscaled(given, model.loss_of, model.trainable_variables)(x, y)

    expect_as_in_float32(trained(step, "mixed_float16", {"optimizer": given}), plain)


class FitsTwice(tf.keras.Sequential):
    def fit(self, *args, **kwargs):
        super().fit(*args, **kwargs)
        return super().fit(*args, **kwargs)


@pytest.mark.parametrize("mode", EAGER_AND_GRAPH)
@pytest.mark.parametrize("cls", [tf.keras.Sequential, FitsTwice])
def test_steps_of_keras_with_an_optimizer_that_is_given_or_assigned(cls, mode):
    def run(policy, how):
        with keras_mp.policy_scope(policy):
            tf.keras.utils.set_random_seed(0)
            model = cls([tf.keras.Input((4,)), *dense()])
            before, optimizer = model.get_weights(), tf.keras.optimizers.SGD(1e5)
            given = optimizer if cls is FitsTwice else "sgd"
            model.compile(given, lambda y, p: TINY * tf.reduce_mean(tf.square(y - p)), **how)
            if given == "sgd":
                model.optimizer = optimizer
            model.fit(X, Y, shuffle=False, verbose=0)
        return model.get_weights(), before, model

    expect_same_as_in_float32(run, mode)


def test_a_loss_that_is_multiplied_by_hand_still_has_to_be_divided():
    def step(model, x, y):
        optimizer, variables = model.my_optimizer, model.trainable_variables
        apply = functools.partial(optimizer.apply_gradients, scaled=scaled)
        by_hand = lambda loss: loss * optimizer.loss_scale()  # noqa: E731
        steps.taped(model.loss_of, variables, apply, by_hand)(x, y)

    scaled, optimizer = True, keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(1e5))
    expect_as_in_float32(trained(step, "mixed_float16", {}, optimizer=optimizer), plain)
    scaled, optimizer = False, keras_mp.LossScaleOptimizer("sgd")
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="scaled=True"):
        trained(step, "mixed_float16", {"run_eagerly": True}, optimizer=optimizer)


@pytest.mark.parametrize("is_recorded", [False, True])  # by another tape
def test_sparse_gradients_and_recomputed_layers(is_recorded):
    @tf.recompute_grad
    def recomputed(x):
        return tf.tanh(x)

    def layers():
        table = L.Embedding(8, 4)
        return [L.Lambda(lambda x: tf.cast(tf.abs(x) * 2, tf.int32)), table, *dense()]

    def step(model, x, y):
        other = tf.GradientTape() if is_recorded else contextlib.nullcontext()
        with other, tf.GradientTape() as tape:
            out = recomputed(tf.reduce_mean(model(x), axis=1))
            loss = TINY * tf.reduce_mean(tf.square(out - y))
            gradients = tape.gradient(loss, model.trainable_variables) if is_recorded else ()
        gradients = gradients or tape.gradient(loss, model.trainable_variables)
        assert any(isinstance(each, tf.IndexedSlices) for each in gradients)
        model.my_optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    expect_same_as_in_float32(lambda policy, how: trained(step, policy, how, layers))


# Losses that the program scales by itself.


def by_optimizer(model, x, y):
    steps.keras_3(model.my_optimizer, model.loss_of, model.trainable_variables)(x, y)


def by_optimizer_in_parts(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.loss_of(x, y)
        parts = [model.my_optimizer.scale_loss(part) for part in (0.25 * loss, 0.75 * loss)]
        scaled_loss = tf.add_n(parts)
    update(model, tape, scaled_loss)


def by_optimizer_in_a_function(model, x, y):
    with tf.GradientTape() as tape:
        scaled_loss = tf.function(model.my_optimizer.scale_loss)(model.loss_of(x, y))
    update(model, tape, scaled_loss)


OF_OPTIMIZERS = [by_optimizer, by_optimizer_in_parts, by_optimizer_in_a_function]


def by_scaler(model, x, y):
    optimizer, variables = model.my_optimizer, model.trainable_variables
    way = steps.scaler(optimizer.scaler, optimizer, model.loss_of, variables, steps.SCALERS[1])
    way(x, y)


def by_tape(model, x, y):
    tape = functools.partial(keras_mp.LossScaleGradientTape, 2.0**15)
    apply = model.my_optimizer.apply_gradients
    steps.taped(model.loss_of, model.trainable_variables, apply, tape=tape)(x, y)


@pytest.mark.parametrize("mode", EAGER_AND_GRAPH)
@pytest.mark.parametrize("step", [*OF_OPTIMIZERS, by_scaler, by_tape])
def test_what_the_program_scales_is_not_scaled_again(step, mode):
    optimizer = tf.keras.optimizers.SGD(1e5)
    if step in OF_OPTIMIZERS:
        optimizer = keras_mp.LossScaleOptimizer(optimizer)
    elif step is by_scaler:
        optimizer.scaler = keras_mp.GradScaler()
    # Any other scale than the program's would have to come down.
    policy = keras_mp.Policy("mixed_float16", loss_scale=keras_mp.DynamicLossScale(2.0**60))
    result = trained(step, policy, MODES[mode], optimizer=optimizer)
    expect_as_in_float32(result, plain)
    assert float(value(result[2].optimizer.loss_scale.loss_scale)) == 2.0**60


# Gradients that cannot be scaled exactly.


def jacobian(model, x, y):
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        losses = tf.stack([model.loss_of(x, y), model.loss_of(x, -y)])
    rows = tape.jacobian(losses, variables, experimental_use_pfor=False)
    pairs = [(tf.reduce_mean(row, axis=0), variable) for row, variable in zip(rows, variables)]
    model.my_optimizer.apply_gradients(pairs)


@pytest.mark.parametrize("mode", MODES)
def test_a_warning_where_nobody_scales_has_the_lines_to_add(mode):
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="nobody has scaled") as told:
        trained(jacobian, "mixed_float16", MODES[mode])
    (warning,) = ours(told)
    message = str(warning.message)
    assert "self.my_optimizer = keras_mp.LossScaleOptimizer(self.my_optimizer)" in message
    assert "self.my_optimizer.scale_loss(loss)" in message
    assert "(SGD)" in message
    assert "docs/train_step.md" in message
    assert warning.filename == __file__


def without_tape(model, x, y):
    loss = model.loss_of(x, y)
    variables = model.trainable_variables
    # Keras 3 has objects of its own around variables.
    bare = [each if isinstance(each, tf.Variable) else each.value for each in variables]
    model.my_optimizer.apply_gradients(zip(tf.gradients(loss, bare), variables))


def of_each():
    """Has a weight for each example of a batch."""
    return [Weighs(lambda x, each: x * each, [8, 1]), L.Dense(1)]


def batch_jacobian(model, x, y):
    each = model.inside[0].weight
    with tf.GradientTape() as tape:
        squares = TINY * tf.square(model(x) - y)
    of_each = tape.batch_jacobian(squares, each, experimental_use_pfor=False)
    model.my_optimizer.apply_gradients([(tf.reshape(of_each, (8, 1)), each)])


@pytest.mark.parametrize(
    ("step", "name"), [(without_tape, "tf.gradients"), (batch_jacobian, "batch_jacobian")]
)
def test_a_warning_names_what_nobody_scales(step, name):
    with pytest.warns(keras_mp.MixedPrecisionWarning, match=name) as told:
        trained(step, "mixed_float16", {}, of_each)
    assert len(ours(told)) == 1


class Loops(Trained):
    """Has a `fit` with a loop of its own."""

    mode = "eager"

    def fit(self, x, y, batch_size, **kwargs):
        step = placed(self.mode, lambda x, y: self.step(self, x, y))
        strategy = tf.distribute.get_strategy()
        for start in range(0, len(x), batch_size):
            part = slice(start, start + batch_size)
            strategy.run(step, (tf.constant(x[part]), tf.constant(y[part])))


class LoopsInFunctions(Loops):
    mode = "function"


class LoopsCompiled(Loops):
    mode = "jit"


class LoopsInBatches(Trained):
    """Has a `train_on_batch` of its own."""

    def train_on_batch(self, x, y):
        return self.step(self, tf.constant(x), tf.constant(y))

    def fit(self, x, y, batch_size, **kwargs):
        for start in range(0, len(x), batch_size):
            part = slice(start, start + batch_size)
            self.train_on_batch(x[part], y[part])


class Delegates(Trained):
    """Does more before it calls the `fit` of Keras."""

    def fit(self, *args, **kwargs):
        self.is_fitted = True
        return super().fit(*args, **kwargs)


@pytest.mark.parametrize("step", [plain, persistent, penalty])
@pytest.mark.parametrize("cls", [Loops, LoopsInFunctions, LoopsInBatches, Delegates])
def test_a_loop_of_the_model_trains_as_in_float32(cls, step):
    expect_as_in_float32(trained(step, "mixed_float16", {}, cls=cls), step)


def test_a_loop_with_the_optimizer_of_the_model():
    def step(model, x, y):
        steps.unscaled(model.optimizer, model.loss_of, model.trainable_variables)(x, y)

    mode = {"optimizer": tf.keras.optimizers.SGD(1e5)}
    expect_as_in_float32(trained(step, "mixed_float16", mode, optimizer="none", cls=Loops), plain)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("cls", [Loops, LoopsInFunctions, LoopsCompiled, LoopsInBatches])
def test_a_loop_of_a_model_that_is_never_compiled_trains_as_in_float32(cls, policy):
    class NeverCompiled(cls):
        def compile(self, my_optimizer):
            self.my_optimizer = my_optimizer

    expect_as_in_float32(trained(plain, policy, {}, cls=NeverCompiled), plain)
    # A loop may build the model, too.
    with keras_mp.policy_scope(policy):
        model = NeverCompiled(plain, dense())
        model.compile(tf.keras.optimizers.SGD(1e5))
        model.fit(X, Y, 8)
        before = model.get_weights()
        model.fit(X, Y, 8)
    assert np.abs(model.get_weights()[0] - before[0]).max() > 1e-3


@pytest.mark.parametrize(
    ("step", "mode", "cls"),
    [
        *((plain, "eager", Trained), (plain, "graph", Delegates)),
        *((step, "graph", Trained) for step in (among_three, adversarial)),
    ],
)
def test_replicas(step, mode, cls):
    def run(policy, how):
        with mirrored(2).scope():
            return trained(step, policy, how, cls=cls, batch_size=16)

    expect_same_as_in_float32(run, mode)


def test_a_warning_of_a_loop_on_replicas():
    told = pytest.warns(keras_mp.MixedPrecisionWarning, match="several replicas")
    with told as warnings, mirrored(2).scope():
        trained(plain, "mixed_float16", {}, cls=LoopsInFunctions)
    (warning,) = ours(warnings)
    assert "In the fit of the model" in str(warning.message)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", unscaled("float16")], ids=str)
def test_no_warning_where_nothing_is_lost(policy):
    trained(jacobian, policy, {})


def test_no_warning_of_layers_in_float32_or_where_keras_scales():
    eager = MODES["eager"]
    trained(jacobian, "mixed_float16", eager, lambda: [L.Dense(1, dtype="float32")])
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD())
    trained(jacobian, "mixed_float16", eager, optimizer=optimizer)


def test_other_tapes_are_those_of_tensorflow():
    found = {}

    def step(model, x, y):
        with futures.ThreadPoolExecutor(1) as pool:
            found["another thread"] = type(pool.submit(tf.GradientTape).result())
        found["step"] = type(tf.GradientTape())
        plain(model, x, y)

    trained(step, "mixed_float16", {"run_eagerly": True})
    assert type(tf.GradientTape()) is found["another thread"] is tf.GradientTape
    assert found["step"] is not tf.GradientTape
    trained(step, "mixed_bfloat16", {"run_eagerly": True})
    assert found["step"] is tf.GradientTape


@once
def test_a_penalty_with_large_gradients_leaves_the_scale_alone():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                out = 1e4 * model(x, training=True)
            penalty = tf.reduce_mean(tf.square(inner.gradient(out, x)))
            loss = model.loss_of(x, y) + 1e-16 * penalty
        update(model, tape, loss)

    _, _, model = trained(step, keras_mp.Policy("mixed_float16"), {})
    assert float(model.optimizer.loss_scale()) == 2.0**15


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    "kind",
    [
        *("good", "good, of two tapes", "good, beside a scaler"),
        *("a loss of NaN", "a gradient of the program is NaN"),
    ],
)
def test_a_scale_that_tape_and_optimizer_share_moves_once_in_a_step(kind, mode):
    scaler = keras_mp.GradScaler()

    def step(model, x, y):
        loss = lambda: tf.reduce_mean(tf.square(model(x, training=True) - y))  # noqa: E731
        if kind == "good, beside a scaler":
            with keras_mp.LossScaleGradientTape(scaler) as tape:
                computed = loss()
            tape.gradient(computed, model.trainable_variables)
        for _ in range(2 if kind == "good, of two tapes" else 1):
            with tf.GradientTape() as tape:
                computed = loss()
            gradients = tape.gradient(computed, model.trainable_variables)
        if kind == "a gradient of the program is NaN":
            gradients = [each * float("nan") for each in gradients]
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    loss_scale = keras_mp.DynamicLossScale(2.0**12, increment_period=4)
    with keras_mp.policy_scope(keras_mp.Policy("mixed_float16", loss_scale=loss_scale)):
        model = Trained(step, dense())
    model.compile("none", optimizer="sgd", **MODES[mode])
    x, count = X * np.nan if kind == "a loss of NaN" else X, 8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", keras_mp.MixedPrecisionWarning)
        model.fit(x, Y, 16, epochs=count, verbose=0)
    optimizer = model.optimizer
    expected = (2.0**14, 0) if kind.startswith("good") else (2.0**4, count)
    assert (float(optimizer.loss_scale()), int(optimizer.steps_skipped)) == expected


@once
def test_a_tape_that_is_stopped_twice_is_an_error_as_in_tensorflow():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            model.loss_of(x, y)
            with tape.stop_recording():
                stopped = tape.stop_recording()
                with pytest.raises(ValueError, match="not recording"):
                    stopped.__enter__()
        plain(model, x, y)

    trained(step, "mixed_float16", {"run_eagerly": True})


@pytest.mark.parametrize("mode", EAGER_AND_GRAPH)
@pytest.mark.parametrize("in_one_tape", [True, False])
def test_a_scaled_loss_that_is_added_to_leaves_other_losses_to_their_tapes(in_one_tape, mode):
    def step(model, x, y):
        first, second = (layer.trainable_variables for layer in model.inside)
        tape = other_tape = tf.GradientTape(persistent=True)
        with tape:
            loss = tf.reduce_sum(tf.square(tf.cast(model.inside[0](x), tf.float32)))
            scaled_loss = model.optimizer.scale_loss(TINY * loss) + 0.0 * tf.reduce_sum(first[0])
        if not in_one_tape:
            model.optimizer.apply_gradients(zip(tape.gradient(scaled_loss, first), first))
            other_tape = tf.GradientTape()
        with other_tape:
            other = model.loss_of(x, y)
        model.my_optimizer.apply_gradients(zip(other_tape.gradient(other, second), second))
        if in_one_tape:
            model.optimizer.apply_gradients(zip(tape.gradient(scaled_loss, first), first))

    def run(policy, how):
        inner = tf.keras.optimizers.SGD(1e5)
        if policy == "float32":
            inner = keras_mp.LossScaleOptimizer(inner, 1)
        return trained(step, policy, {"optimizer": inner, **how})

    expect_same_as_in_float32(run, mode)


# Loops of a program's own, of models that are never compiled, under a policy with a loss scale.


POLICIES = ["float32", "mixed_float16", "mixed_bfloat16", unscaled("float16")]
NORMAL = tf.random.stateless_normal([8, 4], [1, 2])


def loop(apply, mode="function", scaled=lambda loss: loss, tape_of=tf.GradientTape):
    model = tf.keras.Sequential([tf.keras.Input((4,)), L.Dense(4, name="narrow")])

    def step():
        with tape_of() as tape:
            loss = scaled(tf.reduce_mean(model(NORMAL) ** 2) * TINY)
        gradients = tape.gradient(loss, model.trainable_variables)
        apply(zip(gradients, model.trainable_variables))

    before, step = model.get_weights()[0], placed(mode, step)
    for _ in range(2):
        step()
    return abs(model.get_weights()[0] - before).max()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("mode", FUNCTION_MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_optimizer_that_nobody_wrapped_is_named_once(name, mode, policy):
    keras_mp.set_global_policy(policy)
    with steps.our_warnings() as told:
        loop(make_optimizer(name, 1e7, momentum=0.0).apply_gradients, mode)
    found = [str(each.message) for each in told]
    if policy != "mixed_float16":
        assert not found
        return
    (message,) = found
    assert "The optimizer (SGD) applies gradients of float16 layers, such as 'narrow'" in message
    assert "    optimizer = keras_mp.LossScaleOptimizer(optimizer)\n" in message
    assert "    scaled_loss = optimizer.scale_loss(loss)\n" in message
    assert [each.filename for each in told] == [__file__]


@pytest.mark.parametrize("mode", FUNCTION_MODES)
@pytest.mark.parametrize("who", ["what the message says", "a tape", "a scaler"])
def test_who_scales_gets_no_message(who, mode):
    keras_mp.set_global_policy("mixed_float16")
    sgd, scale = tf.keras.optimizers.SGD(1e7), keras_mp.DynamicLossScale()
    if who == "what the message says":
        optimizer = keras_mp.LossScaleOptimizer(sgd)
        moved = loop(optimizer.apply_gradients, mode, optimizer.scale_loss)
    elif who == "a tape":
        tape_of = lambda: keras_mp.LossScaleGradientTape(scale)  # noqa: E731
        moved = loop(sgd.apply_gradients, mode, tape_of=tape_of)
    else:
        scaler = keras_mp.GradScaler()
        moved = loop(lambda pairs: (scaler.step(sgd, pairs), scaler.update()), mode, scaler.scale)
    assert moved > 0.1


def test_a_model_that_was_compiled_before_does_not_hide_the_loop():
    keras_mp.set_global_policy("mixed_float16")
    compiled_model(L.Dense(4), inputs=4).fit(NORMAL, NORMAL, verbose=0)
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="nobody has scaled"):
        loop(tf.keras.optimizers.SGD(1e7).apply_gradients)


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 does not have the argument.")
def test_a_model_that_does_not_scale_on_purpose_needs_no_message():
    keras_mp.set_global_policy(keras_mp.Policy("mixed_float16"))
    compiled_model(L.Dense(4), inputs=4, auto_scale_loss=False).fit(NORMAL, NORMAL, verbose=0)
