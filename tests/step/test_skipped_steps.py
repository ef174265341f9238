"""Many skipped steps in a row are one warning, which says where to look."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, assert_all_equal, mirrored, once, ours, placed, value
from tests.models import FAMILIES, batches, compiled_model, digits, make_optimizer
from tests.steps import our_warnings

pytestmark = pytest.mark.parametrize("name", FAMILIES)

# Warnings that nobody collects are errors.
LOSS, GRADIENTS = "The loss of the last one was Inf or NaN", "The loss of the last one was finite"


@contextlib.contextmanager
def caught_warnings():
    """Collects the texts of keras_mp's warnings."""
    texts = []
    with our_warnings() as caught:
        yield texts
    texts += [str(w.message) for w in caught]


def skipping(name, mode, warn_after_skips=3):
    """Returns an optimizer and a function that makes a step with a given loss and gradient."""
    optimizer = keras_mp.LossScaleOptimizer(make_optimizer(name), warn_after_skips=warn_after_skips)
    v = tf.Variable(1.0)
    optimizer.build([v])

    @tf.custom_gradient
    def loss_with_gradient(v, loss, gradient):
        return v * 0 + loss, lambda upstream: (upstream * gradient, None, None)

    def step(loss, gradient):
        optimizer.minimize(lambda: loss_with_gradient(v, loss, gradient), [v])

    step = placed("jit" if mode == "jit in function" else mode, step)
    if mode == "jit in function":
        compiled = step
        step = tf.function(lambda loss, gradient: compiled(loss, gradient))
    return optimizer, lambda loss, gradient: step(tf.constant(loss), tf.constant(gradient))


BAD = {
    "loss": ([(np.nan, 1.0)] * 3, LOSS),
    "both": ([(np.inf, np.inf)] * 3, LOSS),
    "gradients": ([(1.0, np.inf)] * 3, GRADIENTS),
    "mixed": ([(1.0, np.nan), (np.nan, np.nan), (1.0, np.inf)], GRADIENTS),
}


@pytest.mark.parametrize("mode", ["eager", "function", "jit", "jit in function"])
def test_tells_the_loss_from_its_gradients(name, mode):
    optimizer, step = skipping(name, mode)
    for count, (kind, (bad, expected)) in enumerate(BAD.items(), 1):
        bad = [(loss, loss if np.isnan(loss) else gradient) for loss, gradient in bad]
        # A streak that ends too early, with the other kind of bad step, must leave no trace.
        step(1.0, 1.0)
        step(1.0, np.inf)
        step(np.nan, np.nan)
        step(1.0, 1.0)
        for loss, gradient in bad[:2]:
            step(loss, gradient)
        optimizer.steps_skipped  # noqa: B018
        with caught_warnings() as texts:
            step(*bad[2])
            if "jit" in mode:
                optimizer.steps_skipped  # noqa: B018
        assert len(texts) == 1, kind
        assert texts[0].startswith("3 steps in a row were skipped."), kind
        assert expected in texts[0], kind
        assert int(optimizer.steps_skipped) == 5 * count
        optimizer.warn_after_skips = 3  # It warns again.


@pytest.mark.parametrize(
    ("mode", "warn_after_skips"), [("eager", 3), ("function", 3), ("eager", None)]
)
def test_once_or_never(name, mode, warn_after_skips):
    _, step = skipping(name, mode, warn_after_skips)
    with caught_warnings() as texts:
        for _ in range(2):
            for _ in range(10):
                step(1.0, np.inf)
            step(1.0, 1.0)
    assert len(texts) == (warn_after_skips is not None)


def test_can_be_set(name):
    optimizer, step = skipping(name, "eager")
    optimizer.warn_after_skips = 1
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="1 steps in a row"):
        step(1.0, np.inf)
    config = optimizer.get_config()
    assert keras_mp.LossScaleOptimizer.from_config(config).warn_after_skips == 1
    for bad in (0, -1, 2.5, True, "3"):
        with pytest.raises((TypeError, ValueError), match="Received: warn_after_skips="):
            optimizer.warn_after_skips = bad
        with pytest.raises((TypeError, ValueError), match="Received: warn_after_skips="):
            keras_mp.LossScaleOptimizer(make_optimizer(name), warn_after_skips=bad)
    assert optimizer.warn_after_skips == 1


@once
def test_the_warning_is_about_its_own_step(name):
    # What is told is read from variables, which must not lag behind.
    optimizer, step = skipping(name, "function")
    for _ in range(10):
        step(1.0, np.inf)
        step(1.0, 1.0)
        optimizer.warn_after_skips = 1  # It warns again.
        with pytest.warns(keras_mp.MixedPrecisionWarning, match=LOSS):
            step(np.nan, np.nan)
        optimizer.warn_after_skips = None


def test_a_loss_of_another_function_is_unknown(name):
    optimizer = keras_mp.LossScaleOptimizer(make_optimizer(name), warn_after_skips=2)
    v = tf.Variable(1.0)
    optimizer.build([v])
    compute, apply = map(tf.function, steps.halves(optimizer, lambda: v * np.inf, [v]))
    apply(compute())
    assert optimizer.last_overflow.loss_is_finite is None
    assert "The loss was not known." in str(optimizer.last_overflow)
    with pytest.raises(RuntimeError, match="can be read only in eager code"):
        tf.function(lambda: optimizer.last_overflow)()
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="could not be looked at"):
        apply(compute())


def test_one_replica_of_two(name):
    with mirrored(2).scope():
        v = tf.Variable(1.0)
        optimizer = keras_mp.LossScaleOptimizer(make_optimizer(name), warn_after_skips=2)
        optimizer.build([v])
    step = steps.on_replicas(steps.keras_3(optimizer, lambda factor: v * factor, [v]))
    step(tf.constant([1.0, np.nan]))
    with pytest.warns(keras_mp.MixedPrecisionWarning, match=LOSS) as caught:
        step(tf.constant([1.0, np.nan]))
    assert len(ours(caught)) == 1
    assert float(value(v)) == 1


@pytest.mark.parametrize("jit_compile", ["auto", False, True] if IS_KERAS_3 else [False, True])
def test_fit_warns_while_it_runs(name, jit_compile):
    images, labels = digits()
    images = images[:256] * np.nan
    keras_mp.set_global_policy(keras_mp.Policy("float32", loss_scale="dynamic"))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    how = {"optimizer": make_optimizer(name), "loss": loss, "jit_compile": jit_compile}
    model = compiled_model(tf.keras.layers.Dense(10), inputs=64, **how)
    model.optimizer.warn_after_skips = 5
    after_epochs = []
    with our_warnings() as caught:
        count = tf.keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: after_epochs.append(len(caught))
        )
        model.fit(images, labels[:256], batch_size=64, epochs=4, verbose=0, callbacks=[count])
    # Four steps make an epoch. If XLA compiles them, fit asks after it.
    assert after_epochs == [0, 0, 1, 1]
    [text] = [str(w.message) for w in caught]
    assert text[:11] == ("8 steps in " if jit_compile is True else "5 steps in ")
    assert LOSS in text


def test_fit_warns_after_the_last_epoch_of_compiled_steps(name):
    if name.startswith("legacy"):
        pytest.skip("Keras does not call legacy optimizers at the end of fit.")
    keras_mp.set_global_policy(keras_mp.Policy("float32", loss_scale="dynamic"))
    model = compiled_model(optimizer=make_optimizer(name), jit_compile=True)
    x = np.full([4, 2], np.nan, "float32")
    for epochs, streak in ((1, 2), (2, 6)):  # of two steps each
        model.optimizer.warn_after_skips = streak
        with pytest.warns(keras_mp.MixedPrecisionWarning, match=f"{streak} steps in a row"):
            model.fit(x, x[:, :1], batch_size=2, epochs=epochs, verbose=0)


@pytest.mark.parametrize("mode", ["eager", "function", "jit in function"])
def test_half_of_the_last_hundred(name, mode):
    optimizer, step = skipping(name, mode, warn_after_skips=50)
    step(1.0, 1.0)
    for i in range(49):
        step(np.nan, np.nan)
        if i % 7 == 6:
            step(1.0, 1.0)
    optimizer.steps_skipped  # noqa: B018
    with caught_warnings() as texts:
        for i in range(70):  # The share stays high, and that is said once.
            step(np.nan, np.nan) if i % 7 else step(1.0, 1.0)
        optimizer.steps_skipped  # noqa: B018
    assert len(texts) == 1
    assert texts[0].startswith(f"Half of the last 100 steps were skipped. {LOSS}")


def test_a_few_skips_in_a_hundred_are_no_news(name):
    _, step = skipping(name, "function", warn_after_skips=50)
    with caught_warnings() as texts:
        for i in range(240):
            step(1.0, np.inf) if i % 3 == 0 else step(1.0, 1.0)
    assert [text for text in texts if "Half of" in text] == []


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_the_floor_is_told_once(name, mode):
    optimizer, step = skipping(name, mode, warn_after_skips=50)
    scale, floor = optimizer.loss_scale, optimizer.loss_scale.min_loss_scale
    scale.loss_scale.assign(4 * floor)
    step(1.0, np.inf)
    with caught_warnings() as texts:
        step(1.0, np.inf)
        step(1.0, np.inf)
    assert float(scale) == floor == 2.0**-24
    assert len(texts) == 1
    assert texts[0].startswith("The loss scale has come down to its floor")
    assert GRADIENTS in texts[0]
    assert "keras_mp.numerics.watch(model)" in texts[0]
    scale.loss_scale.assign(2 * floor)
    step(1.0, np.inf)


@pytest.mark.parametrize("mode", ["eager", "function", "jit in function"])
def test_ends_training_after_many_skips(name, mode):
    optimizer, step = skipping(name, mode, warn_after_skips=None)
    optimizer.raise_after_skips = 3
    for _ in range(2):
        for _ in range(2):
            step(1.0, np.inf)
        step(1.0, 1.0)
    for _ in range(2):
        step(1.0, np.inf)

    def skip_and_ask():
        step(1.0, np.inf)
        return optimizer.steps_skipped  # If XLA has compiled the step, this asks.

    with pytest.raises((RuntimeError, tf.errors.OpError), match="3 steps in a row were skipped"):
        skip_and_ask()
    assert int(optimizer.steps_skipped) >= 7
    config = optimizer.get_config()
    assert keras_mp.LossScaleOptimizer.from_config(config).raise_after_skips == 3
    optimizer.raise_after_skips = None
    assert "raise_after_skips" not in optimizer.get_config()
    for bad in (0, 2.5, "3"):
        with pytest.raises((TypeError, ValueError), match="Received: raise_after_skips="):
            keras_mp.LossScaleOptimizer(make_optimizer(name), raise_after_skips=bad)


def with_statistics(name, **how):
    keras_mp.set_global_policy("mixed_float16")
    layers = tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)
    return compiled_model(*layers, optimizer=make_optimizer(name), **how)


@pytest.mark.parametrize("how", [{"run_eagerly": True}, {}, {"jit_compile": True}])
def test_batches_without_examples_are_skipped_and_leave_the_scale(name, how):
    model = with_statistics(name, **how)
    x, y = np.ones([4, 2], "float32"), np.ones([4, 1], "float32")
    empty = x[:0], y[:0]
    model.fit(batches((x, y)), verbose=0, shuffle=False)
    before = model.get_weights()
    model.fit(batches(*[empty] * 5), verbose=0, shuffle=False)
    assert_all_equal(model.get_weights(), before)
    scale, optimizer = float(model.optimizer.loss_scale()), model.optimizer
    assert (scale, int(optimizer.steps_skipped)) == (2.0**15, 5)
    assert [loss.kind for loss in optimizer.last_overflow.losses] == ["no examples"]
    assert "There were no examples" in str(optimizer.last_overflow)
    assert "Inf" not in str(optimizer.last_overflow).splitlines()[1]
    # One with examples counts as it always does, and the empty ones are no part of its row.
    model.fit(batches((x * np.inf, y), empty), verbose=0, shuffle=False)
    assert float(optimizer.loss_scale()) == scale / 2
    with pytest.warns(
        keras_mp.MixedPrecisionWarning, match=r"no examples: leave .*_remainder=True`. `last_"
    ):
        model.fit(batches(*[empty] * 45), verbose=0, shuffle=False)


@pytest.mark.parametrize("mode", ["eager", "function", "jit"])
@pytest.mark.parametrize("bad", [0, 1])
def test_each_of_several_losses_counts(name, mode, bad):
    optimizer, v = keras_mp.LossScaleOptimizer(make_optimizer(name)), tf.Variable([1.0, 1.0])
    optimizer.build([v])

    compute, apply = steps.halves(optimizer, lambda i, f: v[i] * f[i], [v], steps.RFC)

    def step(factors):
        (first,), (second,) = (compute(i, factors) for i in range(2))
        apply([tf.convert_to_tensor(first) + tf.convert_to_tensor(second)])

    step = placed(mode, step)
    step(tf.constant([1.0, 1.0]))
    factors = np.ones(2, np.float32)
    factors[bad] = np.nan
    step(tf.constant(factors))
    assert optimizer.last_overflow.loss_is_finite is False
    step(tf.constant([1.0, 1.0]))
    assert int(optimizer.steps_skipped) == 1


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("is_bad", [False, True])
def test_a_replica_without_examples_leaves_the_scale_to_the_others(name, is_bad, run_eagerly):
    with mirrored(2).scope():
        model = with_statistics(name, run_eagerly=run_eagerly)
    x, y = np.ones([2, 2], "float32"), np.full([2, 1], 0.1, "float32")
    of_one = np.array([[np.inf if is_bad else 0.1]], "float32")
    model.fit(batches((x, y), (x[:1], of_one)), verbose=0, shuffle=False)
    assert float(model.optimizer.loss_scale()) == 2.0**15 / (2 if is_bad else 1)
    if run_eagerly and not is_bad and not IS_KERAS_3:  # Its layer leaves its statistics alone.
        assert int(model.optimizer.steps_skipped) == 0
        return
    assert int(model.optimizer.steps_skipped) == 1
    kinds = [loss.kind for loss in model.optimizer.last_overflow.losses]
    assert kinds == ["Inf" if is_bad else "finite", "no examples"]


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_batch_without_examples_is_a_step_where_no_layer_has_statistics(name, run_eagerly):
    keras_mp.set_global_policy("mixed_float16")
    model = compiled_model(optimizer=make_optimizer(name), run_eagerly=run_eagerly)
    x, y = np.zeros([0, 2], "float32"), np.zeros([0, 1], "float32")
    model.fit(batches((x, y)), verbose=0, shuffle=False)
    assert (int(model.optimizer.iterations), int(model.optimizer.steps_skipped)) == (1, 0)
