"""What users of Keras's own class do with it, done with ours in its place."""

import pytest
import tensorflow as tf

import keras_mp
from tests.common import FAMILIES, IS_KERAS_3, assert_all_equal, make_optimizer, sgd

pytestmark = pytest.mark.parametrize("name", FAMILIES)

keras_2_only = pytest.mark.skipif(IS_KERAS_3, reason="Keras 3 has no such thing.")


class Doubled(keras_mp.LossScaleOptimizer):
    """Overrides a method and notes that it was called, and with which gradients."""

    def __init__(self, *args, **kwargs):
        self.seen = []  # Before the base class is initialized, as Python allows.
        super().__init__(*args, **kwargs)


class OwnApplyGradients(Doubled):
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        self.seen.append(float(pairs[0][0]))
        return super().apply_gradients([(2 * g, v) for g, v in pairs], *args, **kwargs)


class OwnComputeGradients(Doubled):
    def compute_gradients(self, *args, **kwargs):
        pairs = super().compute_gradients(*args, **kwargs)
        self.seen.append(float(pairs[0][0]))
        return [(2 * g, v) for g, v in pairs]


class OwnGetScaledLoss(Doubled):
    def get_scaled_loss(self, loss):
        scaled = super().get_scaled_loss(loss)
        self.seen.append(0.25)
        return (lambda: 2 * scaled()) if callable(scaled) else 2 * scaled


class OwnGetUnscaledGradients(Doubled):
    def get_unscaled_gradients(self, grads):
        unscaled = super().get_unscaled_gradients(grads)
        self.seen.append(float(unscaled[0]))
        return [2 * g for g in unscaled]


@pytest.mark.parametrize(
    "cls", [OwnApplyGradients, OwnComputeGradients, OwnGetScaledLoss, OwnGetUnscaledGradients]
)
@pytest.mark.parametrize("form", ["callable", "tensor"])
def test_minimize_calls_what_a_subclass_overrides(name, cls, form):
    optimizer, v = cls(sgd(name)), tf.Variable(1.0)
    if form == "callable":
        optimizer.minimize(lambda: v * 0.25, [v])
    else:
        with tf.GradientTape() as tape:
            loss = v * 0.25
        optimizer.minimize(loss, [v], tape=tape)
    assert float(v) == 0.5
    assert optimizer.seen == [0.25]


def test_a_subclass_may_build_more(name):
    class Building(keras_mp.LossScaleOptimizer):
        built_with = ()

        def build(self, var_list):
            self.built_with = list(var_list)
            super().build(var_list)

    optimizer, v = Building(sgd(name)), tf.Variable(1.0)
    optimizer.minimize(lambda: v * 0.25, [v])
    assert optimizer.built_with[0] is v


@pytest.mark.parametrize("method", ["apply_gradients", "minimize"])
def test_what_means_different_things_in_different_families_goes_by_keyword(name, method):
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name)), tf.Variable(1.0)
    arguments = {
        # `experimental_aggregate_gradients` or `skip_gradients_aggregation`?
        "apply_gradients": ([(tf.constant(1.0), v)], None, False),
        # `grad_loss` or `tape`?
        "minimize": (lambda: v * 1.0, [v], tf.constant(1.0)),
    }[method]
    with pytest.raises(TypeError, match="positional|by keyword"):
        getattr(optimizer, method)(*arguments)
    assert float(v) == 1


def test_inner_optimizer_whose_apply_gradients_takes_pairs_only(name):
    base = type(sgd(name))

    class Short(base):
        def apply_gradients(self, grads_and_vars, **kwargs):
            assert not kwargs.pop("name", None)
            return super().apply_gradients(grads_and_vars, **kwargs)

    optimizer, v = keras_mp.LossScaleOptimizer(Short(1.0)), tf.Variable(1.0)
    optimizer.minimize(lambda: v * 0.5, [v])
    assert float(v) == 0.5


@keras_2_only
def test_names_of_variables_are_the_inner_optimizers(name):
    def names(optimizer):
        v = tf.Variable(1.0, name="v")
        with tf.GradientTape() as tape:
            loss = v * 0.5
        optimizer.minimize(loss, [v], tape=tape)
        variables = optimizer.variables
        return [w.name for w in (variables() if callable(variables) else variables)]

    assert names(keras_mp.LossScaleOptimizer(make_optimizer(name))) == names(make_optimizer(name))


@keras_2_only
def test_a_hyperparameter_cannot_hide_what_the_wrapper_has(name):
    class Clashing(type(sgd(name))):
        loss_scale = dynamic = None

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if hasattr(self, "_set_hyper"):
                self._set_hyper("loss_scale", 123.0)
                self._set_hyper("dynamic", 0.0)

        def get_config(self):
            return {**super().get_config(), "loss_scale": 123.0, "dynamic": 0.0}

    optimizer = keras_mp.LossScaleOptimizer(Clashing(1.0))
    assert float(optimizer.loss_scale) == 2**15
    assert optimizer.dynamic is True
    with pytest.raises(AttributeError):
        optimizer.loss_scale = 2.0


def test_arguments_that_old_configs_of_keras_3_carry_along(name):
    idle = {"clipnorm": None, "use_ema": False, "ema_momentum": 0.99, "loss_scale_factor": None}
    config = {
        "name": "loss_scale",
        "inner_optimizer": tf.keras.optimizers.serialize(sgd(name)),
        "initial_scale": 64.0,
        "dynamic_growth_steps": 7.0,
        **idle,
    }
    optimizer = keras_mp.LossScaleOptimizer.from_config(config)
    assert optimizer.initial_scale == 64
    assert optimizer.dynamic_growth_steps == 7
    for key, wrong in [("clipnorm", 1.0), ("use_ema", True), ("ema_momentum", 0.9), ("lr", None)]:
        with pytest.raises(ValueError, match=f"inner optimizer. Received: {key}={wrong}"):
            keras_mp.LossScaleOptimizer(sgd(name), **{**idle, key: wrong})


def test_growth_steps_can_be_set(name):
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name), initial_scale=4), tf.Variable(1.0)
    optimizer.dynamic_growth_steps = 2
    for _ in range(2):
        optimizer.minimize(lambda: v * 0.5, [v])
    assert float(optimizer.loss_scale) == 8
    assert optimizer.loss_scale.get_config()["increment_period"] == 2
    with pytest.raises(ValueError, match="dynamic_growth_steps=0|increment_period=0"):
        optimizer.dynamic_growth_steps = 0
    fixed = keras_mp.LossScaleOptimizer(sgd(name), 4)
    with pytest.raises(ValueError, match="does not grow"):
        fixed.dynamic_growth_steps = 2


@keras_2_only
def test_weights_load_into_an_optimizer_that_is_not_built(name, tmp_path):
    def model(optimizer):
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        return model

    saved = model(sgd(name))
    saved.save_weights(tmp_path / "a.weights.h5")
    loaded = model(keras_mp.LossScaleOptimizer(sgd(name)))
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="saved without loss scaling"):
        loaded.load_weights(tmp_path / "a.weights.h5")
    assert_all_equal(saved.get_weights(), loaded.get_weights())


def test_gradients_may_be_arrays(name):
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name)), tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(v * 0.5)
    [gradient] = optimizer.get_unscaled_gradients(tape.gradient(loss, [v]))
    # What is refused changes nothing, so it may be put right.
    with pytest.raises(TypeError, match="A gradient must be"):
        optimizer.apply_gradients([([gradient], v)])
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply_gradients([(None, v)])
    optimizer.apply_gradients([(gradient.numpy(), v)])
    assert float(v[0]) == 0.5


@pytest.mark.skipif(not IS_KERAS_3, reason="loss_scale_factor is of Keras 3.")
def test_a_second_scale_that_comes_later_is_refused(name):
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name)), tf.Variable(1.0)
    with pytest.raises(TypeError, match="another LossScaleOptimizer cannot wrap it"):
        tf.keras.mixed_precision.LossScaleOptimizer(optimizer)
    assert optimizer.loss_scale_factor is None
    optimizer.inner_optimizer.loss_scale_factor = 8.0
    with pytest.raises(ValueError, match="scales the loss itself"):
        optimizer.minimize(lambda: v * 1.0, [v])
    assert float(v) == 1
