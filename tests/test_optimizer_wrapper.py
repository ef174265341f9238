import inspect
import re

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import IS_KERAS_3, MODES, pairs, placed, value
from tests.models import FAMILIES, OPTIMIZER_BASES, compiled_model, make_optimizer, variables_of
from tests.steps import Doubled
from tests.test_step_tapes import expect_as_in_float32, plain, trained

WRAPPERS = [
    keras_mp.LossScaleOptimizer,
    keras_mp.OptimizerWrapper,
    keras_mp.AllReduceOptimizer,
    Doubled,
]


@pytest.fixture(params=WRAPPERS, ids=lambda cls: cls.__name__)
def wrap(request):
    return request.param


def test_hyperparameters_are_the_inner_optimizers(name, wrap):
    inner = make_optimizer(name, 0.5, momentum=0.25)
    optimizer = wrap(inner)
    assert float(value(optimizer.learning_rate)) == float(value(optimizer.lr)) == 0.5
    assert float(value(optimizer.momentum)) == 0.25
    optimizer.learning_rate = 0.125
    assert float(value(inner.learning_rate)) == 0.125
    optimizer.lr = 0.0625
    assert float(value(inner.learning_rate)) == 0.0625
    optimizer.momentum = 0.75
    assert float(value(inner.momentum)) == 0.75
    optimizer.clipnorm = 2.0
    assert inner.clipnorm == 2
    for known in ("learning_rate", "lr", "momentum", "clipnorm", "inner_optimizer"):
        assert known in dir(optimizer)
        assert hasattr(optimizer, known)


def test_nesterov(name, wrap):
    # The RFC's silent bug: there, this sets an attribute of the wrapper that nothing reads.
    inner = make_optimizer(name, 0.5)
    optimizer = wrap(inner)
    if name.startswith("legacy"):
        with pytest.raises(AttributeError, match=re.escape("`optimizer.inner_optimizer.nesterov`")):
            optimizer.nesterov = True
        with pytest.raises(AttributeError, match=re.escape("`optimizer.inner_optimizer.nesterov`")):
            _ = optimizer.nesterov
        optimizer.momentum = lambda: 0.25  # No variable was made of it.
        assert optimizer.momentum == 0.25
    else:
        optimizer.nesterov = True
        assert inner.nesterov
        assert optimizer.nesterov


def test_methods_of_the_inner_class_only_are_not_delegated(name, wrap):
    base = type(make_optimizer(name))
    own = type("Own", (base,), {"apply_gradients_zero_min": lambda self, pairs: None})
    optimizer = wrap(own(0.1))
    with pytest.raises(AttributeError, match="inner_optimizer.apply_gradients_zero_min"):
        optimizer.apply_gradients_zero_min([])
    assert not hasattr(optimizer, "apply_gradients_zero_min")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = optimizer.nonsense


def test_new_attributes_stay_on_the_wrapper(name, wrap):
    optimizer = wrap(make_optimizer(name))
    optimizer.note = "mine"
    assert optimizer.note == "mine"
    assert not hasattr(optimizer.inner_optimizer, "note")
    with pytest.raises(AttributeError):
        optimizer.inner_optimizer = make_optimizer(name)


def test_iterations_can_be_set_where_the_inner_optimizers_can(name, wrap):
    optimizer = wrap(make_optimizer(name))
    if IS_KERAS_3:
        with pytest.raises(AttributeError):
            optimizer.iterations = tf.Variable(7, dtype=tf.int64)
    else:
        optimizer.iterations = tf.Variable(7, dtype=tf.int64)
        assert int(optimizer.inner_optimizer.iterations) == 7


def test_variables_are_the_inner_optimizers(name, wrap):
    optimizer, v = wrap(make_optimizer(name)), tf.Variable(1.0)
    for _ in range(2):  # To build it again changes nothing.
        optimizer.build([v])
        inner = variables_of(optimizer.inner_optimizer)
        assert [id(x) for x in optimizer.variables] == [id(x) for x in inner]
        assert len(inner) > 1
    assert optimizer.variables() == optimizer.variables == optimizer.weights


@pytest.mark.parametrize("wrap", [*WRAPPERS, keras_mp.MasterWeightOptimizer])
@pytest.mark.parametrize("bad", [None, 3, ..., tf.keras.optimizers.SGD], ids=repr)
def test_what_is_no_optimizer_is_refused(wrap, bad):
    with pytest.raises(TypeError, match="Expected an optimizer of `tf.keras`"):
        wrap(bad)


def test_an_optimizer_may_be_given_by_its_name_or_config(wrap):
    of_config = wrap(tf.keras.optimizers.serialize(tf.keras.optimizers.SGD(0.5)))
    assert float(value(of_config.learning_rate)) == 0.5
    assert type(wrap("sgd").inner_optimizer) is type(of_config.inner_optimizer)


CONFIGURED = {
    "dynamic": lambda inner: keras_mp.LossScaleOptimizer(
        inner, keras_mp.DynamicLossScale(64, increment_period=7, min_loss_scale=2), False
    ),
    "skipping": lambda inner: keras_mp.LossScaleOptimizer(
        inner, None, reduce_dtype="bfloat16", skip_nonfinite=True, warn_after_skips=2
    ),
    "summing": lambda inner: keras_mp.AllReduceOptimizer(inner, "float32"),
    "in 16 bits": lambda inner: keras_mp.MasterWeightOptimizer(inner, "copy", "bfloat16", seed=5),
    "plain": keras_mp.OptimizerWrapper,
}


@pytest.mark.parametrize("kind", CONFIGURED)
def test_a_config_makes_an_equal_wrapper(name, kind):
    optimizer = CONFIGURED[kind](make_optimizer(name, 0.25))
    serialized = tf.keras.optimizers.serialize(optimizer)
    config = optimizer.get_config()
    copies = type(optimizer).from_config(config), tf.keras.optimizers.deserialize(serialized)
    shown = [re.sub("at 0x.*?>", ">", repr(each)) for each in (optimizer, *copies)]
    assert re.match(f"<{type(optimizer).__name__} of .*SGD", shown[0])
    assert shown[1:] == shown[:1] * 2  # with the method, and dtypes
    for again in copies:
        assert type(again) is type(optimizer)
        assert type(again.inner_optimizer) is type(optimizer.inner_optimizer)
        assert again.get_config() == config
        assert float(value(again.learning_rate)) == 0.25


def test_legacy_slots(name):
    if not name.startswith("legacy"):
        assert keras_mp.LossScaleOptimizer(make_optimizer(name)).get_slot_names() == []
        return
    optimizer, v = keras_mp.LossScaleOptimizer(make_optimizer(name)), tf.Variable(1.0)
    optimizer.minimize(lambda: v * 0.5, [v])
    assert optimizer.get_slot_names() == ["momentum"]
    assert optimizer.get_slot(v, "momentum") is optimizer.inner_optimizer.get_slot(v, "momentum")
    weights = optimizer.get_weights()
    optimizer.set_weights([2 * w for w in weights])
    np.testing.assert_array_equal(optimizer.get_weights(), [2 * w for w in weights])


def test_wraps_in_both_orders(name):
    def train(optimizer):
        v = tf.Variable(1.0)
        for _ in range(4):
            optimizer.minimize(lambda: v**2, [v])
        assert int(value(optimizer.iterations)) == 4
        assert float(value(optimizer.learning_rate)) == 0.125
        return float(v)

    def sgd():
        return make_optimizer(name, 0.125, momentum=0.0)

    control = train(Doubled(sgd()))
    assert control != train(keras_mp.OptimizerWrapper(sgd()))
    assert train(Doubled(keras_mp.LossScaleOptimizer(sgd()))) == control
    assert train(keras_mp.LossScaleOptimizer(Doubled(sgd()))) == control
    with pytest.raises(TypeError, match="The LossScaleOptimizer scales the loss or sums"):
        keras_mp.LossScaleOptimizer(Doubled(keras_mp.LossScaleOptimizer(sgd())))


def test_every_public_method_of_keras_is_the_wrappers():
    # A method that a newer Keras adds is delegated too; inherited, it would run on no state.
    for base in OPTIMIZER_BASES:
        for method in dir(base):
            if method.startswith("_") or not callable(getattr(base, method)):
                continue
            if method in ("get_config", "from_config"):
                continue
            assert inspect.getattr_static(keras_mp.OptimizerWrapper, method) is not (
                inspect.getattr_static(base, method)
            ), method


@pytest.mark.filterwarnings("ignore:Neither get_scaled_loss")
def test_gradients_without_variables_are_those_that_the_optimizer_was_built_with(name, wrap):
    optimizer, variable = wrap(make_optimizer(name, 1.0, momentum=0.0)), tf.Variable(1.0)
    with pytest.raises(ValueError, match="Pass the variables together with the gradients"):
        optimizer.apply([tf.constant(1.0)])
    if IS_KERAS_3:
        optimizer.build([variable])
        optimizer.apply([tf.constant(0.5)])
        assert float(value(variable)) == (0 if wrap is Doubled else 0.5)


class Sees:
    """Notes the gradients that it gets, and lets what it is mixed into apply them in parts."""

    def __init__(self, inner_optimizer, parts=1):
        super().__init__(inner_optimizer)
        self.parts, self.seen = parts, []

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        self.seen.append([gradient for gradient, _ in pairs])
        for i in range(self.parts):
            super().apply_gradients(pairs[i :: self.parts], *args, **kwargs)


class Seen(Sees, keras_mp.OptimizerWrapper):
    """A wrapper around another one, whose `apply_gradients` is that of a class beside it."""


class SeenAndScaled(Sees, keras_mp.LossScaleOptimizer):
    """The same of a subclass of the optimizer that scales."""


@pytest.mark.parametrize(
    ("name", "scaled", "kind", "mode"),  # scaled by hand, or by the optimizer
    pairs(FAMILIES, [False, True], ["around", "subclass", "splits", "plain"], MODES),
)
def test_each_part_of_a_step_is_unscaled_before_a_wrapper_sees_it(name, scaled, kind, mode):
    inner = make_optimizer(name, 1.0, momentum=0.0)
    if kind == "subclass":
        scaling = optimizer = SeenAndScaled(inner)
    else:
        scaling = keras_mp.LossScaleOptimizer(inner)
        parts = 2 if kind == "splits" else 1
        wrapper = keras_mp.OptimizerWrapper(scaling)
        optimizer = wrapper if kind == "plain" else Seen(scaling, parts)
    variables = [tf.Variable(1.0) for _ in range(4)]
    optimizer.build(variables)
    rates = [0.5, 0.25, 0.125, 0.0625]
    how = {"scaled": True} if scaled else {}

    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([r * v for r, v in zip(rates, variables)])
            loss = loss * scaling.loss_scale() if scaled else scaling.scale_loss(loss)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(list(zip(gradients, variables))[:2], **how)
        optimizer.apply(gradients[2:], variables[2:], **how)

    step = placed(mode, step)
    for n in (1, 2):
        step()
        np.testing.assert_array_equal([value(v) for v in variables], [1 - n * r for r in rates])
    if mode == "eager" and kind != "plain":
        assert optimizer.seen == [rates[:2], rates[2:]] * 2


# How gradients are passed.
WAYS = {
    "by keyword": lambda o, pairs: o.apply_gradients(grads_and_vars=pairs),
    "lists": lambda o, pairs: o.apply_gradients([list(pair) for pair in pairs]),
    "a generator": lambda o, pairs: o.apply_gradients(grads_and_vars=(each for each in pairs)),
    "a tuple": lambda o, pairs: o.apply_gradients(tuple(list(pair) for pair in pairs)),
}
APPLY = {
    "apply": lambda o, pairs: o.apply(
        grads=[g for g, _ in pairs], trainable_variables=[v for _, v in pairs]
    )
}


@pytest.mark.parametrize("way", [*WAYS, *(["apply"] if IS_KERAS_3 else [])])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_gradients_are_applied_in_a_train_step_however_they_are_passed(way, is_wrapped):
    def step(model, x, y):
        optimizer = model.optimizer if is_wrapped else model.my_optimizer
        apply = lambda pairs: (WAYS | APPLY)[way](optimizer, list(pairs))  # noqa: E731
        steps.taped(model.loss_of, model.trainable_variables, apply)(x, y)

    mode = {"optimizer": tf.keras.optimizers.SGD(1e5), "run_eagerly": True}
    expect_as_in_float32(trained(step, "mixed_float16", mode), plain)


@pytest.mark.parametrize("way", WAYS)
def test_wrappers_apply_gradients_however_they_are_passed(name, wrap, way):
    inner = make_optimizer(name, 1.0, momentum=0.0)
    unscaling = {"loss_scale": None, "skip_nonfinite": True}
    optimizer = wrap(inner, **unscaling if wrap is keras_mp.LossScaleOptimizer else {})
    variable = tf.Variable([1.0, 2.0])
    WAYS[way](optimizer, [(tf.constant([0.5, -1.0]), variable)])
    np.testing.assert_array_equal(variable, [0, 4] if wrap is Doubled else [0.5, 3])


def test_build_takes_the_names_of_both_kerases():
    variable = tf.Variable([1.0, 2.0])
    for arguments in ({"var_list": [variable]}, {"variables": [variable]}):
        optimizer = keras_mp.LossScaleOptimizer("adam")
        optimizer.build(**arguments)
        assert len(optimizer.variables) > 2


def test_a_train_step_that_is_called_by_keyword_knows_its_batch():
    keras_mp.set_global_policy("mixed_float16")
    layers = tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)
    model = compiled_model(*layers, inputs=4, run_eagerly=True)
    model.train_step(data=(tf.ones([2, 4]), tf.ones([2, 1])))
    model.train_step(data=(tf.ones([0, 4]), tf.ones([0, 1])))
    assert [loss.kind for loss in model.optimizer.last_overflow.losses] == ["no examples"]
