import contextlib

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, assert_all_equal, mirrored, once, value
from tests.models import FAMILIES, compiled_model, make_optimizer, training_state
from tests.saving.common import COPIES, checkpoint, set_policy

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def make_model(optimizer):
    return compiled_model(inputs=4, optimizer=optimizer)


@pytest.fixture
def trained(name):
    """A model that was trained under mixed_float16, some of its steps skipped."""
    set_policy("mixed_float16", 2.0**24, 9)
    model = compiled_model(inputs=4, optimizer=make_optimizer(name), run_eagerly=True)
    model.fit(X[:32], Y[:32], batch_size=2, verbose=0)
    assert int(model.optimizer.steps_skipped) > 3
    assert int(value(model.optimizer.iterations)) > 3
    keras_mp.set_global_policy(None)
    return model


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_a_loaded_model_stays_scaled_when_it_is_compiled_again(trained, suffix, tmp_path):
    # To fine-tune, for one: not by plain Adam, nor with a loss that float16 cannot hold.
    model = trained
    model.optimizer.warn_after_skips = 7
    again = COPIES[suffix](model, tmp_path)
    for _ in range(2):
        again.compile(tf.keras.optimizers.Adam(1e-4), "mse")
        ours = again.optimizer
        assert type(ours) is keras_mp.LossScaleOptimizer
        assert "Adam" in type(ours.inner_optimizer).__name__
        assert ours.loss_scale.get_config() == model.optimizer.loss_scale.get_config()
        assert float(ours.loss_scale()) == 2.0**24  # the settings: it starts afresh
        assert ours.warn_after_skips == 7
        assert again.loss.dtype == "float32"
    loss = again.train_on_batch(X[:2], np.full((2, 1), 300, "float32"))
    assert 80_000 < float(np.ravel(loss)[0]) < 100_000
    # Who says so gets the optimizer as it is.
    stock = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD())
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="tf.keras's own LossScaleOptimizer"):
        again.compile(stock, "mse")
    assert again.optimizer is stock


def test_a_loaded_bfloat16_model_keeps_float32_losses_when_it_is_compiled_again(tmp_path):
    keras_mp.set_global_policy("mixed_bfloat16")
    make_model("sgd").save(str(tmp_path / "model.keras"))
    keras_mp.set_global_policy(None)
    again = tf.keras.models.load_model(str(tmp_path / "model.keras"))
    again.compile("adam", "mse")
    assert again.loss.dtype == "float32"
    assert not isinstance(again.optimizer, keras_mp.LossScaleOptimizer)


def step(model, times=1):
    for i in range(times):
        model.train_on_batch(X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4])


def test_checkpoints_move_into_a_strategy_and_out_of_it(tmp_path):
    set_policy("mixed_float16")
    models, fit = [], {"batch_size": 32, "shuffle": False, "verbose": 0}
    for scope in (contextlib.nullcontext(), mirrored(2).scope()):
        with scope:
            optimizer = make_optimizer(FAMILIES[0])
            models.append(compiled_model(inputs=4, optimizer=optimizer, run_eagerly=True))
        models[-1].fit(X, Y, **fit)
    for i, (model, again) in enumerate((models, models[::-1])):
        model.fit(X, Y, **fit)
        path = checkpoint(model).save(str(tmp_path / f"c{i}"))
        checkpoint(again).restore(path).assert_consumed()
        assert_all_equal(training_state(again), training_state(model))
        again.fit(X, Y, **fit)
        assert int(value(again.optimizer.iterations)) == 6 + 4 * i


STOCK = tf.keras.mixed_precision.LossScaleOptimizer


def trained_optimizer(cls, count):
    variable = tf.Variable([1.0, 2.0])
    optimizer = cls(tf.keras.optimizers.Adam(0.1), initial_scale=64.0, dynamic_growth_steps=5)
    way = steps.keras_3 if IS_KERAS_3 else steps.rfc
    make_step = way(optimizer, lambda: tf.reduce_sum(variable**2), [variable])
    for _ in range(count):
        make_step()
    return optimizer, variable


def in_stock_layout(optimizer):
    is_ours = isinstance(optimizer, keras_mp.LossScaleOptimizer)
    return optimizer.keras_layout() if is_ours else optimizer


# What both Kerases' own class calls it, and ours.
SCALE, COUNTER = (
    ("dynamic_scale", "step_counter") if IS_KERAS_3 else ("loss_scale", "dynamic_counter")
)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("is_saved_by_us", [True, False])
def test_checkpoints_move_to_and_from_the_stock_optimizer(is_saved_by_us, count, tmp_path):
    if IS_KERAS_3 and is_saved_by_us and not count:
        pytest.skip("That of Keras 3 restores no scale before it is built, its own neither.")
    classes = [STOCK, keras_mp.LossScaleOptimizer]
    before, after = reversed(classes) if is_saved_by_us else classes
    (saved, _), (loaded, variable) = trained_optimizer(before, 7), trained_optimizer(after, count)
    path = tf.train.Checkpoint(optimizer=in_stock_layout(saved)).save(str(tmp_path / "c"))
    tf.train.Checkpoint(optimizer=in_stock_layout(loaded)).restore(path).expect_partial()
    if not count:
        loaded.build([variable])
    assert float(value(getattr(loaded, SCALE))) == float(value(getattr(saved, SCALE))) == 128
    assert int(value(getattr(loaded, COUNTER))) == int(value(getattr(saved, COUNTER))) == 2
    assert int(value(loaded.iterations)) == 7
    inner = [optimizer.inner_optimizer.variables for optimizer in (loaded, saved)]
    inner = [v() if callable(v) else v for v in inner]
    assert_all_equal(*inner)


@pytest.mark.skipif(not IS_KERAS_3, reason="That of Keras 2 has our layout.")
def test_a_checkpoint_of_the_stock_optimizer_says_how_to_read_it(tmp_path):
    saved, _ = trained_optimizer(STOCK, 7)
    path = tf.train.Checkpoint(optimizer=saved).save(str(tmp_path / "c"))
    optimizer, _ = trained_optimizer(keras_mp.LossScaleOptimizer, 1)
    before = [value(v) for v in optimizer.variables]
    with pytest.raises(ValueError, match="keras_layout()"):
        tf.train.Checkpoint(optimizer=optimizer).restore(path)
    assert_all_equal(optimizer.variables, before)
    assert float(optimizer.loss_scale()) == 64


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_metrics_of_a_reloaded_model_see_float32_whatever_the_global_policy(tmp_path, suffix):
    keras_mp.set_global_policy("mixed_float16")
    dense = tf.keras.layers.Dense(1, kernel_initializer="ones")
    model = compiled_model(dense, inputs=4, metrics=["mse"])
    data = np.full([2, 4], 100.0), np.zeros([2, 1])
    assert model.evaluate(*data, verbose=0) == [160_000, 160_000]
    model.save(str(tmp_path / f"model{suffix}"))
    keras_mp.set_global_policy(None)
    again = tf.keras.models.load_model(str(tmp_path / f"model{suffix}"))
    assert again.evaluate(*data, verbose=0) == [160_000, 160_000]
    assert type(again.optimizer) is keras_mp.LossScaleOptimizer


@once
def test_weights_of_another_optimizer_are_refused(tmp_path):
    keras_mp.set_global_policy("mixed_float16")
    model = make_model(keras_mp.LossScaleOptimizer("adam"))
    step(model)
    before = [value(v) for v in model.optimizer.variables]
    for weights in (before[:-1], [*before[:-1], np.zeros([7])]):
        with pytest.raises(ValueError, match="another kind of optimizer, or for another model"):
            model.optimizer.set_weights(weights)
    assert_all_equal(model.optimizer.variables, before)
    model.optimizer.set_weights([weight + 1 for weight in before])
    for ours, reference in zip(model.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(value(ours), (reference + 1).astype(reference.dtype))


@tf.keras.utils.register_keras_serializable(package="tests")
class Doubled(keras_mp.layers.Layer):
    def call(self, inputs):
        return 2 * inputs


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_ways_to_load(suffix, tmp_path):
    keras_mp.set_global_policy(keras_mp.Policy("mixed_float16", 128))
    layers = Doubled(), tf.keras.layers.Dense(1)
    model = compiled_model(*layers, inputs=4, optimizer="adam", run_eagerly=True)
    step(model)
    path = str(tmp_path / f"model{suffix}")
    model.save(path)
    keras_mp.set_global_policy(None)
    expected = model.predict(X, verbose=0)
    assert expected.dtype == np.float32
    bare = tf.keras.models.load_model(path, compile=False)
    assert getattr(bare, "optimizer", None) is None
    safe = tf.keras.models.load_model(path, safe_mode=True)
    assert float(safe.optimizer.loss_scale()) == 128
    scope = {"Doubled": Doubled, "LossScaleOptimizer": keras_mp.LossScaleOptimizer}
    named = tf.keras.models.load_model(path, custom_objects=scope)
    assert type(named.optimizer) is keras_mp.LossScaleOptimizer
    for one in (bare, safe, named):
        assert [layer.compute_dtype for layer in one.layers[-2:]] == ["float16"] * 2
        np.testing.assert_array_equal(one.predict(X, verbose=0), expected)
