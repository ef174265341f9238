"""A `train_step` of somebody else, with optimizers that scale nothing, trains as in float32."""

import contextlib
import functools
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import Subclassed, distances, made, mirrored, ours, placed, unscaled, value

L = tf.keras.layers

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

# With a loss of this size the gradients of float16 layers are zero, unless it is scaled.
TINY = 1e-7

MODES = [{"run_eagerly": True}, {}, {"jit_compile": True}]


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
        return {"my_loss": self.step(self, *data)}


def dense():
    return [L.Dense(8, "tanh"), L.Dense(1)]


def update(model, tape, loss):
    gradients = tape.gradient(loss, model.trainable_variables)
    model.my_optimizer.apply_gradients(zip(gradients, model.trainable_variables))


def plain(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.loss_of(x, y)
    update(model, tape, loss)
    return loss


def by_hand(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.loss_of(x, y)
    variables = model.trainable_variables
    for gradient, variable in zip(tape.gradient(loss, variables), variables):
        variable.assign_sub(1e5 * gradient)
    return loss


def persistent(model, x, y):
    """Several losses, and a dict of sources."""
    with tf.GradientTape(persistent=True) as tape:
        loss = model.loss_of(x, y)
        decay = TINY * tf.add_n([tf.reduce_sum(tf.square(v)) for v in model.trainable_variables])
    variables = dict(enumerate(model.trainable_variables))
    of_loss, of_decay = tape.gradient(loss, variables), tape.gradient(decay, variables)
    gradients = [of_loss[i] + of_decay[i] for i in variables]
    model.my_optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


def penalty(model, x, y):
    """The gradient of a gradient, as a WGAN has it."""
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            out = model(x, training=True)
        norm = tf.norm(inner.gradient(out, x) + 1e-6, axis=1)
        loss = TINY * tf.reduce_mean(tf.square(norm - 1.0)) + model.loss_of(x, y)
    update(model, tape, loss)
    return loss


def split(model, x, y):
    """The gradient of a part has a shape that TensorFlow does not know in a loop."""
    with tf.GradientTape() as tape:
        parts = tf.split(tf.tile(model(x, training=True), [1, 4]), 2, axis=1)
        loss = TINY * tf.reduce_mean(tf.square(tf.concat(parts[::-1], axis=1) - y))
        loss += TINY * tf.reduce_mean(parts[0] * tf.tanh(parts[1]))
    update(model, tape, loss)
    return loss


def inside(model, x, y):
    """The tape still records where it is asked."""
    with tf.GradientTape() as tape:
        loss = model.loss_of(x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.my_optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


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


def expect_same_as_in_float32(run):
    """Compares how far the weights have moved with the policies "float32" and "mixed_float16"."""
    exact, found = (moved(run(policy)) for policy in ("float32", "mixed_float16"))
    assert max(distances(found, exact)) < 0.02


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("step", [plain, by_hand, persistent, penalty, split, inside])
def test_an_optimizer_that_scales_nothing_trains_as_in_float32(step, is_graph):
    # What is traced for XLA is what a graph has. It might not compile derivatives of derivatives,
    # and shapes that it does not know.
    graph = {"jit_compile": step in (penalty, split, inside)}
    mode = graph if is_graph else {"run_eagerly": True}
    expect_as_in_float32(trained(step, "mixed_float16", mode), step)


@pytest.mark.parametrize("mode", MODES, ids=["eager", "graph", "jit"])
def test_gradients_that_overflow_are_computed_again(mode):
    policy = keras_mp.Policy("mixed_float16", loss_scale=keras_mp.DynamicLossScale(2.0**60))
    result = trained(plain, policy, mode)
    expect_as_in_float32(result, plain)
    assert 2.0**30 < float(value(result[2].optimizer.loss_scale.loss_scale)) < 2.0**50


def test_the_optimizer_that_was_given_to_compile():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = model.loss_of(x, y)
        variables = model.trainable_variables
        given.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    def run(policy):
        nonlocal given
        given = tf.keras.optimizers.SGD(1e5)
        return trained(step, policy, {"optimizer": given}, optimizer=given)

    given = None
    expect_same_as_in_float32(run)


class FitsTwice(tf.keras.Sequential):
    def fit(self, *args, **kwargs):
        super().fit(*args, **kwargs)
        return super().fit(*args, **kwargs)


@pytest.mark.parametrize("mode", MODES[:2], ids=["eager", "graph"])
@pytest.mark.parametrize("cls", [tf.keras.Sequential, FitsTwice])
def test_steps_of_keras_with_an_optimizer_that_is_given_or_assigned(cls, mode):
    def run(policy):
        with keras_mp.policy_scope(policy):
            tf.keras.utils.set_random_seed(0)
            model = cls([tf.keras.Input((4,)), *dense()])
            before, optimizer = model.get_weights(), tf.keras.optimizers.SGD(1e5)
            given = optimizer if cls is FitsTwice else "sgd"
            model.compile(given, lambda y, p: TINY * tf.reduce_mean(tf.square(y - p)), **mode)
            if given == "sgd":
                model.optimizer = optimizer
            model.fit(X, Y, shuffle=False, verbose=0)
        return model.get_weights(), before, model

    expect_same_as_in_float32(run)


def test_a_loss_that_is_multiplied_by_hand_still_has_to_be_divided():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            scaled_loss = model.loss_of(x, y) * model.my_optimizer.loss_scale()
        gradients = tape.gradient(scaled_loss, model.trainable_variables)
        model.my_optimizer.apply_gradients(zip(gradients, model.trainable_variables), scaled=scaled)
        return scaled_loss

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
        return loss

    expect_same_as_in_float32(lambda policy: trained(step, policy, {}, layers))


# Losses that the program scales by itself.


def by_optimizer(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.loss_of(x, y)
        scaled_loss = model.my_optimizer.scale_loss(loss)
    update(model, tape, scaled_loss)
    return loss


def by_optimizer_in_parts(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.loss_of(x, y)
        parts = [model.my_optimizer.scale_loss(part) for part in (0.25 * loss, 0.75 * loss)]
        scaled_loss = tf.add_n(parts)
    update(model, tape, scaled_loss)
    return loss


def by_scaler(model, x, y):
    scaler, variables = model.my_optimizer.scaler, model.trainable_variables
    with tf.GradientTape() as tape:
        loss = model.loss_of(x, y)
        scaled_loss = scaler.scale(loss)
    gradients = scaler.unscale(tape.gradient(scaled_loss, variables), model.my_optimizer)
    scaler.step(model.my_optimizer, zip(gradients, variables))
    scaler.update()
    return loss


def by_tape(model, x, y):
    with keras_mp.LossScaleGradientTape(2.0**15) as tape:
        loss = model.loss_of(x, y)
    update(model, tape, loss)
    return loss


@pytest.mark.parametrize("mode", MODES[:2], ids=["eager", "graph"])
@pytest.mark.parametrize("step", [by_optimizer, by_optimizer_in_parts, by_scaler, by_tape])
def test_what_the_program_scales_is_not_scaled_again(step, mode):
    optimizer = tf.keras.optimizers.SGD(1e5)
    if step in (by_optimizer, by_optimizer_in_parts):
        optimizer = keras_mp.LossScaleOptimizer(optimizer)
    elif step is by_scaler:
        optimizer.scaler = keras_mp.GradScaler()
    # Any other scale than the program's would have to come down.
    policy = keras_mp.Policy("mixed_float16", loss_scale=keras_mp.DynamicLossScale(2.0**60))
    result = trained(step, policy, mode, optimizer=optimizer)
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
    return losses[0]


@pytest.mark.parametrize("mode", MODES, ids=["eager", "graph", "jit"])
def test_a_warning_where_nobody_scales_has_the_lines_to_add(mode):
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="nobody has scaled") as told:
        trained(jacobian, "mixed_float16", mode)
    (warning,) = ours(told)
    message = str(warning.message)
    assert "self.my_optimizer = keras_mp.LossScaleOptimizer(self.my_optimizer)" in message
    assert "self.my_optimizer.scale_loss(loss)" in message
    assert "(SGD)" in message
    assert "docs/train_step.md" in message
    assert warning.filename == __file__


def test_a_warning_of_gradients_without_a_tape():
    def step(model, x, y):
        loss = model.loss_of(x, y)
        variables = model.trainable_variables
        # Keras 3 has objects of its own around variables.
        bare = [each if isinstance(each, tf.Variable) else each.value for each in variables]
        gradients = tf.gradients(loss, bare)
        model.my_optimizer.apply_gradients(zip(gradients, variables))
        return loss

    with pytest.warns(keras_mp.MixedPrecisionWarning, match="tf.gradients") as told:
        trained(step, "mixed_float16", {})
    assert len(ours(told)) == 1


class OfEach(L.Layer):
    """Has a weight for each example of a batch."""

    def build(self, _):
        self.each = self.add_weight(shape=(8, 1), initializer="ones")

    def call(self, x):
        return x * self.each


def test_a_warning_of_batch_jacobians():
    def step(model, x, y):
        each = model.inside[0].each
        with tf.GradientTape() as tape:
            squares = TINY * tf.square(model(x) - y)
        of_each = tape.batch_jacobian(squares, each, experimental_use_pfor=False)
        model.my_optimizer.apply_gradients([(tf.reshape(of_each, (8, 1)), each)])
        return tf.reduce_mean(squares)

    with pytest.warns(keras_mp.MixedPrecisionWarning, match="batch_jacobian") as told:
        trained(step, "mixed_float16", {}, lambda: [OfEach(), L.Dense(1)])
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


@pytest.mark.parametrize("cls", [Trained, Loops])
def test_an_unchanged_step_with_the_optimizer_of_the_model(cls):
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = model.loss_of(x, y)
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    def run(policy):
        mode = {"optimizer": tf.keras.optimizers.SGD(1e5)}
        return trained(step, policy, mode, optimizer="none", cls=cls)

    expect_same_as_in_float32(run)


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


@pytest.mark.parametrize("mode", MODES[:2], ids=["eager", "graph"])
@pytest.mark.parametrize("cls", [Trained, Delegates])
def test_replicas(mode, cls):
    def run(policy):
        with mirrored(2).scope():
            return trained(plain, policy, mode, cls=cls, batch_size=16)

    expect_same_as_in_float32(run)


def test_a_warning_of_a_loop_on_replicas():
    told = pytest.warns(keras_mp.MixedPrecisionWarning, match="several replicas")
    with told as warnings, mirrored(2).scope():
        trained(plain, "mixed_float16", {}, cls=LoopsInFunctions)
    (warning,) = ours(warnings)
    assert "In the fit of the model" in str(warning.message)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "unscaled", "float32 layers"])
def test_no_warning_where_nothing_is_lost(policy):
    layers = dense
    if policy == "unscaled":
        policy = unscaled("float16")
    elif policy == "float32 layers":
        policy = "mixed_float16"

        def layers():
            return [L.Dense(8, "tanh", dtype="float32"), L.Dense(1, dtype="float32")]

    trained(jacobian, policy, {}, layers)


def test_no_warning_where_keras_scales():
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD())
    trained(jacobian, "mixed_float16", {}, optimizer=optimizer)


def test_other_tapes_are_those_of_tensorflow():
    found = {}

    def step(model, x, y):
        with futures.ThreadPoolExecutor(1) as pool:
            found["another thread"] = type(pool.submit(tf.GradientTape).result())
        found["step"] = type(tf.GradientTape())
        return plain(model, x, y)

    trained(step, "mixed_float16", {"run_eagerly": True})
    assert type(tf.GradientTape()) is found["another thread"] is tf.GradientTape
    assert found["step"] is not tf.GradientTape
    trained(step, "mixed_bfloat16", {"run_eagerly": True})
    assert found["step"] is tf.GradientTape


def test_a_tape_is_used_once_unless_it_is_persistent():
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = model.loss_of(x, y)
        tape.gradient(loss, model.trainable_variables)
        with pytest.raises(RuntimeError, match="persistent=True"):
            tape.gradient(loss, model.trainable_variables)
        return loss

    trained(step, "mixed_float16", {})
