import gc
import re

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, MODES, assert_all_equal, placed
from tests.models import OPTIMIZER_BASES, compiled_model, make_optimizer, sgd, variables_of

keras_2_only = pytest.mark.skipif(IS_KERAS_3, reason="Keras 3 has no such thing.")
Stock = tf.keras.mixed_precision.LossScaleOptimizer


def test_is_what_keras_takes_it_for(name):
    optimizer = keras_mp.LossScaleOptimizer(sgd(name))
    assert isinstance(optimizer, Stock)
    for base in OPTIMIZER_BASES:
        assert isinstance(optimizer, base)
    assert tf.keras.optimizers.get(optimizer) is optimizer


def test_defaults(name):
    inner = sgd(name)
    optimizer = keras_mp.LossScaleOptimizer(inner)
    assert optimizer.inner_optimizer is inner
    assert isinstance(optimizer.loss_scale, keras_mp.DynamicLossScale)
    assert optimizer.dynamic
    assert optimizer.aggregate_in_float16
    assert optimizer.initial_scale == 2**15
    assert optimizer.dynamic_growth_steps == 2000
    assert float(optimizer.loss_scale()) == 2**15
    assert int(optimizer.steps_skipped) == 0
    assert not bool(optimizer.last_step_skipped)
    assert optimizer.warn_after_skips == 50


def test_the_loss_scale_and_older_keywords(name):
    scale = keras_mp.DynamicLossScale(4)
    assert keras_mp.LossScaleOptimizer(sgd(name), scale).loss_scale is scale
    for arguments in ({"loss_scale": 128}, {"dynamic": False, "initial_scale": 128}):
        fixed = keras_mp.LossScaleOptimizer(sgd(name), **arguments)
        assert (fixed.dynamic, fixed.initial_scale, float(fixed.loss_scale)) == (False, 128, 128)
        assert fixed.dynamic_growth_steps is None
        assert fixed.dynamic_counter is None
    dynamic = keras_mp.LossScaleOptimizer(sgd(name), initial_scale=64, dynamic_growth_steps=5)
    assert (dynamic.initial_scale, dynamic.dynamic_growth_steps) == (64, 5)
    assert keras_mp.LossScaleOptimizer(sgd(name), dynamic=True).dynamic
    assert int(dynamic.dynamic_counter) == int(dynamic.step_counter) == 0
    assert float(dynamic.dynamic_scale) == 64


@pytest.mark.parametrize(
    ("error", "kwargs"),
    [
        (ValueError, {"loss_scale": None}),
        (TypeError, {"loss_scale": True}),
        (ValueError, {"loss_scale": -0.5}),
        (ValueError, {"loss_scale": 8, "initial_scale": 8}),
        (ValueError, {"loss_scale": 8, "dynamic": False}),
        (ValueError, {"dynamic": False}),
        (ValueError, {"dynamic": False, "initial_scale": 8, "dynamic_growth_steps": 2}),
        (TypeError, {"dynamic": 8}),
        (TypeError, {"aggregate_in_float16": "no"}),
        (ValueError, {"aggregate_in_float16": True, "reduce_dtype": "bfloat16"}),
        (TypeError, {"reduce_dtype": "sixteen"}),
        (ValueError, {"reduce_dtype": "float64"}),
        (ValueError, {"clipnorm": 1.0}),
        (ValueError, {"learning_rate": 1.0}),
    ],
    ids=repr,
)
def test_contradictions_and_strangers_are_refused(name, error, kwargs):
    inner = sgd(name)
    with pytest.raises(error, match="Received"):
        keras_mp.LossScaleOptimizer(inner, **kwargs)
    # What was refused left no mark on the inner optimizer.
    keras_mp.LossScaleOptimizer(inner)


def test_wrapping_twice_is_refused(name):
    around, deeper = sgd(name), sgd(name)
    optimizer = keras_mp.LossScaleOptimizer(around)
    ours = keras_mp.LossScaleOptimizer(keras_mp.OptimizerWrapper(deeper))
    for inner in (around, keras_mp.OptimizerWrapper(around), deeper):
        with pytest.raises(ValueError, match="is wrapped by a LossScaleOptimizer already"):
            keras_mp.LossScaleOptimizer(inner)
    for inner in (optimizer, Stock(sgd(name))):
        with pytest.raises(TypeError, match="The LossScaleOptimizer scales the loss or sums"):
            keras_mp.LossScaleOptimizer(inner)
    with pytest.raises(ValueError, match="wrapped by a .*LossScaleOptimizer already|already wrapp"):
        Stock(deeper)
    assert ours.inner_optimizer.inner_optimizer is deeper
    assert float(ours.learning_rate) == 1.0
    assert isinstance(Stock(sgd(name)).inner_optimizer, type(deeper))  # another one


def test_what_keras_wraps_is_not_wrapped_again(name):
    inner = sgd(name)
    keras_own = Stock(inner)
    for optimizer in (inner, keras_mp.OptimizerWrapper(inner)):
        with pytest.raises(ValueError, match="wrapped by tf.keras's own LossScaleOptimizer"):
            keras_mp.LossScaleOptimizer(optimizer)
    keras_own.apply_gradients([(tf.constant(0.0), tf.Variable(1.0))])
    # What was ours may be wrapped by another of ours.
    inner = sgd(name)
    keras_mp.LossScaleOptimizer(inner)
    gc.collect()
    assert keras_mp.LossScaleOptimizer(inner).inner_optimizer is inner
    gc.collect()
    if IS_KERAS_3:  # Keras 2 keeps its mark.
        assert Stock(inner).inner_optimizer is inner
        gc.collect()
        keras_mp.LossScaleOptimizer(inner)


@pytest.mark.parametrize("loss", [None, [1.0, [2.0]], {"a": 1.0}, tf.constant(1)])
def test_what_is_no_loss_is_refused(name, loss):
    optimizer = keras_mp.LossScaleOptimizer(sgd(name))
    for scale in (optimizer.get_scaled_loss, optimizer.scale_loss):
        with pytest.raises(TypeError, match="Received: loss="):
            scale(loss)


def test_nothing_to_apply(name):
    optimizer = keras_mp.LossScaleOptimizer(sgd(name))
    v = tf.Variable(1.0)
    optimizer.minimize(lambda: v * 1.0, [])
    assert float(v) == 1
    assert int(optimizer.loss_scale.num_good_steps) == 0


def test_var_list_as_a_callable(name):
    optimizer = keras_mp.LossScaleOptimizer(sgd(name))
    made = []

    def loss():
        if not made:
            made.append(tf.Variable(1.0))
        return made[0] * 0.5

    optimizer.minimize(loss, lambda: made)
    assert float(made[0]) == 0.5


@pytest.mark.parametrize("wrap", [keras_mp.LossScaleOptimizer, keras_mp.OptimizerWrapper])
def test_var_list_as_one_variable(name, wrap):
    v = tf.Variable(1.0)
    optimizer = wrap(sgd(name))
    optimizer.minimize(lambda: v * 0.25, v)
    optimizer.minimize(lambda: v * 0.25, lambda: v)
    steps.minimize_tensor(optimizer, lambda: v * 0.25, v)()
    tf.function(steps.minimize(optimizer, lambda: v * 0.25, v))()
    assert float(v) == 0.0
    [(_, variable)] = optimizer.compute_gradients(lambda: v * 0.25, v)
    assert variable is v


def test_a_tensor_loss_needs_its_tape(name):
    optimizer = keras_mp.LossScaleOptimizer(sgd(name))
    with pytest.raises(ValueError, match="`tape` is required"):
        optimizer.minimize(tf.constant(1.0), [tf.Variable(1.0)])


def test_grad_loss(name):
    optimizer = keras_mp.LossScaleOptimizer(sgd(name))
    v = tf.Variable(1.0)
    if name.startswith("new") and not IS_KERAS_3:
        with pytest.raises(ValueError, match="`grad_loss` is for"):
            optimizer.minimize(lambda: v * 0.5, [v], grad_loss=tf.constant(3.0))
    else:
        optimizer.minimize(lambda: v * 0.5, [v], grad_loss=tf.constant(3.0))
        assert float(v) == -0.5


@pytest.mark.parametrize("bad", [None, 3, tf.constant(1.0), {"a": 1.0}, [[tf.constant(1.0)]]])
def test_what_is_no_list_of_gradients_is_refused(name, bad):
    with pytest.raises(TypeError, match="Received: "):
        keras_mp.LossScaleOptimizer(sgd(name)).get_unscaled_gradients(bad)


def test_the_dtype_of_the_sum_by_either_name(name):
    optimizer = keras_mp.LossScaleOptimizer(sgd(name), reduce_dtype=tf.bfloat16)
    assert (optimizer.reduce_dtype, optimizer.aggregate_in_float16) == ("bfloat16", False)
    optimizer.aggregate_in_float16 = False  # which it is
    assert optimizer.reduce_dtype == "bfloat16"
    both = {"reduce_dtype": "float16", "aggregate_in_float16": True}
    assert keras_mp.LossScaleOptimizer(sgd(name), **both).reduce_dtype == "float16"
    config = optimizer.get_config()
    # What files of before have.
    for older, expected in ((True, "float16"), (False, "float32")):
        del config["reduce_dtype"]
        config["aggregate_in_float16"] = older
        loaded = keras_mp.LossScaleOptimizer.from_config(config)
        assert loaded.reduce_dtype == expected
        config = loaded.get_config()
    for in_float16, expected in ((True, "float16"), (False, "float32")):
        optimizer.aggregate_in_float16 = in_float16
        assert optimizer.reduce_dtype == expected
    optimizer.reduce_dtype = "float16"
    assert optimizer.aggregate_in_float16
    with pytest.raises(TypeError, match="Received: reduce_dtype=16"):
        optimizer.reduce_dtype = 16
    for bad in ("yes", 2, None):
        with pytest.raises(TypeError, match="Received: aggregate_in_float16="):
            optimizer.aggregate_in_float16 = bad
    assert optimizer.reduce_dtype == "float16"


@keras_2_only
def test_takes_a_config_of_tensorflow_2_3():
    config = {
        "optimizer": {"class_name": "SGD", "config": {"name": "SGD", "learning_rate": 0.25}},
        "loss_scale": {
            "class_name": "DynamicLossScale",
            "config": {"initial_loss_scale": 64, "increment_period": 7, "multiplier": 4.0},
        },
    }
    again = keras_mp.LossScaleOptimizer.from_config(config)
    assert (again.initial_scale, again.dynamic_growth_steps) == (64, 7)
    assert again.loss_scale.multiplier == 4


@keras_2_only
@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_a_checkpoint_of_tensorflow_2_3_has_slots(has_slots, traced, tmp_path):
    inner, v = make_optimizer("legacy.SGD", 0.5, momentum=0.5), tf.Variable(1.0, name="v")
    inner.apply_gradients([(tf.constant(4.0), v)])
    older = tf.Module()
    older.base_optimizer = inner
    older.loss_scale = tf.Module()
    older.loss_scale.current_loss_scale = tf.Variable(64.0)
    older.loss_scale.good_steps = tf.Variable(3, dtype=tf.int64)
    path = tf.train.Checkpoint(v=v, optimizer=older).save(str(tmp_path / "checkpoint"))

    again, w = make_optimizer("legacy.SGD", 0.5, momentum=0.5), tf.Variable(0.0, name="v")
    optimizer = keras_mp.LossScaleOptimizer(again)
    if has_slots:
        optimizer.minimize(lambda: w * 1.0, [w])
    checkpoint = tf.train.Checkpoint(v=w, optimizer=optimizer)
    checkpoint.restore(path).expect_partial()
    step = tf.function(optimizer.minimize) if traced else optimizer.minimize
    step(lambda: w * 0.0, [w])
    assert float(optimizer.loss_scale()) == 64.0
    assert int(optimizer.loss_scale.num_good_steps) == 4
    assert int(optimizer.iterations) == 2
    assert float(again.get_slot(w, "momentum")) == -1.0  # half of what it was
    assert float(w) == -2.0
    names = [name for name, _ in tf.train.list_variables(checkpoint.save(str(tmp_path / "new")))]
    assert not any("base_optimizer" in name for name in names)  # a new one is not laid out so


def test_checkpoint_of_an_optimizer_that_was_saved_before_it_was_wrapped(name, tmp_path):
    inner, v = make_optimizer(name, 0.1), tf.Variable(1.0)
    inner.apply_gradients([(tf.constant(0.5), v)])
    tf.train.Checkpoint(optimizer=inner).save(str(tmp_path / "before"))
    optimizer = keras_mp.LossScaleOptimizer(inner)
    optimizer.minimize(lambda: v * np.nan, [v])
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "after"))
    again = keras_mp.LossScaleOptimizer(make_optimizer(name, 0.1))
    tf.train.Checkpoint(optimizer=again).restore(path).expect_partial()
    assert (float(again.loss_scale), int(again.steps_skipped)) == (2**14, 1)


def test_stateless_apply_says_what_stock_says():
    if not IS_KERAS_3:
        pytest.skip("stateless_apply is of Keras 3.")
    with pytest.raises(ValueError, match="stateless_apply is not supported with the TensorFlow"):
        keras_mp.LossScaleOptimizer("sgd").stateless_apply([], [], [])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_scale", [None, 64], ids=repr)
def test_skip_nonfinite(name, loss_scale, mode):
    inner = make_optimizer(name, 0.25, momentum=0.0)
    optimizer = keras_mp.LossScaleOptimizer(inner, loss_scale, skip_nonfinite=True)
    v = tf.Variable(8.0)
    optimizer.build([v])

    loss = lambda factor: v * factor  # noqa: E731
    ways = [way(optimizer, loss, [v]) for way in (steps.minimize, steps.rfc)]
    step = placed(mode, lambda factor: [way(factor) for way in ways])
    for factor, expected, skipped in [(1.0, 7.5, 0), (np.nan, 7.5, 2), (2.0, 6.5, 2)]:
        step(tf.constant(factor))
        assert float(v) == expected
        assert int(optimizer.steps_skipped) == skipped
        assert bool(optimizer.last_step_skipped) == np.isnan(factor)
    assert int(optimizer.iterations) == 4
    assert float(optimizer.loss_scale()) == (loss_scale or 1)
    assert not optimizer.dynamic


def test_without_a_scale_a_loss_stays_as_it_is_and_steps_have_to_be_skipped(name):
    optimizer = keras_mp.LossScaleOptimizer(sgd(name), None, skip_nonfinite=True)
    loss = tf.constant(2.0, tf.float16)
    assert optimizer.get_scaled_loss(loss) is loss
    assert optimizer.scale_loss(loss) is loss
    with pytest.raises(ValueError, match="needs a loss scale"):
        keras_mp.LossScaleOptimizer(sgd(name), None)
    with pytest.raises(TypeError, match="skip_nonfinite"):
        keras_mp.LossScaleOptimizer(sgd(name), skip_nonfinite=1)


# What users of Keras's own class do with it, done with ours in its place.


class Overrides(keras_mp.LossScaleOptimizer):
    """Overrides a method and notes that it was called, and with which gradients."""

    def __init__(self, *args, **kwargs):
        self.seen = []  # Before the base class is initialized, as Python allows.
        super().__init__(*args, **kwargs)


class OwnApplyGradients(Overrides):
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        self.seen.append(float(pairs[0][0]))
        return super().apply_gradients([(2 * g, v) for g, v in pairs], *args, **kwargs)


class OwnComputeGradients(Overrides):
    def compute_gradients(self, *args, **kwargs):
        pairs = super().compute_gradients(*args, **kwargs)
        self.seen.append(float(pairs[0][0]))
        return [(2 * g, v) for g, v in pairs]


class OwnGetScaledLoss(Overrides):
    def get_scaled_loss(self, loss):
        scaled = super().get_scaled_loss(loss)
        self.seen.append(0.25)
        return (lambda: 2 * scaled()) if callable(scaled) else 2 * scaled


class OwnGetUnscaledGradients(Overrides):
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
    way = {"callable": steps.minimize, "tensor": steps.minimize_tensor}[form]
    way(optimizer, lambda: v * 0.25, [v])()
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
        steps.minimize_tensor(optimizer, lambda: v * 0.5, [v])()
        return [w.name for w in variables_of(optimizer)]

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


def test_takes_the_config_of_keras_s_own_class_and_what_old_ones_of_keras_3_carry_along(name):
    idle = {"clipnorm": None, "use_ema": False, "ema_momentum": 0.99, "loss_scale_factor": None}
    stock = Stock(make_optimizer(name, 0.25), initial_scale=64, dynamic_growth_steps=7)
    older = {
        **{"name": "loss_scale", "inner_optimizer": tf.keras.optimizers.serialize(sgd(name))},
        **{"initial_scale": 64.0, "dynamic_growth_steps": 7.0, **idle},
    }
    for config in (stock.get_config(), older):
        again = keras_mp.LossScaleOptimizer.from_config(config)
        assert type(again.inner_optimizer) is type(stock.inner_optimizer)
        assert (again.initial_scale, again.dynamic_growth_steps) == (64, 7)
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
    saved = compiled_model(optimizer=sgd(name))
    saved.save_weights(tmp_path / "a.weights.h5")
    loaded = compiled_model(optimizer=keras_mp.LossScaleOptimizer(sgd(name)))
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="saved without loss scaling"):
        loaded.load_weights(tmp_path / "a.weights.h5")
    assert_all_equal(saved.get_weights(), loaded.get_weights())


def test_gradients_may_be_arrays_or_none(name):
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name)), tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(v * 0.5)
    scaled = [*tape.gradient(loss, [v]), None]
    [gradient, none] = optimizer.get_unscaled_gradients(scaled)
    assert none is None
    # What is refused changes nothing, so it may be put right.
    with pytest.raises(TypeError, match="A gradient must be"):
        optimizer.apply_gradients([([gradient], v)])
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply_gradients([(None, v)])
    optimizer.apply_gradients([(gradient.numpy(), v)])
    assert float(v[0]) == 0.5


@pytest.mark.skipif(not IS_KERAS_3, reason="loss_scale_factor is of Keras 3.")
def test_a_second_scale_is_refused_also_where_it_comes_later(name):
    with pytest.raises(ValueError, match="loss_scale_factor=8"):
        keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(loss_scale_factor=8.0))
    optimizer, v = keras_mp.LossScaleOptimizer(sgd(name)), tf.Variable(1.0)
    with pytest.raises(TypeError, match="another LossScaleOptimizer cannot wrap it"):
        Stock(optimizer)
    assert optimizer.loss_scale_factor is None
    optimizer.inner_optimizer.loss_scale_factor = 8.0
    with pytest.raises(ValueError, match="scales the loss itself"):
        optimizer.minimize(lambda: v * 1.0, [v])
    assert float(v) == 1


@pytest.mark.parametrize(("kind", "how"), [("SGD", {"momentum": 0.9}), ("Adam", {})])
def test_a_step_that_xla_compiles_copies_no_slots(kind, how):
    optimizer = keras_mp.LossScaleOptimizer(getattr(tf.keras.optimizers, kind)(0.1, **how))
    variable, slope = tf.Variable(tf.ones([64, 64])), tf.ones([64, 64])
    optimizer.build([variable])

    @tf.function(jit_compile=True)
    def step(factor):
        optimizer.minimize(lambda: tf.reduce_sum(variable * slope) * factor, [variable])

    compiled = step.experimental_get_compiler_ir(tf.constant(1.0))(stage="optimized_hlo")
    assert "f32[64,64]" in compiled
    # That of the variable, which the loss reads, too.
    assert len(re.findall(r"f32\[64,64\]\S* copy\(", compiled)) <= 1
