"""Each sentence of `advise` is put to the test: by doing what it says, on 20 models and more that
suffer, and on as many healthy ones, of which it must say nothing."""

import re

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.numerics.exponents.advise import advise
from keras_mp.numerics.exponents.counting import ExponentHistograms
from keras_mp.numerics.exponents.rows import TOLERANCE
from keras_mp.step.schedule import INITIAL_LOSS_SCALE
from tests.ci.advised_models import HEALTHY, SUFFERING
from tests.numerics.tools import what_if

SCALES = [1.0, 2.0**8, INITIAL_LOSS_SCALE]
IN_FLOAT32 = re.compile(r"^Run `(.+?)` in float32: ")
SCALE = re.compile(
    r"[Ss]tart the loss scale at 2\^(\d+): between 2\^(-?\d+) and 2\^(\d+) (?:no gradient loses "
    r"more than|the other gradients lose no more than) 0\.1 %, in the batch\."
)
AT = re.compile(r"At 2\^(\d+), (.+?) of (.+?) is (below|beyond) (b?float16)\.")
BFLOAT16 = re.compile(
    r"^bfloat16 would lose nothing that float16 loses here, and needs no loss scale: of [\d,]+ "
    r"values none becomes zero or infinite, in the batch\. \(It keeps 8 bits of each value, "
    r"float16 11\.\)$"
)
WEIGHTS = re.compile(
    r"^The weights of `(.+?)` reach (\S+)\. If training has made them so large, it has diverged: "
    r"lower the learning rate, and restart from earlier weights\.$"
)


def run(case, model, dtype, scales):
    x, y = case.batch()
    return what_if(model, x, y, loss=case.loss, dtype=dtype, scales=scales)


def lost_outputs(result):
    """The layers that lose what they return: no healthy layer here is off by a tenth of that."""
    of_run = result[result.scales[0]]
    return {
        path
        for (kind, path), lost in of_run.items()
        if kind == "output" and (lost.infinite or lost.error > 0.05)
    }


def do(case, model, advice, dtype):
    """Does what each sentence says, and checks what it has promised. Returns the model."""
    after, lost_before, lost_after = model, set(), set()
    if advice.policies:
        after = keras_mp.convert(model, advice.policies)
        lost_before, lost_after = (
            lost_outputs(run(case, each, dtype, [1.0])) for each in (model, after)
        )
    for sentence in advice.sentences:
        layer, scale = IN_FLOAT32.match(sentence), SCALE.search(sentence)
        weights = WEIGHTS.match(sentence)
        assert layer or scale or weights or BFLOAT16.match(sentence), f"unknown: {sentence}"
        if weights:
            assert weights[1] in advice.policies
            kernel, *_ = model.get_layer(weights[1]).get_weights()
            assert np.abs(kernel).max() == float(weights[2])
        if layer:
            assert advice.policies[layer[1]] == "float32"
            is_of_gradient = re.search("the gradient of|% of `[^`]+` is ", sentence)
            other = re.search("the output of `(.+?)`", sentence)
            loses = layer[1] if other is None else other[1]
            assert loses in lost_before or is_of_gradient
            # Behind it others may lose what they could not lose before: the next advice.
            assert loses not in lost_after
        if scale:
            best, low, high = (2.0 ** int(exponent) for exponent in scale.groups())
            assert advice.loss_scale == best
            result = run(case, after, dtype, [low, best, high])
            for each in (low, best, high):
                lossy = result.losses(each, TOLERANCE)
                assert not set(lossy) - result.noise, (each, lossy)
        at = AT.search(sentence)
        if at:
            result = run(case, model, dtype, [2.0 ** int(at[1])])
            path = re.search("`(.+?)`", at[3])[1]
            kind = "output gradient" if "output" in at[3] else "gradient"
            lost = result[2.0 ** int(at[1])][kind, path]
            assert lost.infinite if at[4] == "beyond" else lost.zero
        if BFLOAT16.match(sentence):
            in_bfloat16 = keras_mp.convert(model, "mixed_bfloat16")
            result = run(case, in_bfloat16, "bfloat16", [1.0])
            assert not lost_outputs(result)
            assert advise(result, "bfloat16").sentences == []
    return after


@pytest.mark.parametrize("name", SUFFERING)
def test_a_model_that_follows_advice_to_its_end_loses_nothing(name):
    case = SUFFERING[name]
    model, dtype = case.model(), case.dtype
    assert lost_outputs(run(case, model, dtype, SCALES)) or case.factor != 1
    scale = INITIAL_LOSS_SCALE
    for _ in range(6):
        advice = advise(run(case, model, dtype, SCALES), dtype)
        if str(advice) == "Nothing is lost.":
            break
        model = do(case, model, advice, dtype)
        if advice.loss_scale:
            scale = advice.loss_scale
            model.compile(keras_mp.LossScaleOptimizer("sgd", scale))
    assert advice == ([], {}, None)
    result = run(case, model, dtype, [scale if dtype == "float16" else 1.0])
    assert not lost_outputs(result)
    lossy = result.losses(result.scales[0], TOLERANCE)
    assert not set(lossy) - result.noise
    x, _ = case.batch()
    exact = keras_mp.convert(model, "float32")
    difference = np.linalg.norm(model(x) - exact(x)) / np.linalg.norm(exact(x))
    assert difference < {"float16": 0.02, "bfloat16": 0.1}[dtype]


def losses_of_training(case, policy):
    """Five steps of one batch, and how many were skipped."""
    model = keras_mp.convert(case.model(), policy)
    x, y = case.batch()
    optimizer = keras_mp.LossScaleOptimizer(
        tf.keras.optimizers.SGD(0.01 / case.factor),
        "dynamic" if policy == "mixed_float16" else 1,
    )
    losses = []
    for _ in range(5):
        with tf.GradientTape() as tape:
            loss = case.loss(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        losses.append(float(loss))
    return np.array(losses), int(optimizer.steps_skipped)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_is_told_nothing_and_trains(name):
    case = HEALTHY[name]
    advice = advise(run(case, case.model(), case.dtype, SCALES), case.dtype)
    assert advice == ([], {}, None)
    expected, _ = losses_of_training(case, "float32")
    losses, skipped = losses_of_training(case, f"mixed_{case.dtype}")
    assert skipped == 0
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(losses, expected, rtol=0.02)


FIX = re.compile(
    r"^Fix the loss scale at 2\^(\d+): between 2\^(-?\d+) and 2\^(\d+) no gradient loses more than "
    r"0\.1 %, in 1 of 1 steps\. That only covers finite gradients\. .* a dynamic loss scale finds "
    r"it\.$"
)


def report_of(case, model, optimizer, steps=2, **kinds):
    """Some steps of one batch, counted."""
    histograms = ExponentHistograms(model, every=1, optimizer=optimizer, **kinds)
    x, y = case.batch()
    for _ in range(steps):
        with histograms.step():
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(case.loss(y, model(x, training=True)))
            gradients = tape.gradient(scaled, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return histograms.read()


def sgd(rate, *scale):
    return keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(rate), *scale)


def test_a_report_of_infinite_gradients_has_the_loss_scale_move_which_finds_one():
    case = SUFFERING["gradients that are too large for the loss scale"]
    unknown = advise(report_of(case, case.model(), sgd(1e-9, INITIAL_LOSS_SCALE), steps=1))
    assert unknown.loss_scale is None
    assert re.match(
        r"Use a dynamic loss scale, which finds one: at 2\^15 all of `first/kernel` \(and of "
        r"3 more\) is infinite or NaN, in 1 of 1 steps, so its size is unknown\.",
        str(unknown),
    )
    model, moving = case.model(), sgd(1e-9)
    advice = advise(report_of(case, model, moving, steps=12))
    assert 0 < int(moving.steps_skipped) < 12
    assert str(advice) == "Nothing is lost."
    found = float(moving.loss_scale)
    result = run(case, model, "float16", [found])
    assert not set(result.losses(found, TOLERANCE)) - result.noise


def test_a_report_of_gradients_of_which_some_are_infinite_names_a_scale_that_is_good():
    case = SUFFERING["gradients that are too large for the loss scale"]
    # A fixed scale skips no step: what is infinite goes into this model's weights.
    advice = advise(report_of(case, case.model(), sgd(1e-9, 2.0**10), steps=1))
    model = case.model()
    best, low, high = (2.0 ** int(exponent) for exponent in FIX.match(str(advice)).groups())
    assert advice.loss_scale == best
    result = run(case, model, "float16", [low, best, high])
    for each in (low, best, high):
        assert not set(result.losses(each, TOLERANCE)) - result.noise
    assert str(advise(report_of(case, model, sgd(1e-9, best)))) == "Nothing is lost."


def test_a_report_that_does_not_know_has_check_asked_which_does():
    case = SUFFERING["gradients that are too small for the loss scale"]
    model = case.model()
    advice = advise(report_of(case, model, sgd(1.0, 1.0)))
    assert str(advice).endswith(
        "Whether it is zero in float32, too, is unknown: `keras_mp.numerics.check` tells."
    )
    path = re.search("of `(.+?)`", str(advice))[1]
    assert run(case, model, "float16", [1.0])[1.0]["gradient", path].zero > 0


def test_a_report_of_weights_that_stay_names_the_optimizer_that_moves_them():
    case = HEALTHY["dense in bfloat16"]
    model = case.model()
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="keeps variables in bfloat16"):
        model = keras_mp.convert(model, "bfloat16")
    inner = tf.keras.optimizers.SGD(1e-4)
    advice = advise(
        report_of(case, model, keras_mp.LossScaleOptimizer(inner, 1), updates=True), "bfloat16"
    )
    assert advice.sentences[-1].startswith("Compile the model with keras_mp.MasterWeightOptimizer")
    cured = keras_mp.LossScaleOptimizer(
        keras_mp.MasterWeightOptimizer(tf.keras.optimizers.SGD(1e-4)), 1
    )
    after = advise(report_of(case, model, cured, updates=True), "bfloat16")
    assert str(after) == "Nothing is lost."
