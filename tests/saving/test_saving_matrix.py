"""Saved under one policy, loaded under another, in every format: the run goes on.

Each run is compared, step by step, with the one that was never interrupted.
"""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, assert_all_equal, ours, pairs, value
from tests.models import FAMILIES, compiled_model, digits, make_optimizer, slots
from tests.saving.common import load, save, set_policy

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
OPTIMIZERS = [name.replace("SGD", "Adam") for name in FAMILIES]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer"),
    pytest.mark.filterwarnings("ignore:tf.keras loads a model from a SavedModel"),
]


def make_model(optimizer):
    tf.keras.utils.set_random_seed(0)
    hidden = tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.BatchNormalization()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # What is saved does not depend on it, and tracing each of these models takes most of the time.
    how = {"optimizer": make_optimizer(optimizer), "loss": loss, "run_eagerly": True}
    return compiled_model(*hidden, tf.keras.layers.Dense(10), inputs=64, **how)


def step(model, i):
    x, y = digits()
    model.train_on_batch(x[32 * i : 32 * i + 32], y[32 * i : 32 * i + 32])


def trained(optimizer, steps=(9,)):
    """A model that has made steps: with one, what a file has is restored at once."""
    model = make_model(optimizer)
    for i in steps:
        step(model, i)
    return model


def going_on(*models):
    """Yields the number of each step that models make alike, from the sixth on."""
    for i in range(5, 9):
        for model in models:
            step(model, i)
        yield i


def state(model):
    """All that a step changes: weights, iterations, slots and, where there is one, the scale."""
    own = []
    if isinstance(model.optimizer, keras_mp.LossScaleOptimizer):
        scale = model.optimizer.loss_scale
        own = [scale.loss_scale, scale.num_good_steps, model.optimizer.steps_skipped]
    variables = [*model.weights, model.optimizer.iterations, *own]
    return [value(v) for v in variables] + slots(model)


def assert_equal(model, reference):
    assert_all_equal(state(model), state(reference))


def with_optimizers(forms, works):
    """Each policy before and after, and either with each form, with the optimizers in turn."""
    cases = []
    for i, (before, after, form) in enumerate(pairs(POLICIES, POLICIES, forms)):
        optimizers = [o for o in OPTIMIZERS if works(o, before, after, form)]
        if optimizers:
            cases.append((optimizers[i % len(optimizers)], before, after, form))
    return cases


def trains_on(optimizer, before, after, form):
    if before == "mixed_float16":
        return True
    if form == "h5":  # Models of Keras 3 with an optimizer of its own do not train on after it.
        return not IS_KERAS_3
    # Keras 2 saves nothing of a legacy optimizer of its own in its new formats.
    return not optimizer.startswith("legacy")


def loads_weights(optimizer, before, after, form):
    if form[0] != "weights":
        return True
    # Keras loads no optimizer of a wrapped one's file, and says so.
    return trains_on(optimizer, before, after, form) and not before == "mixed_float16" != after


@pytest.mark.parametrize(
    ("optimizer", "before", "after", "form"), with_optimizers(["keras", "h5"], trains_on)
)
@pytest.mark.filterwarnings("ignore:The model .*Its own policy")  # which no layer follows
@pytest.mark.filterwarnings("ignore:The file holds no")
def test_a_saved_model_goes_on_bitwise_whatever_the_policy_at_loading(
    optimizer, before, after, form, tmp_path
):
    set_policy(before, 2.0**20)  # The first steps overflow.
    model = trained(optimizer, range(5))
    path = save(model, form, str(tmp_path / "model"))
    set_policy(after, 2.0**10)
    again = load(path, form)
    is_scaled = [isinstance(m.optimizer, keras_mp.LossScaleOptimizer) for m in (model, again)]
    if before == "mixed_float16":
        assert is_scaled == [True, True]
        assert int(again.optimizer.steps_skipped) > 0
        # What was loaded can be saved at once.
        again.save(str(tmp_path / "again.keras"))
        assert_equal(tf.keras.models.load_model(str(tmp_path / "again.keras")), model)
    for _ in going_on(model, again):
        if is_scaled[0] == is_scaled[1]:
            assert_equal(again, model)
        else:  # A float32 model that got a loss scale, in powers of two, from the global policy.
            assert_all_equal(again.get_weights(), model.get_weights())
            assert_all_equal(slots(again), slots(model))


@pytest.mark.parametrize(
    ("optimizer", "before", "after", "form"),
    [
        *with_optimizers(
            [("checkpoint", make_model), ("checkpoint", trained), ("weights", make_model)],
            loads_weights,
        ),
        (OPTIMIZERS[0], "float32", "mixed_float16", ("weights", make_model)),
    ],
)
def test_weights_go_on_under_another_policy(optimizer, before, after, form, tmp_path):
    form, make = form
    # The first steps overflow, but not where a run that skips none is to be compared with.
    initial_scale = 2.0**20 if before == after else 2.0**10
    set_policy(before, initial_scale)
    model = trained(optimizer, range(5))
    path = save(model, form, str(tmp_path / "model"))
    set_policy(after, initial_scale)
    # A file of weights has no loss scale of a model that was not scaled.
    says = pytest.warns(keras_mp.MixedPrecisionWarning, match="The file holds no")
    is_told = form == "weights" and before != "mixed_float16" == after
    with says if is_told else contextlib.nullcontext() as caught:
        again = load(path, form, lambda: make(optimizer))
    if is_told:
        assert len(ours(caught)) == 1
        assert float(again.optimizer.loss_scale()) == initial_scale
    for i in going_on(model, again):
        if before == after:
            assert_equal(again, model)
            continue
        assert int(value(again.optimizer.iterations)) == int(value(model.optimizer.iterations))
        # The runs differ by what 16 bits round. Adam moves a weight by the learning rate at most
        # where it has its slots, and from new slots by all of it in the first step.
        for found, reference in zip(again.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(found, reference, atol=0.004 * (i - 4))


@pytest.mark.skipif(IS_KERAS_3, reason="Only Keras 2 loads a SavedModel as a model.")
@pytest.mark.parametrize(
    ("optimizer", "before", "after", "form"), with_optimizers(["saved_model"], lambda *case: True)
)
def test_a_saved_model_of_keras_2_keeps_its_weights_and_its_loss_scale(
    optimizer, before, after, form, tmp_path
):
    set_policy(before, 2.0**20)
    model = trained(optimizer, range(5))
    is_scaled = before == "mixed_float16"
    says = pytest.warns(keras_mp.MixedPrecisionWarning, match="with a new optimizer")
    with says if is_scaled else contextlib.nullcontext():
        path = save(model, form, str(tmp_path / "model"))
    set_policy(after, 2.0**10)
    again = load(path, form)
    assert_all_equal(again.get_weights(), model.get_weights())
    if is_scaled:
        of_models = [one.optimizer for one in (again, model)]
        assert [type(one) for one in of_models] == [keras_mp.LossScaleOptimizer] * 2
        assert len({type(one.inner_optimizer) for one in of_models}) == 1
        assert float(again.optimizer.loss_scale()) == float(model.optimizer.loss_scale())
        assert int(again.optimizer.steps_skipped) == int(model.optimizer.steps_skipped) > 0
    step(again, 5)
