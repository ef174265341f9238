import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import common
from tests.common import IS_KERAS_3, assert_all_equal, mirrored, ours, unscaled, value
from tests.models import FAMILIES, compiled_model, make_optimizer

Stock = tf.keras.mixed_precision.LossScaleOptimizer

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Subclassed(common.Subclassed):
    def __init__(self, **kwargs):
        super().__init__(tf.keras.layers.Dense(1), **kwargs)


class OwnCompile(Subclassed):
    def compile(self, optimizer, extra=None, **kwargs):
        self.extra = extra
        super().compile(optimizer=optimizer, **kwargs)


def sequential():
    return tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])


def compiled(policy, optimizer="sgd", make=sequential, **arguments):
    """A model that is made and compiled under a policy of ours."""
    keras_mp.set_global_policy(policy)
    model = make()
    model.compile(optimizer, **{"loss": "mse", **arguments})
    return model


@pytest.fixture(params=[sequential, Subclassed, OwnCompile], ids=lambda make: make.__name__)
def make_model(request):
    return request.param


def test_trains_with_our_optimizer_and_a_copy_of_the_loss_scale(make_model):
    policy = keras_mp.Policy("mixed_float16")
    # One in a graph, the others in eager: what compile does is the same.
    eager = make_model is not Subclassed
    model = compiled(policy, tf.keras.optimizers.SGD(0.01), make_model, run_eagerly=eager)
    assert type(model.optimizer) is keras_mp.LossScaleOptimizer
    assert model.optimizer.loss_scale is not policy.loss_scale
    before = float(model.evaluate(X, Y, verbose=0))
    model.fit(X, Y, epochs=5, batch_size=8, verbose=0)
    assert float(model.evaluate(X, Y, verbose=0)) < before
    # Steps made and steps skipped: with float16, the first ones may well overflow.
    assert int(value(model.optimizer.iterations)) + int(model.optimizer.steps_skipped) == 20
    assert 15 <= int(model.optimizer.loss_scale.num_good_steps) <= 20
    assert int(policy.loss_scale.num_good_steps) == 0
    assert model.layers[-1].compute_dtype == "float16"


@pytest.mark.parametrize("policy", [unscaled("float16"), "float32", "mixed_bfloat16"], ids=str)
def test_policies_without_a_loss_scale_leave_the_optimizer_alone(make_model, policy):
    optimizer = make_optimizer("new.SGD")
    model = compiled(policy, optimizer, make_model, run_eagerly=True)
    assert model.optimizer is optimizer
    model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_stock_policy_is_stocks_business_but_somebody_says_so(make_model, policy):
    tf.keras.mixed_precision.set_global_policy(policy)
    model = make_model()
    line = rf'Call keras_mp.set_global_policy\("{policy}"\) in its place'
    with pytest.warns(keras_mp.MixedPrecisionWarning, match=line) as caught:
        model.compile("sgd", loss="mse")
    assert [each.filename for each in caught] == [__file__]
    assert isinstance(model.optimizer, Stock) == (policy == "mixed_float16")
    assert not isinstance(model.optimizer, keras_mp.LossScaleOptimizer)


def test_who_asks_for_stock_or_for_ours_under_a_stock_policy_hears_nothing():
    optimizers = (Stock(tf.keras.optimizers.SGD()), keras_mp.LossScaleOptimizer("sgd"), "sgd")
    for policy, optimizer in zip(("mixed_float16", "mixed_float16", "float32"), optimizers):
        tf.keras.mixed_precision.set_global_policy(policy)
        sequential().compile(optimizer, loss="mse")


@pytest.mark.parametrize("ours", [True, False])
def test_a_policy_that_is_set_after_the_model_was_made(make_model, ours):
    model = make_model()
    set_global_policy = (keras_mp if ours else tf.keras.mixed_precision).set_global_policy
    set_global_policy("mixed_float16")
    line = r'Move the line keras_mp.set_global_policy\("mixed_float16"\) up'
    with pytest.warns(keras_mp.MixedPrecisionWarning, match=line) as caught:
        model.compile("sgd", loss="mse")
    assert [each.filename for each in caught] == [__file__]


def test_who_keeps_a_model_in_float32_hears_nothing():
    keras_mp.set_global_policy("mixed_float16")
    with keras_mp.policy_scope("float32"):
        scoped = sequential()
        compiled("float32")
    keras_mp.set_global_policy("mixed_float16")
    scoped.compile("sgd", loss="mse")
    head = tf.keras.layers.Dense(1, dtype="float32")
    for policy in (None, "float32"):  # a head in float32, and all layers, on purpose
        body = tf.keras.layers.Dense(4, dtype=policy)
        tf.keras.Sequential([tf.keras.Input((4,)), body, head]).compile("sgd", loss="mse")
    compiled("float32")


class KeepsItsPolicyOnly(Subclassed):
    def get_config(self):
        policy = tf.keras.utils.serialize_keras_object(self.dtype_policy)
        return {"dtype": policy, "name": self.name}

    @classmethod
    def from_config(cls, config):
        policy = tf.keras.utils.deserialize_keras_object(config.pop("dtype"))
        return cls(dtype=policy, **config)


class LosesItsPolicy(Subclassed):
    def get_config(self):
        return {"name": self.name}


def saved(cls, policy, path):
    """Trains a subclassed model under a policy and saves it; returns what loads it."""
    keras_mp.set_global_policy(policy)
    model = cls(name="subclassed")
    model.compile("sgd", "mse")
    model.train_on_batch(X, Y)
    model.save(path)
    keras_mp.set_global_policy(None)
    classes = {cls.__name__: cls}
    return lambda **how: tf.keras.models.load_model(path, custom_objects=classes, **how)


def summary(model):
    lines = []
    keras_mp.summary(model, lines.append)
    return " ".join(lines)


OWN = "Its own policy is 'mixed_float16', and none of its layers"
IN_FILE = "It was saved under 'mixed_float16', and none of its layers"


@pytest.mark.parametrize(("cls", "told"), [(KeepsItsPolicyOnly, OWN), (LosesItsPolicy, IN_FILE)])
def test_saved_mixed_and_loaded_float32(cls, told, tmp_path):
    load = saved(cls, "mixed_float16", str(tmp_path / "model.keras"))
    cure = 'none of its layers computes in 16 bits.*policy_scope\\("mixed_float16"\\)'
    with pytest.warns(keras_mp.MixedPrecisionWarning, match=f"'subclassed': {told}") as warned:
        model = load()
    assert re.search(cure, str(warned[0].message))
    assert told in summary(model)
    if cls is KeepsItsPolicyOnly:
        # Nor was it made under the policy that is in force if it has not been compiled with ours.
        for again in (model, load(compile=False)):
            with pytest.warns(keras_mp.MixedPrecisionWarning, match=f"'subclassed': {told}"):
                again.compile("sgd", "mse")
    with keras_mp.policy_scope("mixed_float16"):  # the cure
        model = load()
    assert model.layers[0].compute_dtype == "float16"
    assert told not in summary(model)
    assert model.optimizer.policy_in_file == "mixed_float16"


def test_saved_in_float32_with_a_loss_scale(tmp_path):
    policy = keras_mp.Policy("float32", loss_scale="dynamic")
    load = saved(LosesItsPolicy, policy, str(tmp_path / "model.keras"))
    assert load().optimizer.policy_in_file is None


def test_optimizer_as_keyword_string_config_or_left_out():
    keras_mp.set_global_policy("mixed_float16")
    for args, kwargs in [
        ((), {"optimizer": "adam"}),
        (("adam",), {}),
        ((tf.keras.optimizers.serialize(tf.keras.optimizers.Adam()),), {}),
        ((), {}),
    ]:
        model = sequential()
        model.compile(*args, loss="mse", **kwargs)
        assert type(model.optimizer) is keras_mp.LossScaleOptimizer
    assert "RMSprop" in type(model.optimizer.inner_optimizer).__name__


def test_compiling_again_reuses_the_wrapper():
    optimizer = make_optimizer("new.SGD")
    model = compiled("mixed_float16", optimizer)
    wrapper = model.optimizer
    for again in (optimizer, wrapper):
        model.compile(again, loss="mae")
        assert model.optimizer is wrapper
    policy = keras_mp.Policy("mixed_float16", loss_scale=4)
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="keeps the loss scale of that time"):
        assert compiled(policy, optimizer).optimizer is wrapper


def test_our_optimizer_is_not_wrapped_again():
    optimizer = keras_mp.LossScaleOptimizer("sgd", 8)
    assert compiled("mixed_float16", optimizer).optimizer is optimizer
    outside = keras_mp.OptimizerWrapper(keras_mp.LossScaleOptimizer("sgd", 8))
    model = compiled("mixed_float16", outside)
    assert model.optimizer is outside
    model.fit(X, Y, verbose=0)


def test_a_model_that_was_compiled_with_ours_stays_so_unless_its_policy_says_otherwise():
    def again(optimizer, model):
        model.compile(optimizer, "mse")
        model.compile("adam", "mse")
        return model.optimizer

    def mixed():
        layer = tf.keras.layers.Dense(1, dtype="mixed_float16")
        return tf.keras.Sequential([tf.keras.Input((4,)), layer])

    ours = keras_mp.LossScaleOptimizer("sgd", 8, reduce_dtype="bfloat16", warn_after_skips=3)
    found = again(keras_mp.OptimizerWrapper(ours), mixed())
    assert type(found) is keras_mp.LossScaleOptimizer
    assert found is not ours
    assert (found.initial_scale, found.reduce_dtype, found.warn_after_skips) == (8, "bfloat16", 3)
    # A policy that the layers do not follow is one that was in force when they were loaded.
    keras_mp.set_global_policy("float32")
    assert again(keras_mp.LossScaleOptimizer("sgd", 8), mixed()).initial_scale == 8
    for policy in (unscaled("float16"), "mixed_bfloat16"):
        keras_mp.set_global_policy(policy)
        assert not isinstance(again(keras_mp.LossScaleOptimizer("sgd", 8), sequential()), Stock)
    keras_mp.set_global_policy(keras_mp.Policy("mixed_float16", loss_scale=16))
    assert again(keras_mp.LossScaleOptimizer("sgd", 8), sequential()).initial_scale == 16


def test_stocks_is_left_alone_with_a_warning():
    optimizer = Stock(tf.keras.optimizers.SGD())
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="own LossScaleOptimizer"):
        assert compiled("mixed_float16", optimizer).optimizer is optimizer


@pytest.mark.skipif(not IS_KERAS_3, reason="auto_scale_loss is of Keras 3.")
def test_auto_scale_loss_is_honoured():
    model = compiled("mixed_float16", auto_scale_loss=False)
    assert not isinstance(model.optimizer, Stock)
    for auto_scale_loss in (False, True):
        model.compile("sgd", "mse", None, None, None, False, 1, "auto", auto_scale_loss)
        assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer) == auto_scale_loss


def test_a_wrong_call_of_compile_is_keras_to_refuse():
    keras_mp.set_global_policy("mixed_float16")
    with pytest.raises(TypeError, match=r"[Cc]ompile\(\).*optimizer"):
        sequential().compile("adam", optimizer="sgd")


@pytest.mark.skipif(IS_KERAS_3, reason="A structure of optimizers is of Keras 2.")
def test_a_list_of_optimizers():
    model = compiled("mixed_float16", ["sgd", "adam"])
    assert all(type(o) is keras_mp.LossScaleOptimizer for o in model.optimizer)


def test_a_models_own_policy_counts_not_the_global_one():
    policy = keras_mp.Policy("mixed_float16", loss_scale=16)
    model = common.Subclassed(tf.keras.layers.Dense(1, dtype=policy), dtype=policy)
    model.compile("sgd", loss="mse")  # Quietly.
    assert model.optimizer.initial_scale == 16


@pytest.mark.parametrize("own_policy", [None, "float32", "mixed_bfloat16"])
def test_float16_layers_in_a_float32_model_are_warned_about(own_policy):
    # Defect 9.
    if own_policy:
        keras_mp.set_global_policy(own_policy)
    keras_mp.Policy("float32")
    layer = tf.keras.layers.Dense(1, dtype="mixed_float16", name="the_layer")
    for layers in ([layer], [tf.keras.Sequential([layer])]):
        model = tf.keras.Sequential(layers, name="the_model")
        with pytest.warns(keras_mp.MixedPrecisionWarning, match="the_model.*the_layer") as caught:
            model.compile("sgd", loss="mse")
        assert caught[0].filename == __file__
        model.compile(keras_mp.LossScaleOptimizer("sgd"), loss="mse")  # Quietly.


def test_models_without_our_policy_train_exactly_as_before():
    keras_mp.Policy("mixed_float16")  # the hook is in place
    keras_compile = tf.keras.Model.compile.__wrapped__
    weights = []
    for compile in (type(sequential()).compile, keras_compile):
        tf.keras.utils.set_random_seed(3)
        model = sequential()
        compile(model, "adam", loss="mse")
        assert "Adam" in type(model.optimizer).__name__
        model.fit(X, Y, epochs=2, verbose=0)
        weights.append(model.get_weights())
    assert_all_equal(*weights)


@pytest.mark.skipif(IS_KERAS_3, reason="Keras 3 takes no optimizers of TensorFlow 1.")
@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {}])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_an_optimizer_of_tensorflow_1_trains_as_in_float32(policy, mode):
    losses = {}
    for name in ("float32", policy):
        keras_mp.set_global_policy(name)
        tf.keras.utils.set_random_seed(0)
        model = sequential()
        # Gradients of so small a loss are zero in float16, unless it is scaled.
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(5e5)
        model.compile(optimizer, lambda y, p: 1e-7 * tf.reduce_mean((y - p) ** 2), **mode)
        history = model.fit(X, Y, epochs=3, shuffle=False, verbose=0).history["loss"]
        losses[name] = np.array(history) * 1e7
    assert losses["float32"][-1] < 0.9 * losses["float32"][0]
    np.testing.assert_allclose(losses[policy], losses["float32"], rtol=0.05)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("argument", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_clipping_before_the_sum_over_replicas_is_said(argument, name):
    if argument == "global_clipnorm" and name.startswith("legacy"):
        pytest.skip("Legacy optimizers of some versions do not have it.")
    keras_mp.set_global_policy("mixed_bfloat16")

    def moved(wrap):
        with mirrored(2).scope():
            ones = tf.keras.initializers.Ones()
            dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer=ones)
            optimizer = wrap(make_optimizer(name, 1.0, **{argument: 1.0}))
            model = compiled_model(dense, optimizer=optimizer, run_eagerly=True)
        model.fit(np.diag([0.7, 5.0]).astype("float32"), np.zeros((2, 1), "float32"), verbose=0)
        return 1.0 - model.get_weights()[0].ravel()

    def wrapped(optimizer):
        return keras_mp.AllReduceOptimizer(optimizer, "float32")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", keras_mp.MixedPrecisionWarning)
        plain = moved(lambda optimizer: optimizer)
    found = [str(each.message) for each in ours(told)]
    assert len(found) == int(IS_KERAS_3)
    assert all(f"{argument!r} of its optimizer" in each for each in found)
    cured = moved(wrapped)  # Without a warning, and as Keras 2 clips.
    assert (IS_KERAS_3 and argument != "clipvalue") == (abs(cured - plain).max() > 0.1)


def test_losses_and_metrics_of_a_program_get_float32_predictions():
    """Of a model that returns 16 bits."""
    dtypes = []

    class Sees(tf.keras.metrics.Metric):
        def update_state(self, y_true, y_pred, sample_weight=None):
            dtypes.append(tf.as_dtype(y_pred.dtype))

        def result(self):
            return 0.0

    def loss(y_true, y_pred):
        dtypes.append(tf.as_dtype(y_pred.dtype))
        return tf.reduce_mean(tf.square(y_pred), -1)

    with keras_mp.policy_scope(keras_mp.Policy("mixed_float16", model_outputs=None)):
        model = sequential()
    model.compile("sgd", loss, metrics=[Sees()])
    model.fit(X, Y, verbose=0)
    assert model(X).dtype == tf.float16
    assert set(dtypes) == {tf.float32}
